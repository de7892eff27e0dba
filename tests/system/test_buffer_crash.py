"""kill -9, full disks and torn writes under load: every acknowledged trajectory is accounted for, once."""

import asyncio
import contextlib
import os
import random
import resource
import threading
import time

import pytest

from megatron_sao.buffer.client import AsyncBufferClient, BufferError
from megatron_sao.buffer.store import Store
from megatron_sao.data.tasks import load_tasks
from tests.system.buffer_process import TOKEN, Buffer, serve_engine
from tests.trajectories import make_long_trajectory

pytestmark = pytest.mark.system

BATCH = 4
COMMIT_EVERY = 3
LONG = 60_000  # tokens, enough for a body that is received in place and written past the page cache
SECTIONS = {
    "rollout": {"environment": "package.module:Class", "max_tokens": LONG},
    "rl": {"batch_size": BATCH, "max_staleness": 2},
    "buffer": {"max_attempts": 3},
}


class Load:
    """Two workers and a trainer against one buffer, in threads; they never stop for a buffer that is away."""

    def __init__(self, buffer, seed):
        self.buffer, self.rng = buffer, random.Random(seed)
        self.submitted = {}  # id → the token ids it was sent with
        self.acknowledged = set()  # ids answered "accepted"
        self.served = {}  # step → ids
        self.failures = []
        self._stop = threading.Event()
        self._trainer = buffer.client()
        self._incarnation = self._trainer.register_trainer("test", 0)
        self._ruling = (self._incarnation, 0)  # what the engines hold: incarnation, step
        serve_engine(buffer, f"{self._incarnation}.0", self._incarnation)

    def __enter__(self):
        bodies = [lambda n=n: asyncio.run(self._work(n)) for n in range(2)] + [self._learn]
        self._threads = [threading.Thread(target=self._guarded, args=(body,)) for body in bodies]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error):
        self._stop.set()
        for thread in self._threads:
            thread.join(90)
        assert not any(thread.is_alive() for thread in self._threads), "a client is stuck"
        assert self.failures == []

    def wait_for_step(self, step):
        deadline = time.monotonic() + 60
        while len(self.served) <= step:
            assert not self.failures and time.monotonic() < deadline, (self.failures, self.buffer.log())
            time.sleep(0.01)

    def _guarded(self, body):
        try:
            body()
        except Exception as error:
            self.failures.append(error)

    async def _work(self, number):
        client = AsyncBufferClient(self.buffer.url, TOKEN)
        while not self._stop.is_set():
            await client.heartbeat_engine("host/0")
            for lease in await client.lease(f"w{number}", 3, 0.2):
                failure = "sandbox crashed" if self.rng.random() < 0.1 else None
                id = f"{lease.visit_id}-{lease.attempt}"
                tokens = LONG if self.rng.random() < 0.3 else 12
                trajectory = make_long_trajectory(
                    tokens, self.rng.randrange(2**32), id=id, task_id=lease.task["id"], epoch=lease.epoch,
                    attempt=lease.attempt, failure=failure, versions=[(self._version(), 10, tokens)],
                )  # fmt: skip
                self.submitted[id] = trajectory.token_ids.tolist()
                answer = await client.submit(trajectory)
                # Its answer may have been lost with the buffer: then it was stored, and the repeat is a duplicate.
                if answer in ("accepted", "duplicate") and failure is None:
                    self.acknowledged.add(id)
                else:
                    assert answer == "dropped" or failure, answer
        await client.close()

    def _version(self):
        """Now and then one that is too old: it will be dropped as stale."""
        incarnation, step = self._ruling
        return f"{incarnation}.{max(0, step - self.rng.choice((0, 0, 1, 1, 2, 5)))}"

    def _learn(self):
        step = 0
        while not self._stop.is_set():
            if self.rng.random() < 0.05 and step > 0:  # the trainer crashes and resumes from its last checkpoint
                step -= step % COMMIT_EVERY
                self._incarnation = self._trainer.register_trainer("test", step)
            self._ruling = (self._incarnation, step)
            for engine in self._trainer.engines():
                if engine.state != "clean":
                    self._push(engine, f"{self._incarnation}.{step}")
            entries = self._trainer.batch("rl", step, self._incarnation, BATCH, step, wait=0.2)
            if entries is None:
                continue
            ids = [entry.id for entry in entries]
            assert len(ids) == BATCH, f"the batch of step {step} holds {len(ids)}"
            assert self.served.setdefault(step, ids) == ids, f"step {step} was served two batches"
            for id in ids:
                assert self._trainer.trajectory(id).token_ids.tolist() == self.submitted[id]
            step += 1
            if step % COMMIT_EVERY == 0:
                self._trainer.commit("rl", step, self._incarnation)

    def _push(self, engine, version):
        self._trainer.mark_engine(engine.id, "dirty", None, self._incarnation)
        try:
            self._trainer.mark_engine(engine.id, "clean", version, self._incarnation)
        except BufferError as error:
            assert error.status == 409
            # A heartbeat that came too late made it dirty once more. It is pushed to again.
            assert [engine.state for engine in self._trainer.engines()] != ["clean"], "the dirty mark was lost"

    def account(self):
        """Every acknowledged trajectory is in one batch, dropped for a listed reason, or held; and no other is."""
        dropped = {entry["trajectory"] for entry in self._trainer.dropped(limit=1000)}
        self.buffer.kill()
        config = self.buffer.config
        tasks = [load_tasks(path) for path in (config.data.train, config.data.eval)]
        store = Store(self.buffer.directory / "buffer", config, *tasks)
        index = store.archive.index()
        stored, assigned = (
            {entry["id"] for entry in index if entry["state"] == state} for state in ("stored", "assigned")
        )
        store.close()
        trained = [id for ids in self.served.values() for id in ids]
        assert len(trained) == len(set(trained)), "a trajectory was delivered to two steps"
        assert set(trained) | dropped | stored | assigned <= self.submitted.keys(), "a trajectory was invented"
        lost = self.acknowledged - set(trained) - dropped - stored - assigned
        assert not lost, f"acknowledged and gone: {sorted(lost)}"
        assert not set(trained) & dropped and not set(trained) & stored


