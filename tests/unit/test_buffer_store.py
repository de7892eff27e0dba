"""What the store keeps, hands out once and forgets: trajectories, batches, and the disk under them."""

import errno
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_sao.buffer.archive import Archive
from megatron_sao.buffer.database import StoreError
from megatron_sao.buffer.segments import Record
from megatron_sao.buffer.store import RESERVED_BYTES, Store
from megatron_sao.config import ConfigError
from megatron_sao.run_identity import run_identity
from tests.store_bench import EVAL_TASKS, TASKS, Bench, evaluate, refused
from tests.trajectories import make_trajectory

# Trajectories


def test_the_first_trajectory_of_a_visit_wins_even_after_its_lease_expired(bench):
    bench.train()
    (lease,) = bench.lease()
    bench.store.visits.release(int(lease["visit_id"]), 1, "slow")
    (again,) = bench.lease()
    assert bench.play(lease) == "accepted"
    assert bench.play(again) == "duplicate"
    assert bench.play(lease) == "duplicate"
    assert "is done" in refused(409, bench.store.visits.renew, int(again["visit_id"]), 2)
    assert bench.stat("trajectories_stored") == 1


def test_a_failure_of_an_older_attempt_leaves_the_running_one_alone(bench):
    bench.train()
    (lease,) = bench.lease()
    bench.store.visits.release(int(lease["visit_id"]), 1, "slow")
    (again,) = bench.lease()
    assert bench.play(lease, failure="sandbox crashed") == "dropped"
    bench.store.visits.renew(int(again["visit_id"]), 2)
    assert bench.play(again) == "accepted"


def test_one_bad_submission_of_a_group_does_not_spoil_the_others(bench):
    bench.train()
    (lease,) = bench.lease()
    good = make_trajectory(task_id=lease["task"]["id"], versions=[("1.0", 2, 6)])
    bad = [
        make_trajectory(id="b1", run_id="other"),
        make_trajectory(id="b2", task_id="never leased", versions=[("1.0", 2, 6)]),
        make_trajectory(id="b3", task_id=lease["task"]["id"], versions=[("2.0", 2, 6)]),
    ]
    answers = bench.store.submit([(item, Record.of(item.encode())) for item in (*bad, good)])
    assert [str(answer).partition(":")[0] for answer in answers] == ["run_id", "task_id", "versions[0]", "accepted"]
    assert [row["id"] for row in bench.store.archive.index()] == ["t"]


def full_bench(directory):
    """Room for two trajectories and a half; batches of one, four of which may be outstanding."""
    size = len(make_trajectory().encode())
    return Bench(directory, buffer={"max_stored_bytes": int(2.5 * size)}, rl={"batch_size": 1, "max_staleness": 3})


def test_a_full_store_refuses_and_takes_the_same_trajectory_after_a_commit(tmp_path):
    bench = full_bench(tmp_path)
    bench.train()
    leases = bench.lease(3)
    assert [bench.play(lease) for lease in leases[:2]] == ["accepted"] * 2
    refusal = bench.play(leases[2])
    assert refusal.status == 429 and "max_stored_bytes" in str(refusal)
    for step in range(2):
        assert bench.batch(step, batch_size=1)
        assert bench.play(leases[2]).status == 429
    bench.store.commit("rl", 2, 1)
    assert bench.play(leases[2]) == "accepted"
    assert bench.stat("accepted_over_limit") == 0
    bench.store.close()


def test_a_store_full_of_uncommitted_batches_takes_what_the_trainer_waits_for(tmp_path):
    """The trainer commits only after more steps, so refusing it these trajectories would be for ever."""
    bench = full_bench(tmp_path)
    bench.train()
    for step in range(8):
        assert bench.batch(step, batch_size=1, policy_version=0) is None
        (lease,) = bench.lease(1)
        assert bench.play(lease) == "accepted"
        assert bench.batch(step, batch_size=1, policy_version=0) == [f"{lease['visit_id']}-1"]
    assert bench.stat("accepted_over_limit") == 6
    (lease,) = bench.lease(1)
    assert bench.play(lease).status == 429  # the trainer has all it asked for
    bench.store.close()


def test_a_full_store_takes_what_an_evaluation_waits_for(tmp_path):
    bench = full_bench(tmp_path)
    bench.train()
    for lease in bench.lease(2):
        assert bench.play(lease) == "accepted"
    evaluate(bench)
    assert [bench.play(lease) for lease in bench.lease(3)] == ["accepted"] * 3
    bench.store.close()


# What is not trained on


