"""Sampling groups in the buffer: trained on whole or not at all, whatever happens to single members."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from megatron_sao.buffer.store import Store
from megatron_sao.data.tasks import epoch_order
from tests.store_bench import EVAL_TASKS, TASKS, Bench, evaluate, refused
from tests.trajectories import make_config


class GroupBench(Bench):
    """Trajectories are named label#member@attempt."""

    def __init__(self, directory, group_size=2, batch_size=4, max_staleness=1, **sections):
        self.group_size = group_size
        rl = {"group_size": group_size, "batch_size": batch_size, "max_staleness": max_staleness}
        super().__init__(directory, rl=rl, algorithm={"advantage": "group"}, **sections)

    def play(self, lease, version="1.0", **changes):
        member = lease["epoch"] % self.group_size
        return super().play(lease, version, **({"id": f"{lease['group']}#{member}@{lease['attempt']}"} | changes))

    def batch(self, step, incarnation=1, stage="rl", batch_size=None, policy_version=None):
        return super().batch(step, incarnation, stage, batch_size or self.config.rl.batch_size, policy_version)

    def groups(self, count):
        """Fresh leases, a list per group."""
        leases = self.lease(count * self.group_size)
        return [leases[i : i + self.group_size] for i in range(0, len(leases), self.group_size)]

    def lose(self, lease, how):
        """End one attempt without a trajectory to train on."""
        if how == "failure":
            assert self.play(lease, failure="sandbox crashed") == "dropped"
        elif how == "release":
            self.store.visits.release(int(lease["visit_id"]), lease["attempt"], "engine lost")
        else:
            self.wait(130)

    def wait(self, seconds):
        """Leases that nobody renews expire after 120 s; the engine stays clean."""
        version = self.store.current_version()
        self.clock.now += seconds
        self.store.engines.heartbeat("e")
        self.push(self.store.incarnation(), version)


def members(ids):
    """The manifest as label#member, without attempts."""
    return None if ids is None else [id.partition("@")[0] for id in ids]


def names(*leases):
    return [f"{lease['group']}#{lease['epoch'] % 2}" for lease in leases]


@pytest.fixture
def bench(tmp_path):
    bench = GroupBench(tmp_path)
    bench.train()
    yield bench
    bench.store.close()


# Leases


def test_each_task_is_leased_group_size_times_in_a_row_in_the_order_of_each_pass(tmp_path):
    bench = GroupBench(tmp_path, group_size=3, batch_size=30, max_staleness=0, seed=3)
    bench.train()
    leases = bench.lease(4)
    bench.reopen()  # in the middle of a group
    leases += bench.lease(1) + bench.lease(100)
    order = [(f"task{i}", 0) for i in epoch_order(8, 3, 0)] + [(f"task{i}", 1) for i in epoch_order(8, 3, 1)[:2]]
    assert [lease["group"] for lease in leases] == [f"{task}/{number}" for task, number in order for _ in range(3)]
    assert [lease["task"]["id"] for lease in leases] == [task for task, _ in order for _ in range(3)]
    assert [lease["epoch"] for lease in leases] == [3 * number + member for _, number in order for member in range(3)]
    bench.store.close()


def test_visits_without_groups_and_evaluations_have_no_label(tmp_path, bench):
    evaluate(bench)
    assert {lease["group"] for lease in bench.lease(3)} == {None}
    single = Bench(tmp_path / "single")
    single.train()
    assert single.lease()[0]["group"] is None
    single.store.close()


# Submissions


@pytest.mark.parametrize("label", [None, "task0", "another/0"])
def test_a_trajectory_under_another_label_than_its_leases_is_refused(bench, label):
    (lease,) = bench.lease()
    refusal = bench.play(lease, group=label)
    assert refusal.status == 422
    assert f"group: {label!r}, but the lease of this visit says {lease['group']!r}" in str(refusal)
    assert bench.play(lease) == "accepted"


