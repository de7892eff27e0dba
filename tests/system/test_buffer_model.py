"""The buffer process against a model of docs/buffer.md: whatever clients, trainers and kill -9 do, they agree."""

import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from megatron_sao.buffer.client import BufferError
from tests.system.buffer_process import TOKEN, Buffer
from tests.trajectories import make_trajectory

pytestmark = pytest.mark.system

TASKS, BATCH, STALENESS, ATTEMPTS = 16, 2, 1, 2
LIMIT = (STALENESS + 1) * BATCH


@dataclass
class Visit:
    state: str = "ready"
    attempt: int = 0


@dataclass
class Stored:
    visit: int
    incarnation: int  # of the trainer that made the weights
    oldest: int  # version of its oldest token under that trainer
    state: str = "stored"
    step: int | None = None


class Model:
    """What docs/buffer.md says, without disk, HTTP or time."""

    def __init__(self):
        self.visits, self.trajectories = {}, {}  # by number; by id, in the order of arrival
        self.counts = Counter()
        self.batches = {}  # step → ids
        self.requested = self.committed = None
        self.resumed = []  # policy version each incarnation, from 1 on, started from

    def outstanding(self):
        leased = sum(visit.state == "leased" for visit in self.visits.values())
        batches = sum(self.requested is None or step >= self.requested for step in self.batches)
        return leased + len(self.in_state("stored")) + BATCH * batches

    def in_state(self, state):
        return [id for id, trajectory in self.trajectories.items() if trajectory.state == state]

    def lease(self, wanted):
        room = max(0, min(wanted, LIMIT - self.outstanding()))
        ready = [number for number, visit in sorted(self.visits.items()) if visit.state == "ready"]
        fresh = range(len(self.visits) + 1, len(self.visits) + 1 + room - len(ready))
        granted = [*ready, *fresh][:room]
        for number in granted:
            visit = self.visits.setdefault(number, Visit())
            visit.state, visit.attempt = "leased", visit.attempt + 1
        return [(number, self.visits[number].attempt) for number in granted]

    def give_back(self, visit):
        last = visit.attempt == ATTEMPTS
        visit.state = "aside" if last else "ready"
        self.counts["train_visits_set_aside"] += last

    def release(self, number, attempt):
        visit = self.visits[number]
        if visit.state == "leased" and visit.attempt == attempt:
            self.give_back(visit)
            self.counts["leases_released"] += 1

    def submit(self, id, number, attempt, incarnation, oldest, failed):
        visit = self.visits[number]
        if id in self.trajectories or visit.state == "done":
            self.counts["trajectories_duplicate"] += 1
            return "duplicate"
        if visit.state == "aside":
            self.counts["trajectories_late"] += 1
            return "dropped"
        if not failed:
            visit.state = "done"
        elif visit.state == "leased" and visit.attempt == attempt:
            self.give_back(visit)
        self.trajectories[id] = Stored(number, incarnation, oldest, "failed" if failed else "stored")
        self.counts["trajectories_failed" if failed else "train_trajectories_accepted"] += 1
        return "dropped" if failed else "accepted"

    def batch(self, step):
        self.requested = step
        if step not in self.batches:
            for id in self.in_state("stored"):
                found = self.trajectories[id]
                if step - min([found.oldest, *self.resumed[found.incarnation :]]) > STALENESS:
                    self.trajectories[id].state = "dropped"
                    self.counts["dropped_stale"] += 1
            oldest = self.in_state("stored")[:BATCH]
            if len(oldest) < BATCH:
                return None
            for id in oldest:
                self.trajectories[id].state = "assigned"
            self.batches[step] = oldest
        return self.batches[step]

    def commit(self, step):
        if self.committed is not None and step <= self.committed:
            return
        self.committed = step
        for id in self.in_state("collected"):
            self.trajectories[id].state = "forgotten"
        for id in [*self.in_state("dropped"), *self.in_state("failed")]:
            self.trajectories[id].state = "collected"
        for old in [old for old in self.batches if old < step]:
            for id in self.batches.pop(old):
                self.trajectories[id].state = "collected"

    def read(self, id):
        return {"collected": 410, "forgotten": 404}.get(self.trajectories[id].state, 200)