def test_every_drop_is_counted_and_listed_with_its_reason(tmp_path):
    bench = Bench(tmp_path, buffer={"max_attempts": 1}, rl={"batch_size": 2, "max_staleness": 1})
    bench.train()
    failed, stale, first, second = bench.lease(4)
    bench.play(failed, failure="sandbox crashed")
    bench.play(failed, id="too late")
    bench.play(stale, "1.0")
    bench.play(first, "1.2")
    bench.play(second, "1.2")
    assert bench.batch(2, batch_size=2) == [f"{lease['visit_id']}-1" for lease in (first, second)]
    listed = {entry["trajectory"]: (entry["counter"], entry["reason"]) for entry in bench.store.drops.list(0, 100)}
    assert listed == {
        f"{failed['visit_id']}-1": ("trajectories_failed", "sandbox crashed"),
        "too late": ("trajectories_late", "nobody waits for it any more: sandbox crashed"),
        f"{stale['visit_id']}-1": ("dropped_stale", "stale: version 0, policy 2"),
    }
    for counter, _ in listed.values():
        assert bench.stat(counter) == 1
    assert bench.stat("dropped_stale_fraction") == 1 / 3
    bench.store.commit("rl", 3, 1)
    bench.reopen()
    (page,) = bench.store.drops.list(1, 1)
    assert page["trajectory"] == "too late" and page["task_id"] == failed["task"]["id"]
    bench.store.close()


def test_tasks_set_aside_are_listed_with_their_last_reason(tmp_path, caplog):
    bench = Bench(tmp_path, buffer={"max_attempts": 2})
    bench.train()
    for _ in range(2):
        poison, other = bench.lease(2)
        bench.store.visits.release(int(other["visit_id"]), other["attempt"], "worker stopped")
        bench.play(poison, failure="sandbox crashed")
    aside = {visit["task_id"]: (visit["attempt"], visit["reason"]) for visit in bench.store.visits.aside(0, 10)}
    assert aside == {poison["task"]["id"]: (2, "sandbox crashed"), other["task"]["id"]: (2, "worker stopped")}
    assert bench.store.visits.aside(int(poison["visit_id"]), 10)[0]["task_id"] == other["task"]["id"]
    assert f"train task {poison['task']['id']} is set aside: sandbox crashed" in caplog.text
    bench.store.close()


def test_the_id_of_another_visits_trajectory_is_refused_and_its_visit_stays_open(bench):
    bench.train()
    first, second = bench.lease(2)
    assert bench.play(first, id="taken") == "accepted"
    refusal = bench.play(second, id="taken")
    assert refusal.status == 422 and "another visit's trajectory" in str(refusal)
    assert bench.play(second) == "accepted"


def test_the_index_does_not_grow_with_the_run(tmp_path):
    """What a commit has collected is forgotten by the next one; a repeat of it is still known as one."""
    bench = Bench(tmp_path, rl={"batch_size": 4, "max_staleness": 0})
    bench.train()
    sizes, first = [], None
    for step in range(60):
        leases = bench.lease(4)
        first = first or leases[0]
        for lease in leases:
            assert bench.play(lease) == "accepted"
        assert bench.batch(step, batch_size=4, policy_version=0)
        assert bench.batch(step + 1, batch_size=4, policy_version=0) is None
        bench.store.commit("rl", step + 1, 1)
        sizes.append(sum(path.stat().st_size for path in (tmp_path / "buffer").rglob("*") if path.is_file()))
    assert max(sizes[30:]) == max(sizes[10:30])
    assert bench.play(first) == "duplicate"
    assert "has not been leased" in str(bench.play(first, epoch=first["epoch"] + 1000))
    bench.store.close()


# Batches


def test_a_step_gets_the_oldest_trajectories_and_the_same_ones_for_ever(bench):
    bench.train()
    leases = bench.lease(3)
    order = [leases[2], leases[0], leases[1]]
    for lease in order:
        bench.play(lease)
    ids = [f"{lease['visit_id']}-1" for lease in order]
    assert bench.batch(0) == ids[:2]
    assert bench.batch(1) is None
    bench.reopen()
    assert bench.batch(0) == ids[:2]
    bench.train(0)
    assert bench.batch(0, incarnation=2) == ids[:2]
    assert "batch_size=2" in refused(409, bench.batch, 0, 2, "rl", 3)
    assert "policy_version=0" in refused(409, bench.batch, 0, 2, "rl", 2, 1)


def test_an_older_incarnation_is_refused_everywhere(bench):
    bench.train()
    bench.train()
    store = bench.store
    assert "1 does not rule, 2 does" in refused(409, bench.batch, 0, 1)
    refused(409, store.commit, "rl", 0, 1)
    refused(409, store.mark_engine, "e", "dirty", None, 1)
    refused(409, store.start_evaluation, "rl", 0, 1, "1.0", 1)
    refused(409, store.evaluation_result, "rl", 0, 1)
    refused(409, bench.batch, 0, 3)


