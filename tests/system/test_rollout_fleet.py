"""Episodes in flight while parts of the fleet die: real processes, and every visit is accounted for.

The buffer, two workers and two engines are processes; the engines are stubs that speak SGLang's ``/generate``. The
test plays the trainer and the sidecars.
"""

import threading
import time
from collections import Counter

import httpx
import numpy as np
import pytest

from megatron_sao.buffer.client import BufferError
from megatron_sao.buffer.database import Database
from megatron_sao.buffer.store import Store
from megatron_sao.data.tasks import load_tasks
from tests.system.buffer_process import PROCESSES, TOKEN, Buffer, on_async
from tests.system.fleet_processes import run_engine, run_worker
from tests.trajectories import make_config

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

BATCH, STALENESS = 8, 3


class Fleet:
    def __init__(self, directory):
        self.directory = directory
        rollout = {
            "environment": "tests.system.fleet_processes:TwoTurns", "max_tokens": 60, "concurrency": 8,
            "max_retries": 20,
        }  # fmt: skip
        self.config = make_config(
            directory, rollout=rollout, rl={"batch_size": BATCH, "max_staleness": STALENESS},
            buffer={"lease_seconds": 8, "max_attempts": 20},
        )  # fmt: skip
        self.buffer = Buffer(directory, self.config)
        (directory / "config.json").write_text('{"vocab_size": 7, "max_position_embeddings": 100}')
        self.buffer.start()
        self.trainer = self.buffer.client()
        self.step, self.trained, self.batches = 0, [], {}
        self.engines, self.urls, self.workers = {}, {}, {}
        self._beating = True
        self._sidecars = threading.Thread(target=self._beat)

    def start(self):
        for name in ("engine-0", "engine-1"):
            self.start_engine(name)
        for name in ("worker-0", "worker-1"):
            self.start_worker(name)
        self.register_trainer()
        self._sidecars.start()

    def stop_sidecars(self):
        self._beating = False
        self._sidecars.join()

    def stop(self):
        self.stop_sidecars()
        for process in (*self.workers.values(), *self.engines.values()):
            end(process)
        self.buffer.kill()

    def start_engine(self, name):
        address = self.directory / f"{name}.url"
        address.unlink(missing_ok=True)
        self.engines[name] = PROCESSES.Process(target=run_engine, args=(address, int(name[-1])), daemon=True)
        self.engines[name].start()
        wait_until(lambda: address.exists() and address.read_text().endswith("\n"), "engine")
        self.urls[name] = address.read_text().strip()
        on_async(self.buffer, lambda client: client.register_engine(name, self.urls[name], 1))

    def start_worker(self, name):
        arguments = (self.directory, self.buffer.url, TOKEN, name)
        self.workers[name] = PROCESSES.Process(target=run_worker, args=arguments, daemon=True)
        self.workers[name].start()

    def register_trainer(self):
        self.incarnation = self.trainer.register_trainer("test", self.step)
        self.push()

    def push(self):
        version = f"{self.incarnation}.{self.step}"
        engines = [e for e in self.trainer.engines() if e.state != "down" and self.engines[e.id].is_alive()]
        for engine in engines:  # all before the first is pushed to, or what is played meanwhile goes to the others
            self.trainer.mark_engine(engine.id, "dirty", None, self.incarnation)
        for engine in engines:
            httpx.post(f"{engine.url}/push", json={"version": version}, trust_env=False, timeout=60)
        for engine in engines:
            try:
                self.trainer.mark_engine(engine.id, "clean", version, self.incarnation)
            except BufferError as error:
                assert error.status == 409  # registered anew meanwhile; the next push reaches it

    def train(self, steps):
        """That many steps; every batch is checked as a trainer would, and remembered."""
        for _ in range(steps):
            deadline = time.monotonic() + 90
            while (entries := self.trainer.batch("rl", self.step, self.incarnation, BATCH, self.step, 1.0)) is None:
                assert time.monotonic() < deadline, self.trainer.stats()
                assert all(worker.is_alive() for worker in self.workers.values())
            ids = [entry.id for entry in entries]
            assert self.batches.setdefault(self.step, ids) == ids
            self.trained += [check(self.trainer.trajectory(id)) for id in ids]
            self.step += 1
            self.push()

    def until_episodes_are_in_flight(self, *names):
        """Ask for batches, which lets new episodes begin, until each of these engines (default: all) plays some. They
        stand still with them until the next push, so that what comes next finds them in flight, however late."""
        for _ in range(30):
            for name in names or self.engines:
                httpx.post(f"{self.urls[name]}/stand_still", trust_env=False, timeout=60)
            self.trainer.batch("rl", self.step, self.incarnation, BATCH, self.step, 0)  # the next train() gets the same
            for _ in range(50):
                if all(self.in_flight(name) for name in names or self.engines):
                    return
                time.sleep(0.02)
            self.push()
            self.until_all_is_played()
            self.train(1)
        raise AssertionError(f"no episodes in flight: {self.trainer.stats()}")

    def until_all_is_played(self):
        """Nobody asks for a batch meanwhile, so that once the limit is reached, nothing new begins."""

        def all_is_played():
            stats = self.trainer.stats()
            begun = stats["visits_leased"] + stats["visits_ready"]
            return begun == 0 and stats["outstanding"] >= stats["outstanding_limit"]

        wait_until(all_is_played, "end")

    def played(self):
        """Everything that was played, by id, whatever became of it: what a fault held up may be dropped as stale."""
        ids = [entry["id"] for entry in self.trainer.index() if entry["kind"] == "train"]
        return {id: check(self.trainer.trajectory(id)) for id in ids}

    def played_since(self, before):
        return [trajectory for id, trajectory in self.played().items() if id not in before]

    def in_flight(self, name):
        if not self.engines[name].is_alive():
            return 0
        return httpx.get(f"{self.urls[name]}/state", trust_env=False, timeout=60).json()["in_flight"]

    def _beat(self):
        while self._beating:
            for name in list(self.engines):
                if self.engines[name].is_alive():
                    try:
                        on_async(self.buffer, lambda client, name=name: client.heartbeat_engine(name))
                    except BufferError as error:
                        assert error.status == 404
            time.sleep(0.5)


