"""Who plays what, and when: leases, pacing, fairness, evaluations, and the engines they need."""

from megatron_sao.data.tasks import epoch_order
from tests.store_bench import Bench, evaluate, refused

# Leases


def test_nothing_is_leased_before_a_trainer_registered_and_an_engine_is_clean(bench):
    bench.store.engines.register("e", "http://e", 1)
    assert bench.lease() == []
    incarnation = bench.store.register_trainer("test", 0)
    assert bench.lease() == []
    bench.push(incarnation, "1.0")
    assert len(bench.lease()) == 1


def test_tasks_come_in_the_shuffled_order_of_each_epoch_and_survive_a_restart(tmp_path):
    bench = Bench(tmp_path, rl={"batch_size": 20, "max_staleness": 0}, seed=3)
    bench.train()
    leases = bench.lease(5)
    bench.reopen()
    leases += bench.lease(7)
    expected = [f"task{i}" for i in epoch_order(8, 3, 0)] + [f"task{i}" for i in epoch_order(8, 3, 1)[:4]]
    assert [lease["task"]["id"] for lease in leases] == expected
    assert [lease["epoch"] for lease in leases] == [0] * 8 + [1] * 4
    assert {lease["attempt"] for lease in leases} == {1}
    bench.store.close()


def test_a_repeated_lease_request_gets_the_same_visits(bench):
    bench.train()
    first = bench.lease(2, "once")
    assert [lease["visit_id"] for lease in bench.lease(2, "once")] == [lease["visit_id"] for lease in first]
    assert bench.stat("visits_leased") == 2


def test_an_expired_lease_goes_out_again_and_a_renewed_one_does_not(bench):
    bench.train()
    kept, lost = bench.lease(2)
    bench.clock.now += 100
    assert bench.store.visits.renew(int(kept["visit_id"]), 1) == 120
    bench.store.engines.heartbeat("e")
    bench.push(1, "1.0")
    bench.clock.now += 100
    bench.store.engines.heartbeat("e")
    bench.push(1, "1.0")
    again = bench.lease(4)
    assert (again[0]["visit_id"], again[0]["attempt"]) == (lost["visit_id"], 2)
    assert kept["visit_id"] not in [lease["visit_id"] for lease in again]
    assert "at attempt 2" in refused(409, bench.store.visits.renew, int(lost["visit_id"]), 1)
    assert bench.stat("leases_expired") == 1


def test_a_restart_gives_every_lease_its_full_time(bench):
    bench.train()
    (lease,) = bench.lease()
    bench.clock.now += 119
    bench.reopen()
    bench.clock.now += 119
    assert bench.store.visits.renew(int(lease["visit_id"]), 1) > 0
    assert bench.stat("leases_expired") == 0


def test_a_visit_is_set_aside_after_its_last_attempt(tmp_path):
    bench = Bench(tmp_path, buffer={"max_attempts": 2}, rl={"batch_size": 1, "max_staleness": 0})
    bench.train()
    (lease,) = bench.lease()
    assert bench.play(lease, failure="sandbox crashed") == "dropped"
    (second,) = bench.lease()
    assert (second["visit_id"], second["attempt"]) == (lease["visit_id"], 2)
    bench.store.visits.release(int(second["visit_id"]), 2, "shutting down")
    bench.store.visits.release(int(second["visit_id"]), 2, "shutting down")
    (other,) = bench.lease()
    assert other["visit_id"] != lease["visit_id"]
    assert bench.play(second) == "dropped"
    for name in ("train_visits_set_aside", "trajectories_failed", "leases_released"):
        assert bench.stat(name) == 1
    assert bench.batch(0, batch_size=1) is None
    bench.store.close()


def test_a_release_of_an_older_attempt_does_not_take_the_visit_from_its_new_holder(bench):
    bench.train()
    (lease,) = bench.lease()
    bench.store.visits.release(int(lease["visit_id"]), 1, "engine lost")
    (again,) = bench.lease()
    bench.store.visits.release(int(lease["visit_id"]), 1, "engine lost")
    assert again["visit_id"] == lease["visit_id"]
    bench.store.visits.renew(int(again["visit_id"]), 2)


# Pacing


def test_rollouts_run_ahead_by_max_staleness_batches_and_no_more(bench):
    bench.train()
    leases = bench.lease(100)
    assert len(leases) == 4  # (max_staleness 1 + 1) x batch_size 2
    for lease in leases:
        bench.play(lease)
    assert bench.lease() == []
    assert bench.batch(0)
    assert bench.lease() == []  # the batch of step 0 is being trained on
    bench.batch(1)
    assert len(bench.lease(100)) == 2  # asking for step 1 finished step 0


def test_a_trainer_that_resumes_behind_recorded_batches_gets_no_rollouts_it_could_not_use(bench):
    bench.train()
    for step in range(3):
        bench.fill(2)
        bench.push(1, f"1.{step}")
        assert bench.batch(step, policy_version=0)
    bench.train(0)
    assert bench.batch(0, incarnation=2)
    assert bench.lease() == []
    bench.batch(2, incarnation=2, policy_version=0)
    assert len(bench.lease(100)) == 2