def test_a_trajectory_older_than_max_staleness_is_dropped_and_counted_never_trained_on(bench):
    bench.train()
    old, begun_too_early, mixed, fresh = bench.lease(4)
    bench.play(old, "1.0")
    bench.play(begun_too_early, versions=[("1.0", 2, 4), ("1.2", 4, 6)])
    bench.play(mixed, versions=[("1.2", 2, 4), ("1.1", 4, 6)])
    bench.play(fresh, "1.1")
    assert bench.batch(1, batch_size=2, policy_version=2) == ["3-1", "4-1"]
    assert bench.stat("dropped_stale") == 2
    assert bench.play(old) == "duplicate"  # its visit is spent


def test_tokens_of_a_dead_incarnation_are_no_newer_than_the_checkpoint_resumed_from(bench):
    bench.train(policy_version=9)
    for lease in bench.lease(2):
        bench.play(lease, "1.9")
    bench.train(policy_version=4)
    assert bench.batch(6, incarnation=2) is None
    assert bench.stat("dropped_stale") == 2


def test_only_the_versions_of_action_tokens_count_for_staleness(bench):
    bench.train()
    for lease in bench.lease(2):
        bench.play(lease, versions=[("1.0", 0, 2), ("1.5", 2, 6)])
    assert bench.batch(5)


def test_a_commit_collects_what_is_before_it_and_keeps_the_rest(bench):
    bench.train()
    for step in range(3):
        bench.fill(2)
        assert bench.batch(step, policy_version=0)
        bench.reopen()
    segments = bench.directory / "buffer" / "segments"
    assert len(list(segments.glob("*.seg"))) == 3
    bench.store.commit("rl", 1, 1)
    bench.store.commit("rl", 0, 1)
    with pytest.raises(StoreError, match="has committed rl 1") as caught:
        bench.store.register_trainer("test", 0)
    assert caught.value.status == 410
    assert len(list(segments.glob("*.seg"))) == 2
    assert "committed rl 1" in refused(410, bench.batch, 0)
    assert "collected" in refused(410, bench.store.archive.read, "1-1")
    refused(404, bench.store.archive.read, "unknown")
    assert [batch["step"] for batch in bench.store.archive.recorded_batches()] == [1, 2]
    assert bench.batch(1, policy_version=0) == ["3-1", "4-1"]


def test_the_value_stage_comes_before_rl_and_sft_takes_no_batches(bench):
    bench.train()
    bench.fill(2)
    assert bench.batch(7, stage="value", policy_version=0)
    bench.store.commit("rl", 0, 1)
    refused(410, bench.batch, 7, 1, "value")
    assert "demonstrations" in refused(422, bench.batch, 0, 1, "sft")


# The disk


def test_a_second_owner_is_refused_with_a_sentence(bench):
    script = (
        "import sys; from pathlib import Path; from tests.trajectories import make_config\n"
        "from megatron_sao.buffer.store import Store; d = Path(sys.argv[1])\n"
        "Store(d / 'buffer', make_config(d), [], [])"
    )
    other = subprocess.run([sys.executable, "-c", script, str(bench.directory)], capture_output=True, text=True)
    assert other.returncode == 1
    assert "is in use by another buffer process" in other.stderr
    bench.train()


def test_a_directory_filled_from_other_tasks_is_refused(bench):
    bench.store.close()
    Store(bench.directory / "buffer", bench.config, TASKS[:-1], EVAL_TASKS).close()  # nothing has come of them yet
    bench.open()
    bench.train()
    assert bench.lease()
    bench.store.close()
    with pytest.raises(StoreError, match="filled from other tasks"):
        Store(bench.directory / "buffer", bench.config, TASKS[:-1], EVAL_TASKS)
    bench.open()


def test_the_data_of_another_run_is_out_of_reach(bench):
    bench.train()
    assert "not 'test-2'" in refused(409, bench.store.register_trainer, "test-2", 0)
    (lease,) = bench.lease()
    assert bench.play(lease, run_id="test-2").status == 422
    bench.store.close()
    with pytest.raises(StoreError, match="filled by the run 'test', and this is 'test-2'"):
        Store(bench.directory / "buffer", bench.config, TASKS, EVAL_TASKS, run_id="test-2")
    bench.open()


