"""A buffer store on a bench: a fake clock, and the moves of trainer and worker, without HTTP."""

from __future__ import annotations

import pytest

from megatron_sao.buffer.database import StoreError
from megatron_sao.buffer.segments import Record
from megatron_sao.buffer.store import Store
from megatron_sao.data.tasks import Task
from tests.trajectories import make_config, make_trajectory

TASKS = [Task(f"task{i}", f"{i}", None, {}) for i in range(8)]
EVAL_TASKS = [Task(f"eval{i}", f"{i}", None, {}) for i in range(3)]


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


class Bench:
    """A store, a fake clock and the moves of trainer and worker."""

    def __init__(self, directory, tasks=TASKS, **sections):
        self.directory, self.tasks = directory, tasks
        self.config = make_config(directory, **sections)
        self.clock = Clock()
        self.requests = 0
        self.open()

    def open(self):
        self.store = Store(self.directory / "buffer", self.config, self.tasks, EVAL_TASKS, self.clock)

    def reopen(self):
        self.store.close()
        self.open()

    def train(self, policy_version=0, version=None):
        """Register a trainer and have one engine serve its weights."""
        incarnation = self.store.register_trainer("test", policy_version)
        self.store.engines.register("e", "http://e", 1)
        self.push(incarnation, version or f"{incarnation}.{policy_version}")
        return incarnation

    def push(self, incarnation, version):
        self.store.mark_engine("e", "dirty", None, incarnation)
        self.store.mark_engine("e", "clean", version, incarnation)

    def lease(self, count=1, request=None):
        self.requests += 1
        return self.store.visits.lease("w", count, request or f"r{self.requests}") or []

    def play(self, lease, version="1.0", **changes):
        """Submit the trajectory of a lease, all under one version. Returns the answer."""
        fields = {
            "id": f"{lease['visit_id']}-{lease['attempt']}",
            "task_id": lease["task"]["id"],
            "epoch": lease["epoch"],
            "attempt": lease["attempt"],
            "kind": lease["kind"],
            "group": lease["group"],
            "versions": [(version, 2, 6)],
        }
        trajectory = make_trajectory(**(fields | changes))
        return self.store.submit([(trajectory, Record.of(trajectory.encode()))])[0]

    def fill(self, count, version="1.0"):
        for lease in self.lease(count):
            assert self.play(lease, version) == "accepted"

    def batch(self, step, incarnation=1, stage="rl", batch_size=2, policy_version=None):
        version = step if policy_version is None else policy_version
        entries = self.store.batch(stage, step, incarnation, batch_size, version)
        return None if entries is None else [entry["id"] for entry in entries]

    def stat(self, name):
        return self.store.stats()[name]


def refused(status, call, *arguments):
    with pytest.raises(StoreError) as caught:
        call(*arguments)
    assert caught.value.status == status
    return str(caught.value)


def evaluate(bench, step=0, version="1.0", count=3, incarnation=1):
    bench.store.start_evaluation("rl", step, incarnation, version, count)