class AnyHistory(RuleBasedStateMachine):
    """Every answer of the process is the model's. Versions are those a single trainer at ``step`` makes."""

    @initialize()
    def start(self):
        self.directory = Path(tempfile.mkdtemp())
        sections = {"rl": {"batch_size": BATCH, "max_staleness": STALENESS}, "buffer": {"max_attempts": ATTEMPTS}}
        self.buffer = Buffer(self.directory, **sections)
        self.buffer.start()
        self.http = httpx.Client(headers={"Authorization": f"Bearer {TOKEN}"}, trust_env=False, timeout=30)
        self.trainer = self.buffer.client(give_up_after=20)
        self.model = Model()
        self.step = self.incarnation = 0
        self.leases, self.entered, self.requests = [], {}, 0
        self.post("/v1/engines", {"id": "e", "url": "http://e", "tp": 1})
        self.register()

    def teardown(self):
        try:
            self.every_payload_is_where_it_should_be()
        finally:
            self.buffer.kill()
            shutil.rmtree(self.directory)

    def post(self, path, body):
        response = self.http.post(self.buffer.url + path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def register(self):
        self.incarnation = self.trainer.register_trainer("test", self.step)
        self.model.resumed.append(self.step)
        self.push()

    def push(self):
        self.trainer.mark_engine("e", "dirty", None, self.incarnation)
        self.trainer.mark_engine("e", "clean", f"{self.incarnation}.{self.step}", self.incarnation)

    @rule(count=st.integers(1, 5), repeat=st.booleans())
    def lease(self, count, repeat):
        self.requests += 1
        body = {"worker_id": "w", "request_id": str(self.requests), "max_leases": count}
        leases = self.post("/v1/tasks/lease", body)["leases"]
        assert [(int(lease["visit_id"]), lease["attempt"]) for lease in leases] == self.model.lease(count)
        if repeat:
            again = self.post("/v1/tasks/lease", body)["leases"]
            assert [lease["visit_id"] for lease in again] == [lease["visit_id"] for lease in leases] or not leases
        for lease in leases:
            name = (lease["epoch"], lease["task"]["id"])
            assert self.entered.setdefault(int(lease["visit_id"]), name) == name, "a visit has changed its task"
            assert lease["epoch"] == (int(lease["visit_id"]) - 1) // TASKS
        assert len(set(self.entered.values())) == len(self.entered), "a task came twice in one epoch"
        self.leases += leases

    @precondition(lambda self: self.leases)
    @rule(index=st.integers(0, 20), lag=st.integers(0, 2), failed=st.booleans(), forget=st.booleans())
    def submit(self, index, lag, failed, forget):
        lease = self.leases[index % len(self.leases)]
        oldest = max(0, self.step - lag)
        id = f"{lease['visit_id']}-{lease['attempt']}"
        trajectory = make_trajectory(
            id=id, task_id=lease["task"]["id"], epoch=lease["epoch"], attempt=lease["attempt"],
            versions=[(f"{self.incarnation}.{oldest}", 2, 6)], failure="crashed" if failed else None,
        )  # fmt: skip
        response = self.http.post(f"{self.buffer.url}/v1/trajectories", content=trajectory.encode())
        visit = int(lease["visit_id"])
        expected = self.model.submit(id, visit, lease["attempt"], self.incarnation, oldest, failed)
        assert response.json() == {"result": expected}
        if forget:
            self.leases.remove(lease)

    @precondition(lambda self: self.leases)
    @rule(index=st.integers(0, 20))
    def release(self, index):
        lease = self.leases[index % len(self.leases)]
        path = f"/v1/tasks/{lease['visit_id']}/release"
        self.post(path, {"attempt": lease["attempt"], "reason": "enough"})
        self.model.release(int(lease["visit_id"]), lease["attempt"])

    @rule()
    def ask_for_a_batch(self):
        entries = self.trainer.batch("rl", self.step, self.incarnation, BATCH, self.step, wait=0)
        expected = self.model.batch(self.step)
        assert (entries and [entry.id for entry in entries]) == expected
        if entries:
            self.step += 1
            self.push()

    @rule(back=st.integers(0, 3))
    def commit(self, back):
        step = max(0, self.step - back)
        self.trainer.commit("rl", step, self.incarnation)
        self.model.commit(step)
        self.every_payload_is_where_it_should_be()

    @rule(back=st.integers(0, 3))
    def restart_the_trainer(self, back):
        self.step = max(self.model.committed or 0, self.step - back)
        self.register()

    @rule(spared=st.integers(0, 3))
    def kill_the_buffer(self, spared):
        if not spared:
            self.buffer.kill()
            self.buffer.start()

    @invariant()
    def every_figure_is_the_models(self):
        stats = self.trainer.stats()
        states = Counter(visit.state for visit in self.model.visits.values())
        assert {name: stats[name] for name in self.model.counts} == self.model.counts
        assert (stats["visits_leased"], stats["visits_ready"]) == (states["leased"], states["ready"])
        assert stats["trajectories_stored"] == len(self.model.in_state("stored"))
        assert (stats["outstanding"], stats["outstanding_limit"]) == (self.model.outstanding(), LIMIT)

    def every_payload_is_where_it_should_be(self):
        for id in self.model.trajectories:
            try:
                status = 200 if self.trainer.trajectory(id).id == id else 500
            except BufferError as error:
                status = error.status
            assert status == self.model.read(id), id


class AnyLongHistory(AnyHistory):
    """The same, far longer."""


# Without shrinking: a history takes seconds.
MANNERS = {"deadline": None, "suppress_health_check": list(HealthCheck), "phases": [Phase.generate]}
TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(max_examples=4, stateful_step_count=30, **MANNERS)
TestAnyLongHistory = pytest.mark.slow(pytest.mark.timeout(1800)(AnyLongHistory.TestCase))
TestAnyLongHistory.settings = settings(max_examples=60, stateful_step_count=60, **MANNERS)