def test_a_run_directory_keeps_its_identity_and_two_never_share_one(tmp_path):
    first = run_identity(tmp_path / "a", "demo")
    assert first == run_identity(tmp_path / "a", "demo") and first.startswith("demo-")
    assert run_identity(tmp_path / "b", "demo") != first
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["run_id"]
    (tmp_path / "a" / "run_id").write_text("")
    with pytest.raises(ConfigError, match="run_id is empty"):
        run_identity(tmp_path / "a", "demo")


def test_parts_that_start_at_once_under_one_process_id_agree_on_the_run(tmp_path):
    for number in range(50):
        with ThreadPoolExecutor(4) as parts:
            identities = set(parts.map(lambda _, n=number: run_identity(tmp_path / str(n), "demo"), range(4)))
        assert len(identities) == 1


def test_a_failing_disk_refuses_the_submission_and_stores_none_of_it(bench, monkeypatch):
    bench.train()
    first, lease = bench.lease(2)
    assert bench.play(first) == "accepted"  # the segment is open now: the next fsync is that of its content

    def fail(_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("megatron_sao.buffer.segments.os.fsync", fail)
        with pytest.raises(StoreError, match="No space left") as caught:
            bench.play(lease)
    assert caught.value.status == 503
    assert bench.stat("trajectories_stored") == 1
    assert bench.play(lease) == "accepted"
    assert [row["state"] for row in bench.store.archive.index()] == ["stored", "stored"]


@pytest.mark.parametrize(
    ("number", "remedy"), [(errno.ENOSPC, "free some disk space"), (errno.EIO, "look at the disk of the run directory")]
)
def test_a_refusal_of_the_disk_names_the_remedy(bench, monkeypatch, number, remedy):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    bench.train()
    (lease,) = bench.lease()
    monkeypatch.setattr("megatron_sao.buffer.segments.os.pwritev", fail)
    with pytest.raises(StoreError, match=rf"cannot write the trajectory: .*{os.strerror(number)}; {remedy}"):
        bench.play(lease)


def test_what_the_index_needs_of_the_disk_no_trajectory_takes(bench, monkeypatch):
    """On a disk that is full to the last byte the trainer could not commit, so nothing would ever be given back."""
    bench.train()
    first, second = bench.lease(2)
    assert bench.play(first) == "accepted"
    size = bench.stat("stored_bytes")
    room = RESERVED_BYTES
    monkeypatch.setattr("os.statvfs", lambda _: SimpleNamespace(f_bavail=room // 4096, f_frsize=4096))
    with pytest.raises(StoreError, match="the last 32 MiB of the disk are kept") as caught:
        bench.play(second)
    assert caught.value.status == 503 and bench.stat("stored_bytes") == size
    assert bench.batch(0, batch_size=1) == ["1-1"]
    room += 2**20
    assert bench.play(second) == "accepted"


def test_an_answer_outlives_a_power_cut(bench):
    """What a commit wrote is on the disk when it returns, which killing the process could not show."""
    assert bench.store._db.scalar("PRAGMA synchronous") == 2  # FULL
    assert bench.store._db.scalar("PRAGMA journal_mode") == "wal"


def test_a_store_that_opens_again_writes_nothing(bench):
    """So that a full disk does not keep it from starting."""
    bench.reopen()
    assert bench.store._db._connection.total_changes == 0


def test_everything_held_can_be_inspected(bench):
    bench.train()
    bench.fill(2)
    row, _ = bench.store.archive.index()
    trajectory = bench.store.archive.trajectory(row["id"])
    assert (row["state"], row["stage"], row["step"], row["versions"]) == ("stored", None, None, ["1.0"])
    assert (row["kind"], row["task_id"], row["epoch"]) == ("train", trajectory.task_id, trajectory.epoch)
    assert (row["num_tokens"], row["num_action_tokens"]) == (trajectory.num_tokens, trajectory.num_action_tokens)
    np.testing.assert_array_equal(trajectory.token_ids, make_trajectory().token_ids)
    ids = bench.batch(0)
    assert [(row["state"], row["stage"], row["step"]) for row in bench.store.archive.index()] == [
        ("assigned", "rl", 0)
    ] * 2
    assert bench.store.archive.recorded_batches() == [{"stage": "rl", "step": 0, "ids": ids}]
    assert "in use by another buffer" in refused(503, Archive.open, bench.directory / "buffer")
    bench.store.close()
    archive = Archive.open(bench.directory / "buffer")
    assert archive.recorded_batches() == [{"stage": "rl", "step": 0, "ids": ids}]
    assert archive.trajectory(ids[0]).id == ids[0]
    archive.close()
    assert "no buffer wrote there" in refused(404, Archive.open, bench.directory)
    bench.open()
