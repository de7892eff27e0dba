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
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from megatron_sao.buffer.client import BufferError
from tests.system.buffer_process import TOKEN, Buffer
from tests.trajectories import make_trajectory

pytestmark = pytest.mark.system

TASKS, BATCH, STALENESS, ATTEMPTS = 16, 2, 2, 2
LIMIT = (STALENESS + 1) * BATCH


@dataclass
class Visit:
    state: str = "ready"
    attempt: int = 0


@dataclass
class Stored:
    visit: int
    versions: list[tuple[int, int]]  # (incarnation, version) of its first and of its last token
    state: str = "stored"


class Model:
    """What docs/buffer.md says, without disk, HTTP or time.

    Args:
        did: counts what the histories of a test came to: only that has been tested.
    """

    def __init__(self, did):
        self.did = did
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
        states = {trajectory.state for trajectory in self.trajectories.values() if trajectory.visit == number}
        return 409 if visit.state == "done" and states == {"forgotten"} else 200

    def submit(self, id, number, attempt, versions, failed):
        visit = self.visits[number]
        known = self.trajectories.get(id)
        if visit.state == "done" or (known and known.state != "forgotten"):
            self.counts["trajectories_duplicate"] += 1
            return "duplicate"
        if visit.state == "aside":
            self.counts["trajectories_late"] += 1
            return "dropped"
        if not failed:
            visit.state = "done"
        elif visit.state == "leased" and visit.attempt == attempt:
            self.give_back(visit)
        self.trajectories.pop(id, None)  # a forgotten one that comes again is the newest
        self.trajectories[id] = Stored(number, versions, "failed" if failed else "stored")
        self.counts["trajectories_failed" if failed else "train_trajectories_accepted"] += 1
        return "dropped" if failed else "accepted"

    def staleness(self, id, step):
        """Of its oldest and of its newest token."""
        versions = self.trajectories[id].versions
        effective = [min([n, *self.resumed[incarnation:]]) for incarnation, n in versions]
        return step - min(effective), step - max(effective)

    def batch(self, step):
        self.requested = step
        if step not in self.batches:
            for id in self.in_state("stored"):
                oldest, newest = self.staleness(id, step)
                if oldest > STALENESS:
                    self.trajectories[id].state = "dropped"
                    self.counts["dropped_stale"] += 1
                    self.did["dropped, one version more than allowed"] += oldest == STALENESS + 1
                    self.did["dropped for its oldest token alone"] += newest <= STALENESS
            waiting = self.in_state("stored")
            if len(waiting) < BATCH:
                return None
            for id in waiting[:BATCH]:
                self.trajectories[id].state = "assigned"
                self.did["trained on, as old as allowed"] += self.staleness(id, step)[0] == STALENESS
            self.batches[step] = waiting[:BATCH]
            self.did["batches that left some for the next"] += len(waiting) > BATCH
        else:
            self.did["batches delivered again"] += 1
        return self.batches[step]

    def commit(self, step):
        if self.committed is not None and step <= self.committed:
            return
        self.committed = step
        for id in self.in_state("collected"):
            self.trajectories[id].state = "forgotten"
            self.did["forgotten"] += 1
        for id in [*self.in_state("dropped"), *self.in_state("failed")]:
            self.trajectories[id].state = "collected"
        for old in [old for old in self.batches if old < step]:
            self.did["batches collected"] += 1
            for id in self.batches.pop(old):
                self.trajectories[id].state = "collected"

    def read(self, id):
        return {"collected": 410, "forgotten": 404}.get(self.trajectories[id].state, 200)


@dataclass(frozen=True)
class Fate:
    """What becomes of a lease: how it ends; how many versions before the newest its first token was sampled and how
    many more passed until its last; whether its worker is heard of once more."""

    end: str
    lag: int
    span: int
    again: bool


fates = st.builds(
    Fate,
    st.sampled_from(["played"] * 7 + ["failed", "released", "kept"]),
    st.sampled_from([0, 0, 0, 1, 1, 2, 3, 4]),
    st.integers(0, 2),
    st.sampled_from([False] * 4 + [True]),
)
MOVES = {  # name: how often, and its arguments
    "play": (6, st.lists(fates, min_size=LIMIT, max_size=LIMIT), st.booleans()),
    "ask_for_a_batch": (5,),
    "commit": (2, st.integers(0, 2)),
    "restart_the_trainer": (1, st.integers(0, 2)),
    "kill_the_buffer": (1,),
    "fall_sick": (1, st.booleans()),
}
moves = st.sampled_from([name for name, (often, *_) in MOVES.items() for _ in range(often)]).flatmap(
    lambda name: st.tuples(st.just(name), *MOVES[name][1:])
)