def end(process):
    process.kill()
    process.join()


def wait_until(condition, what, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {seconds} s"
        time.sleep(0.05)


def check(trajectory):
    """Complete: two turns of eight tokens to the token, each with a log-probability and a version."""
    trajectory.validate(vocab_size=7, max_tokens=60)
    assert trajectory.failure is None and trajectory.loss_mask.tolist() == [0] * 3 + [1] * 8 + [0] * 2 + [1] * 8
    assert (trajectory.logprobs[trajectory.loss_mask == 1] < 0).all() and np.isfinite(trajectory.logprobs).all()
    return trajectory


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    fleet = Fleet(tmp_path_factory.mktemp("fleet"))
    try:
        fleet.start()
        yield fleet
        account(fleet)
    finally:
        fleet.stop()


def account(fleet):
    """At the end: every visit is done with one trajectory, or open; every trajectory was trained once or is there."""
    for worker in fleet.workers.values():
        worker.terminate()
    for worker in fleet.workers.values():
        worker.join(90)
        assert worker.exitcode == 0, "a worker did not end in good order"
    stats, dropped = fleet.trainer.stats(), fleet.trainer.dropped(limit=1000)
    fleet.stop_sidecars()  # before the buffer, or they would wait for it
    fleet.buffer.kill()
    tasks = [load_tasks(path) for path in (fleet.config.data.train, fleet.config.data.eval)]
    store = Store(fleet.directory / "buffer", fleet.config, *tasks)
    held = {entry["id"] for entry in store.archive.index() if entry["state"] in ("stored", "assigned")}
    store.close()
    trained = Counter(id for ids in fleet.batches.values() for id in ids)
    stale = {entry["trajectory"] for entry in dropped if entry["counter"] == "dropped_stale"}
    assert set(trained.values()) <= {1} and not stale & trained.keys()
    assert stats["train_trajectories_accepted"] == len(held | trained.keys() | stale)
    assert stats["trajectories_failed"] == stats["train_visits_set_aside"] == 0, dropped
    index = Database(fleet.directory / "buffer" / "index.sqlite")
    states = Counter(row["state"] for row in index.rows("SELECT state FROM visits"))
    index.close()
    assert states["done"] == stats["train_trajectories_accepted"]
    assert states.keys() <= {"done", "ready"}, "a stopped worker gives back what it was playing"


def test_a_weight_update_changes_versions_within_episodes_and_loses_none(fleet):
    fleet.until_all_is_played()  # so that the next batches are stored and train() waits for none that stands still
    fleet.train(2)
    fleet.until_episodes_are_in_flight()
    before = fleet.played()
    fleet.train(1)
    fleet.until_all_is_played()
    assert any(len(trajectory.action_versions) > 1 for trajectory in fleet.played_since(before))
    fleet.train(4)


def test_an_engine_crash_moves_its_turns_to_the_other_one(fleet):
    fleet.until_episodes_are_in_flight("engine-0")
    before = fleet.played()
    end(fleet.engines["engine-0"])
    fleet.until_all_is_played()
    since = fleet.played_since(before)
    fleet.train(4)
    fleet.start_engine("engine-0")  # as its sidecar would; it serves once the trainer has pushed
    fleet.push()
    fleet.until_episodes_are_in_flight("engine-0")
    assert sum(trajectory.metrics["engine_retries"] for trajectory in since) >= 1
    assert fleet.trainer.stats()["leases_released"] == 0, "no visit was given up"


def test_crashed_workers_visits_go_out_again(fleet):
    fleet.until_episodes_are_in_flight()
    before, expired = fleet.played(), fleet.trainer.stats()["leases_expired"]
    for name in list(fleet.workers):
        end(fleet.workers[name])
    for name in list(fleet.workers):
        fleet.start_worker(name)
    fleet.push()
    wait_until(lambda: fleet.trainer.stats()["leases_expired"] > expired, "expired lease")
    fleet.until_all_is_played()
    assert any(trajectory.attempt > 1 for trajectory in fleet.played_since(before))
    fleet.train(4)


def test_a_buffer_restart_interrupts_nobody(fleet):
    fleet.until_episodes_are_in_flight()
    released = fleet.trainer.stats()["leases_released"]
    fleet.buffer.kill()
    time.sleep(1)
    fleet.buffer.start()
    fleet.push()
    fleet.train(3)
    assert fleet.trainer.stats()["leases_released"] == released


def test_a_trainer_restart_gets_the_recorded_batches_and_goes_on(fleet):
    fleet.train(1)
    fleet.until_episodes_are_in_flight()
    fleet.step -= 2
    trained = list(fleet.trained)
    fleet.register_trainer()
    fleet.train(4)
    again = [trajectory.id for trajectory in fleet.trained[len(trained) :][: 2 * BATCH]]
    assert again == [trajectory.id for trajectory in trained[-2 * BATCH :]]