def test_without_groups_and_in_evaluations_a_label_is_refused(tmp_path, bench):
    evaluate(bench, count=1)
    (lease,) = bench.lease(1)
    assert "group: 'eval0/0'" in str(bench.play(lease, group="eval0/0"))
    single = Bench(tmp_path / "single")
    single.train()
    (lease,) = single.lease()
    assert "says None" in str(single.play(lease, group=f"{lease['task']['id']}/0"))
    assert single.play(lease) == "accepted"
    single.store.close()


# Batches


def test_a_batch_holds_the_groups_that_were_complete_first_each_in_member_order(bench):
    a, b, c, d = bench.groups(4)
    for lease in (a[0], b[0], c[1], c[0]):
        assert bench.batch(0) is None
        bench.play(lease)
    assert bench.batch(0) is None  # four trajectories, but one complete group
    for lease in (d[0], b[1], a[1], d[1]):
        bench.play(lease)
    assert members(bench.batch(0)) == names(*c, *b)
    assert members(bench.batch(1)) == names(*a, *d)


def test_a_step_gets_the_same_groups_for_ever(bench):
    a, b, c, d = bench.groups(4)
    for lease in (d[1], b[0], a[1], d[0], b[1]):
        bench.play(lease)
    first = bench.batch(0)
    for lease in (a[0], c[1]):
        bench.play(lease)
    bench.reopen()
    bench.play(c[0])
    assert bench.batch(0) == first
    bench.train(0)
    assert bench.batch(0, incarnation=2) == first
    assert [batch["ids"] for batch in bench.store.archive.recorded_batches()] == [first]
    assert members(bench.batch(1, incarnation=2, policy_version=0)) == names(*a, *c)


def test_a_group_half_played_when_the_buffer_stops_is_completed_afterwards(bench):
    a, b = bench.groups(2)
    for lease in (a[0], b[1]):
        bench.play(lease)
    bench.reopen()
    for lease in (a[1], b[0]):
        assert bench.play(lease) == "accepted"
    assert members(bench.batch(0)) == names(*a, *b)


def test_a_batch_size_that_cuts_a_group_is_refused_and_changes_nothing(bench):
    assert "batch_size=5 is not a multiple of rl.group_size = 2" in refused(422, bench.batch, 0, 1, "rl", 5)
    assert bench.stat("outstanding_limit") == 8


def test_a_directory_filled_with_another_group_size_is_refused(bench):
    assert bench.lease()
    bench.store.close()
    single = make_config(bench.directory)
    refusal = refused(409, Store, bench.directory / "buffer", single, TASKS, EVAL_TASKS)
    assert "rl.group_size = 2, now it is 1" in refusal
    bench.open()


# Lost members


def test_a_stale_member_takes_its_stored_siblings_and_their_late_successors_with_it(bench):
    a, b, c, d = bench.groups(4)
    bench.play(a[0], "1.0")  # a[1] still runs
    bench.play(b[0], "1.2")
    bench.play(b[1], "1.0")
    for lease in (*c, *d):
        bench.play(lease, "1.1")
    assert members(bench.batch(2)) == names(*c, *d)
    assert (bench.stat("dropped_stale"), bench.stat("dropped_incomplete_group")) == (2, 1)
    assert bench.stat("trajectories_stored") == 0
    reasons = {row["id"]: row["reason"] for row in bench.store.archive.index() if row["state"] == "dropped"}
    assert f"group {b[0]['group']} is incomplete for good, member 1 is lost: stale" in reasons[f"{names(b[0])[0]}@1"]
    assert "is aside" in refused(409, bench.store.visits.renew, int(a[1]["visit_id"]), 1)
    assert bench.play(a[1], "1.2") == "dropped"
    assert (bench.stat("trajectories_late"), bench.stat("dropped_incomplete_group")) == (1, 1)
    assert bench.play(a[0], "1.2", id="again") == "duplicate"  # the stale one's visit is spent