class AnyHistory(RuleBasedStateMachine):
    """Every answer of the process is the model's. Versions are those a single trainer at ``step`` makes."""

    def __init__(self, did):
        super().__init__()
        self.did = did

    @initialize()
    def start(self):
        self.directory = Path(tempfile.mkdtemp())
        sections = {"rl": {"batch_size": BATCH, "max_staleness": STALENESS}, "buffer": {"max_attempts": ATTEMPTS}}
        self.buffer = Buffer(self.directory, **sections)
        self.buffer.start()
        self.http = httpx.Client(headers={"Authorization": f"Bearer {TOKEN}"}, trust_env=False, timeout=30)
        self.trainer = self.buffer.client(give_up_after=20)
        self.model = Model(self.did)
        self.step = self.requests = 0
        self.held, self.entered, self.made = [], {}, []  # leases; tasks by visit; (incarnation, version) of every push
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
        self.made.append((self.incarnation, self.step))
        self.trainer.mark_engine("e", "dirty", None, self.incarnation)
        self.trainer.mark_engine("e", "clean", f"{self.incarnation}.{self.step}", self.incarnation)

    # One rule: of several hypothesis leaves some out for a whole history, and without any of these nothing happens.
    @rule(move=moves)
    def move(self, move):
        name, *how = move
        getattr(self, name)(*how)

    def play(self, fates, backwards):
        """Lease what there is and bring all that is held to its end."""
        self.held += self.lease(len(fates))
        held, self.held = self.held[::-1] if backwards else self.held, []
        for lease, fate in zip(held, fates * len(held), strict=False):
            if fate.end == "released":
                self.release(lease)
            elif fate.end != "kept":
                self.submit(lease, fate)
            if fate.again or fate.end == "kept":
                self.held.append(lease)

    def lease(self, count):
        self.requests += 1
        body = {"worker_id": "w", "request_id": str(self.requests), "max_leases": count}
        leases = self.post("/v1/tasks/lease", body)["leases"]
        assert [(int(lease["visit_id"]), lease["attempt"]) for lease in leases] == self.model.lease(count)
        if leases:
            again = self.post("/v1/tasks/lease", body)["leases"]
            assert [lease["visit_id"] for lease in again] == [lease["visit_id"] for lease in leases]
        for lease in leases:
            name = (lease["epoch"], lease["task"]["id"])
            assert self.entered.setdefault(int(lease["visit_id"]), name) == name, "a visit has changed its task"
            assert lease["epoch"] == (int(lease["visit_id"]) - 1) // TASKS
        assert len(set(self.entered.values())) == len(self.entered), "a task came twice in one epoch"
        return leases

    def submit(self, lease, fate):
        first = max(0, len(self.made) - 1 - fate.lag)
        versions = [self.made[first], self.made[min(first + fate.span, len(self.made) - 1)]]
        names = [f"{incarnation}.{version}" for incarnation, version in versions]
        id = f"{lease['visit_id']}-{lease['attempt']}"
        failed = fate.end == "failed"
        trajectory = make_trajectory(
            id=id, task_id=lease["task"]["id"], epoch=lease["epoch"], attempt=lease["attempt"],
            versions=[(names[0], 2, 4), (names[1], 5, 6)], failure="crashed" if failed else None,
        )  # fmt: skip
        response = self.http.post(f"{self.buffer.url}/v1/trajectories", content=trajectory.encode())
        expected = self.model.submit(id, int(lease["visit_id"]), lease["attempt"], versions, failed)
        assert response.json() == {"result": expected}
        self.did[expected] += 1

    def release(self, lease):
        url = f"{self.buffer.url}/v1/tasks/{lease['visit_id']}/release"
        response = self.http.post(url, json={"attempt": lease["attempt"], "reason": "enough"})
        assert response.status_code == self.model.release(int(lease["visit_id"]), lease["attempt"]), response.text

    def ask_for_a_batch(self):
        entries = self.trainer.batch("rl", self.step, self.incarnation, BATCH, self.step, wait=0)
        expected = self.model.batch(self.step)
        assert (entries and [entry.id for entry in entries]) == expected
        if entries:
            self.step += 1
            self.push()

    def commit(self, back):
        step = max(0, self.step - back)
        self.trainer.commit("rl", step, self.incarnation)
        self.model.commit(step)
        self.every_payload_is_where_it_should_be()

    def restart_the_trainer(self, back):
        self.step = max(self.model.committed or 0, self.step - back)
        self.register()

    def kill_the_buffer(self):
        self.did["kills with trajectories and batches to lose"] += bool(
            self.model.in_state("stored") and self.model.batches
        )
        self.buffer.kill()
        self.buffer.start()

    def fall_sick(self, killed):
        """The engine, for a while in which the buffer may be killed. It gets no turn before the next push."""
        beat = "/v1/engines/e/heartbeat"
        assert self.post(beat, {"sick": "no token"})["state"] == "sick"
        if killed:
            self.kill_the_buffer()
        assert self.post(beat, {})["state"] == "dirty"
        body = {"worker_id": "w", "request_id": "while no engine is clean", "max_leases": 1}
        assert self.post("/v1/tasks/lease", body)["leases"] == []
        self.push()

    @invariant()
    def every_figure_is_the_models(self):
        self.post("/v1/engines/e/heartbeat", {})
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


# In a hundred moves, at least; half of what is usual.
ENOUGH = {
    "accepted": 20,
    "duplicate": 2,
    "dropped": 2,
    "batches that left some for the next": 4,
    "batches delivered again": 0.5,
    "trained on, as old as allowed": 3,
    "dropped, one version more than allowed": 2,
    "dropped for its oldest token alone": 0.5,
    "batches collected": 2,
    "forgotten": 2,
    "kills with trajectories and batches to lose": 1,
}


def play_histories(number, moves, **manners):
    """Play that many. They must come to enough of everything that the rules are about."""
    did = Counter()
    # Without shrinking: a history takes seconds.
    manners |= {"deadline": None, "suppress_health_check": list(HealthCheck), "phases": [Phase.generate]}
    run_state_machine_as_test(
        lambda: AnyHistory(did), settings=settings(max_examples=number, stateful_step_count=moves, **manners)
    )
    too_few = {what: did[what] for what, enough in ENOUGH.items() if did[what] < enough * number * moves / 100}
    assert not too_few, did


def test_the_buffer_is_its_model_whatever_happens():
    play_histories(12, 30)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_buffer_is_its_model_whatever_happens_for_long():
    play_histories(60, 60, derandomize=False)