def crash_and_account(directory, kills, seed):
    buffer = Buffer(directory, **SECTIONS)
    buffer.start()
    rng = random.Random(seed)
    with Load(buffer, seed) as load:
        load.wait_for_step(2)
        buffer.kill()
        for _ in range(kills - 1):
            buffer.start(die_at=rng.randint(1, 300))
            buffer.process.join(60)
            assert load.failures == []
            assert buffer.process.exitcode == -9, f"it did not come to the step it was to die at: {buffer.log()}"
        steps = len(load.served)
        buffer.start()
        load.wait_for_step(steps + 3)
    load.account()
    return steps


def test_kill_9_at_any_point_of_a_write_loses_nothing_and_delivers_nothing_twice(tmp_path):
    assert crash_and_account(tmp_path, kills=15, seed=1) >= 4


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [2, 3])
def test_a_hundred_kills_lose_nothing_and_deliver_nothing_twice(tmp_path, seed):
    assert crash_and_account(tmp_path, kills=100, seed=seed) >= 15


def test_a_full_disk_stops_nobody_for_good(tmp_path):
    """While the disk is full every write is refused; when there is room again all clients go on by themselves."""
    buffer = Buffer(tmp_path, **SECTIONS)
    buffer.start()
    with Load(buffer, seed=4) as load:
        for _ in range(3):
            load.wait_for_step(len(load.served) + 1)
            largest = max(path.stat().st_size for path in (tmp_path / "buffer").rglob("*") if path.is_file())
            resource.prlimit(buffer.process.pid, resource.RLIMIT_FSIZE, (largest // 2, resource.RLIM_INFINITY))
            refused_at = time.monotonic()
            while time.monotonic() - refused_at < 1.0:
                assert buffer.process.is_alive(), buffer.log()
                time.sleep(0.05)
            steps = len(load.served)
            resource.prlimit(buffer.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
            load.wait_for_step(steps + 1)
    load.account()


def test_what_a_crash_left_at_the_end_of_a_file_is_ignored(tmp_path):
    """A power cut may leave the last, never acknowledged write of either file torn or as junk."""
    buffer = Buffer(tmp_path, **SECTIONS)
    buffer.start()
    with Load(buffer, seed=5) as load:
        for junk in (b"SAO2", os.urandom(5000), b"\0" * 4096):
            load.wait_for_step(len(load.served) + 1)
            buffer.kill()
            with contextlib.ExitStack() as files:
                segments = sorted((tmp_path / "buffer" / "segments").glob("*.seg"))
                for path in (tmp_path / "buffer" / "index.sqlite-wal", *segments[-1:]):
                    files.enter_context(path.open("ab")).write(junk)
            buffer.start()
        load.wait_for_step(len(load.served) + 2)
    load.account()