def test_the_value_stage_paces_by_its_own_batch_size(tmp_path):
    bench = Bench(tmp_path, value={"steps": 1, "batch_size": 3})
    bench.train()
    assert len(bench.lease(100)) == 6
    bench.store.close()


# Fairness


def test_visits_that_are_scarce_go_to_whoever_holds_the_fewest(tmp_path):
    bench = Bench(tmp_path, rl={"batch_size": 12, "max_staleness": 0})
    bench.train()
    ask = bench.store.visits.lease
    greedy = ask("greedy", 100, "r1")
    assert len(greedy) == 12  # nobody else was waiting
    assert ask("a", 100, "r2") is None
    assert ask("b", 2, "r3") is None
    for lease in greedy[:9]:
        bench.store.visits.release(int(lease["visit_id"]), 1, "returned")
    assert ask("greedy", 100, "r4") is not None and held(bench) == {"greedy": 5}
    assert len(ask("a", 100, "r2")) == 5
    assert len(ask("b", 2, "r3")) == 2  # no more than it asked for; the others shared what it left
    assert held(bench) == {"greedy": 5, "a": 5, "b": 2}
    bench.store.close()


def test_a_worker_that_asks_no_more_does_not_hold_visits_from_others(tmp_path):
    bench = Bench(tmp_path, rl={"batch_size": 4, "max_staleness": 0})
    bench.train()
    (lease, *_) = bench.store.visits.lease("a", 4, "r1")
    assert bench.store.visits.lease("gone", 4, "r2") is None
    bench.clock.now += 4
    bench.store.visits.release(int(lease["visit_id"]), 1, "returned")
    assert len(bench.store.visits.lease("a", 4, "r3")) == 1
    bench.store.close()


def held(bench):
    rows = bench.store.visits._db.rows("SELECT worker, count(*) AS n FROM visits WHERE state='leased' GROUP BY worker")
    return {row["worker"]: row["n"] for row in rows}


# Evaluations


def test_evaluation_visits_go_first_once_each_and_outside_the_pacing(bench):
    bench.train()
    bench.lease(100)
    evaluate(bench)
    evaluate(bench)
    leases = bench.lease(100)
    assert [lease["task"]["id"] for lease in leases] == ["eval0", "eval1", "eval2"]
    assert {(lease["kind"], lease["version"]) for lease in leases} == {("eval", "1.0")}
    for lease in reversed(leases):
        assert bench.store.evaluation_result("rl", 0, 1) is None
        assert bench.play(lease) == "accepted"
    assert bench.store.evaluation_result("rl", 0, 1) == [f"{lease['visit_id']}-1" for lease in leases]
    evaluate(bench)
    assert bench.lease(100) == []
    assert bench.batch(0) is None  # held-out trajectories never enter a batch


def test_evaluation_visits_wait_for_an_engine_with_the_pinned_version(bench):
    bench.train()
    bench.lease(100)
    evaluate(bench, version="1.1")
    assert bench.lease(100) == []
    bench.push(1, "1.1")
    assert len(bench.lease(100)) == 3


def test_a_failed_evaluation_visit_is_retried_then_counts_as_failed(tmp_path):
    bench = Bench(tmp_path, buffer={"max_attempts": 2})
    bench.train()
    evaluate(bench, count=2)
    good, bad = bench.lease(2)
    bench.play(good)
    assert bench.play(bad, version="1.1") == "dropped"  # not the pinned version
    (bad,) = [lease for lease in bench.lease(1) if lease["kind"] == "eval"]
    assert bench.store.evaluation_result("rl", 0, 1) is None
    assert bench.play(bad, failure="sandbox crashed") == "dropped"
    assert bench.store.evaluation_result("rl", 0, 1) == [f"{good['visit_id']}-1"]
    assert bench.stat("eval_visits_set_aside") == 1
    bench.store.close()


def test_an_evaluation_survives_a_buffer_restart_and_is_void_after_a_trainer_restart(bench):
    bench.train()
    evaluate(bench)
    leases = bench.lease(3)
    bench.play(leases[0])
    bench.reopen()
    bench.play(leases[1])
    assert bench.store.evaluation_result("rl", 0, 1) is None
    bench.train()
    assert "start it" in refused(404, bench.store.evaluation_result, "rl", 0, 2)
    assert bench.play(leases[2]) == "dropped"
    evaluate(bench, version="2.0", incarnation=2)
    again = bench.lease(3)
    for lease in again:
        bench.play(lease, "2.0")
    assert len(bench.store.evaluation_result("rl", 0, 2)) == 3
    bench.train()
    assert len(bench.store.evaluation_result("rl", 0, 3)) == 3  # one that ended stays


def test_more_evaluation_prompts_than_there_are_is_an_error(bench):
    bench.train()
    assert "data.eval holds 3" in refused(422, evaluate, bench, 0, "1.0", 4)