def test_of_a_group_that_is_stale_altogether_each_trajectory_counts_once(bench):
    for lease in bench.groups(1)[0]:
        bench.play(lease, "1.0")
    for _ in range(2):
        assert bench.batch(5) is None
    assert (bench.stat("dropped_stale"), bench.stat("dropped_incomplete_group")) == (2, 0)


@pytest.mark.parametrize("how", ["failure", "release", "expiry"])
def test_a_member_without_attempts_left_takes_its_group_with_it(tmp_path, how):
    bench = GroupBench(tmp_path, group_size=3, batch_size=3, max_staleness=0, buffer={"max_attempts": 2})
    bench.train()
    (lost, stored, running) = bench.lease(3)
    bench.play(stored)
    bench.lose(lost, how)
    if how == "expiry":
        _, running = bench.lease(2)
        bench.clock.now += 60
        bench.store.visits.renew(int(running["visit_id"]), running["attempt"])
        bench.wait(70)
    else:
        (lost,) = bench.lease(1)
        assert lost["attempt"] == 2
        bench.lose(lost, how)
    fresh = bench.lease(100)
    assert len(fresh) == 3 and {lease["group"] for lease in fresh} != {stored["group"]}
    assert (bench.stat("train_visits_set_aside"), bench.stat("dropped_incomplete_group")) == (1, 1)
    refused(409, bench.store.visits.renew, int(running["visit_id"]), running["attempt"])
    assert bench.play(running) == "dropped"
    for lease in reversed(fresh):
        assert bench.play(lease) == "accepted"
    assert [id.partition("#")[0] for id in bench.batch(0)] == [fresh[0]["group"]] * 3
    assert bench.stat("dropped_incomplete_group") == 1
    bench.store.close()


@pytest.mark.parametrize("how", ["failure", "release", "expiry"])
def test_an_attempt_that_is_repeated_leaves_its_group_alone(bench, how):
    a, b = bench.groups(2)
    for lease in (a[0], *b):
        bench.play(lease)
    bench.lose(a[1], how)
    again = bench.lease(1)
    assert names(*again) == names(a[1])
    assert bench.play(again[0]) == "accepted"
    assert members(bench.batch(0)) == names(*b, *a)
    assert bench.stat("dropped_incomplete_group") == 0


# Pacing


def test_groups_run_ahead_by_max_staleness_batches_and_no_more(bench):
    leases = bench.lease(3) + bench.lease(100)
    assert len(leases) == 8  # (max_staleness 1 + 1) x batch_size 4
    for lease in leases:
        bench.play(lease)
    assert bench.batch(0)
    assert bench.lease(100) == []  # the batch of step 0 is being trained on
    assert bench.batch(1)
    assert len(bench.lease(100)) == 4


def test_members_that_came_back_are_leased_even_when_a_smaller_batch_leaves_no_room(bench):
    for first, second in bench.groups(4):
        bench.play(first)
        bench.lose(second, "release")
    assert bench.batch(0, batch_size=2) is None
    assert (bench.stat("outstanding"), bench.stat("outstanding_limit")) == (4, 4)
    leases = bench.lease(100)
    assert len(leases) == 4
    for lease in leases:
        assert bench.play(lease) == "accepted"
    assert len(bench.batch(0, batch_size=2)) == 2


def test_without_groups_a_visit_that_came_back_waits_for_room(tmp_path):
    bench = Bench(tmp_path)
    bench.train()
    first, second, *rest = bench.lease(4)
    for lease in (first, second):
        bench.play(lease)
    for lease in rest:
        bench.store.visits.release(int(lease["visit_id"]), 1, "engine lost")
    assert bench.batch(0, batch_size=1)
    assert bench.lease(100) == []
    bench.store.close()


FIRST_STEP = 5  # versions before it are stale from the start


