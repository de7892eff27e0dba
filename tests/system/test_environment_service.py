"""An environment in a real process of its own: the same episodes, and what its death and its silence mean."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from megatron_sao.buffer.client import Lease
from megatron_sao.buffer.segments import Record
from megatron_sao.data.tasks import Task
from megatron_sao.rollout.client import Generation, ModelLimits
from megatron_sao.rollout.environments import calculator
from megatron_sao.rollout.worker import Player, Worker
from tests.serving import eventually
from tests.store_bench import Bench
from tests.system.buffer_process import TOKEN
from tests.system.environment_process import CALCULATOR, EnvironmentProcess
from tests.trajectories import make_config
from tests.unit.test_calculator import Characters

pytestmark = pytest.mark.system

SERVICE = "megatron_sao.rollout.environments.service:Service"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvironmentProcess]:
    process = EnvironmentProcess(tmp_path_factory.mktemp("environment"))
    process.start()
    yield process
    process.close()


class Policy:
    """In place of the engines: says its script, turn by turn, for any episode. ``before`` is awaited at every turn."""

    available = True
    limits = ModelLimits(vocab_size=len(calculator.ALPHABET), context=500)

    def __init__(self, script: list[str], before: Any = None) -> None:
        self.script, self.before = script, before

    async def generate(self, input_ids, sampling, max_new_tokens, stop_token_ids=(), prefer=None) -> Generation:
        turn = sum(stop in input_ids for stop in stop_token_ids) and input_ids.count(stop_token_ids[0])
        if self.before is not None:
            await self.before(turn)
        ids = Characters().encode(self.script[turn])
        return Generation(ids, [-0.5] * len(ids), [("1.0", 0, len(ids))], "stop", "e1")


def player(directory: Path, policy: Policy, environment: str, **arguments: Any) -> Player:
    rollout = {"environment": environment, "environment_args": arguments, "max_tokens": 100, "max_turns": 6}
    return Player(make_config(directory, rollout=rollout), policy, Characters())


def remote(directory: Path, policy: Policy, service: EnvironmentProcess, **arguments: Any) -> Player:
    return player(directory, policy, SERVICE, url=service.url, **arguments)


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_SAO_TOKEN", TOKEN)


def played(player: Player, task: Task) -> dict[str, Any]:
    """All of an episode that does not differ by the clock or by chance."""

    async def episode() -> Any:
        try:
            return await player.play(task, "train", epoch=0, attempt=1)
        finally:
            await player.close()

    fields = vars(asyncio.run(episode()))
    fields["metrics"].pop("seconds")
    for name in ("id", "created_at"):
        fields.pop(name)
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in fields.items()}


def test_an_episode_over_the_service_equals_the_one_in_process_token_for_token(service, tmp_path):
    rng = Random(4)
    scripts = [(Task("bad", "7+3=", 10, {}), ["<3+7>", "7+3>", "<7+3>", "A10."])]
    scripts += [(Task("endless", "7+3=", 10, {}), ["<3+7>"] * 6)]  # all turns used
    for expression, value in islice(calculator.expressions(rng, (2, 3), 99), 6):
        segments = calculator.demonstration(rng, expression, noise=0.4)
        turns = [text for text, learned in segments or [] if learned]
        scripts += (
            [(Task(str(value), calculator.render(expression), value, {"free": [1, None]}), turns)] if turns else []
        )
    assert len(scripts) > 4
    for task, script in scripts:
        here = played(player(tmp_path, Policy(script), CALCULATOR), task)
        there = played(remote(tmp_path, Policy(script), service), task)
        assert there == here and here["failure"] is None and any(here["loss_mask"])
        assert here["truncated"] == (task.id == "endless")


def test_a_service_that_falls_silent_is_a_failure_of_the_environment(service, tmp_path):
    async def freeze(turn: int) -> None:
        if turn == 1:
            os.kill(service.process.pid, signal.SIGSTOP)

    policy = Policy(["<3*8>", "<7+24>", "A31."], freeze)
    try:
        ended = played(remote(tmp_path, policy, service, timeout=1.0), Task("t", "7+3*8=", 31, {}))
    finally:
        os.kill(service.process.pid, signal.SIGCONT)
    assert f"service at {service.url} took longer than 1 s" in ended["failure"] and not any(ended["rewards"])


class StoreBuffer:
    """The buffer's own store behind the worker's client, without HTTP. ``results`` has what every submission became."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.results = bench, []

    async def lease(self, worker_id: str, max_leases: int, wait: float) -> list[Lease]:
        await asyncio.sleep(0.05)
        return [Lease(**lease) for lease in self.bench.lease(max_leases)]

    async def submit(self, trajectory: Any) -> str:
        result = self.bench.store.submit([(trajectory, Record.of(trajectory.encode()))])[0]
        self.results.append((trajectory.task_id, trajectory.attempt, result, trajectory.failure))
        return result

    async def renew(self, visit_id: str, attempt: int) -> None: ...

    async def release(self, visit_id: str, attempt: int, reason: str) -> None: ...


def test_a_service_killed_in_mid_episode_costs_an_attempt_and_the_visit_is_played_again(service, tmp_path, monkeypatch):
    """One that was killed and restarted does not know the episode, one that is gone does not answer, and until it is
    back new episodes wait for it."""
    restarts = [True, False]

    async def die(turn: int) -> None:
        if turn == 1 and restarts:
            await asyncio.to_thread(service.kill)
            if restarts.pop(0):
                await asyncio.to_thread(service.start)

    monkeypatch.setattr("megatron_sao.rollout.environments.service.ACT_PATIENCE", 0.5)
    bench = Bench(tmp_path, tasks=[Task("t", "7+3*8=", 31, {})], rl={"batch_size": 1, "max_staleness": 0})
    bench.train()
    policy = Policy(["<3*8>", "<7+24>", "A31."], die)

    async def work() -> list[Any]:
        buffer, playing = StoreBuffer(bench), remote(tmp_path, policy, service)
        working = asyncio.create_task(Worker(bench.config, "w", buffer, playing).run())
        await eventually(lambda: len(buffer.results) == 2, seconds=60)
        await asyncio.to_thread(service.start)
        await eventually(lambda: len(buffer.results) == 3, seconds=60)
        working.cancel()
        await asyncio.wait([working])
        await playing.close()
        return buffer.results

    results = asyncio.run(work())
    assert [result[:3] for result in results] == [("t", 1, "dropped"), ("t", 2, "dropped"), ("t", 3, "accepted")]
    restarted, gone, played_again = (failure for *_, failure in results)
    assert "is open: it was closed, or this service has been restarted" in restarted
    assert "cannot be reached: ConnectError" in gone and played_again is None
    (row,) = (row for row in bench.store.archive.index() if row["state"] == "stored")
    assert bench.store.archive.trajectory(row["id"]).total_reward == 1.0
    bench.store.close()