# Engines


def states(bench):
    return {engine["id"]: (engine["state"], engine["version"]) for engine in bench.store.engines.list()}


def test_an_engine_is_dirty_until_a_push_and_dirty_again_for_a_new_trainer(bench):
    bench.train()
    assert states(bench) == {"e": ("clean", "1.0")}
    bench.reopen()
    assert states(bench) == {"e": ("clean", "1.0")}
    assert bench.store.current_version() == "1.0"
    bench.push(1, "1.3")
    assert bench.store.current_version() == "1.3"
    bench.store.register_trainer("test", 2)
    assert states(bench) == {"e": ("dirty", None)}
    assert bench.store.current_version() == "2.2"


def test_an_engine_that_registers_is_dirty_until_a_push_that_began_afterwards(bench):
    """Whatever its row said before: the server behind it has started anew."""
    bench.store.register_trainer("test", 0)
    for _ in range(2):
        bench.store.engines.register("e", "http://e", 1)
        assert states(bench) == {"e": ("dirty", None)}
        assert bench.lease() == [] and bench.stat("engines_dirty") == 1
        refused(409, bench.store.mark_engine, "e", "clean", "1.0", 1)
        assert states(bench) == {"e": ("dirty", None)}
        bench.push(1, "1.0")
        assert states(bench) == {"e": ("clean", "1.0")}


def test_an_engine_that_registered_anew_during_a_push_does_not_become_clean(bench):
    bench.train()
    bench.store.mark_engine("e", "dirty", None, 1)
    bench.store.engines.register("e", "http://e", 1)
    assert "push again" in refused(409, bench.store.mark_engine, "e", "clean", "1.1", 1)
    bench.push(1, "1.1")
    bench.store.mark_engine("e", "clean", "1.1", 1)  # a repeated request


def test_a_sick_engine_gets_nothing_and_comes_back_dirty(bench):
    bench.train()
    assert bench.store.engines.heartbeat("e", "no token within 5 s")["state"] == "sick"
    assert bench.lease() == [] and bench.stat("engines_sick") == 1
    assert bench.store.engines.heartbeat("e", "no token within 5 s")["state"] == "sick"
    assert bench.store.engines.heartbeat("e")["state"] == "dirty"
    bench.push(1, "1.0")
    assert bench.store.engines.heartbeat("e")["state"] == "clean"


def test_an_engine_without_heartbeats_is_down_and_comes_back_dirty(bench):
    bench.train()
    bench.clock.now += 14
    assert bench.store.engines.heartbeat("e")["state"] == "clean"
    bench.clock.now += 16
    assert states(bench)["e"][0] == "down"
    assert bench.lease() == []
    assert bench.store.engines.heartbeat("e")["state"] == "dirty"
    refused(404, bench.store.engines.heartbeat, "unknown")
    refused(404, bench.store.mark_engine, "unknown", "dirty", None, 1)
    bench.push(1, "1.0")
    bench.clock.now += 16
    assert bench.store.engines.heartbeat("e")["state"] == "dirty", "though nobody saw that it was down"


def test_an_engine_that_was_sick_or_down_is_dirty_after_a_restart_of_the_buffer(bench):
    bench.train()
    bench.store.engines.heartbeat("e", "no token within 5 s")
    bench.reopen()
    assert states(bench) == {"e": ("dirty", None)}
    bench.push(1, "1.0")
    bench.clock.now += 16
    assert states(bench) == {"e": ("down", None)}, "a trainer that reads this passes it by"
    bench.reopen()
    assert states(bench) == {"e": ("dirty", None)}
    bench.push(1, "1.0")
    bench.reopen()
    assert states(bench) == {"e": ("clean", "1.0")}


def test_a_push_to_an_engine_that_falls_sick_or_down_leaves_it_dirty(bench):
    """Else it would be clean after a restart of the buffer, with weights that later pushes have passed by."""
    bench.train()
    bench.store.engines.heartbeat("e", "no token within 5 s")
    assert "been sick" in refused(409, bench.push, 1, "1.1")
    bench.store.engines.heartbeat("e")
    bench.push(1, "1.1")
    bench.clock.now += 16
    refused(409, bench.push, 1, "1.2")
    bench.store.engines.heartbeat("e")
    for sick, seconds in (("no token within 5 s", 0), (None, 16)):
        bench.store.mark_engine("e", "dirty", None, 1)
        bench.clock.now += seconds
        bench.store.engines.heartbeat("e", sick)
        bench.store.engines.heartbeat("e")
        refused(409, bench.store.mark_engine, "e", "clean", "1.3", 1)  # it is well again, and may have restarted
    assert states(bench) == {"e": ("dirty", None)}


def test_an_engine_that_stays_away_is_written_once(bench):
    bench.train()
    bench.clock.now += 16
    states(bench)
    written = bench.store._db._connection.total_changes
    assert states(bench) == {"e": ("down", None)}
    assert bench.lease() == []
    assert bench.store._db._connection.total_changes == written