class AnyHistory(RuleBasedStateMachine):
    """Workers, trainer, buffer and clock do what they like; groups of 3, batches of 2 groups."""

    def __init__(self):
        super().__init__()
        # In memory where there is such a place: the machine waits for little else than fsync.
        self.directory = Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
        self.bench = GroupBench(self.directory, group_size=3, batch_size=6, buffer={"max_attempts": 2})
        self.leases = []
        self.accepted = set()
        self.served = {}  # step → ids
        self.step = FIRST_STEP
        self.incarnation = self.bench.train(FIRST_STEP)

    def teardown(self):
        try:
            self.some_batch_always_comes()
            self.batches_hold_whole_groups_and_share_nothing()
        finally:
            self.bench.store.close()
            shutil.rmtree(self.directory)

    def some_batch_always_comes(self):
        """Whatever the history was, honest play from here on fills the batch asked for."""
        waiting_for = self.step
        for _ in range(10):
            self.ask()
            if self.step > waiting_for:
                return
            self.bench.wait(130)  # leases of attempts that nobody plays
            self.work(5, 0)
        raise AssertionError(f"no batch for step {self.step}: {self.bench.store.stats()}")

    @rule(count=st.integers(1, 7))
    def lease(self, count):
        self.leases += self.bench.lease(count)

    @rule(count=st.integers(1, 12), index=st.integers(0, 20))
    def work(self, count, index):
        self.leases += self.bench.lease(count)
        while self.leases:
            self.accept(index, 0)

    @precondition(lambda self: self.leases)
    @rule(index=st.integers(0, 20), lag=st.integers(0, 3))
    def accept(self, index, lag):
        lease = self.leases.pop(index % len(self.leases))
        answer = self.bench.play(lease, f"{self.incarnation}.{self.step - lag}")
        assert answer in ("accepted", "duplicate", "dropped")
        if answer == "accepted":
            self.accepted.add(f"{lease['group']}#{lease['epoch'] % 3}@{lease['attempt']}")

    @precondition(lambda self: self.leases)
    @rule(index=st.integers(0, 20), how=st.sampled_from(["failure", "release"]), forget=st.booleans())
    def fail(self, index, how, forget):
        lease = self.leases[index % len(self.leases)]
        if how == "release":
            self.bench.lose(lease, how)
        else:
            self.bench.play(lease, failure="sandbox crashed", id=f"failed {len(self.leases)} {self.bench.requests}")
        if forget:  # else the attempt is over, but its worker submits nevertheless
            self.leases.remove(lease)

    @rule()
    def expire(self):
        self.bench.wait(130)

    @rule()
    def ask(self):
        ids = self.bench.batch(self.step, self.incarnation)
        if ids is None:
            assert self.step not in self.served
            return
        assert ids == self.served.setdefault(self.step, ids)
        self.step += 1
        self.bench.push(self.incarnation, f"{self.incarnation}.{self.step}")

    @rule()
    def restart_the_buffer(self):
        self.bench.reopen()

    @rule(back=st.integers(0, 2))
    def restart_the_trainer(self, back):
        self.step = max(FIRST_STEP, self.step - back)
        self.incarnation = self.bench.train(self.step)

    @invariant()
    def batches_hold_whole_groups_and_share_nothing(self):
        for ids in self.served.values():
            assert len(ids) == 6 and self.accepted.issuperset(ids)
            for group in (ids[:3], ids[3:]):
                label = group[0].partition("#")[0]
                assert members(group) == [f"{label}#{member}" for member in range(3)]
        trained = [member for ids in self.served.values() for member in members(ids)]
        assert len(trained) == len(set(trained))

    @invariant()
    def rollouts_keep_to_the_limit_and_no_half_group_is_left_behind(self):
        stats = self.bench.store.stats()
        in_open_groups = stats["visits_leased"] + stats["visits_ready"] + stats["trajectories_stored"]
        assert in_open_groups % 3 == 0 and in_open_groups <= stats["outstanding_limit"]


AnyHistory.TestCase.settings = settings(max_examples=25, stateful_step_count=40)
TestAnyHistory = AnyHistory.TestCase
