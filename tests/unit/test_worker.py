"""The rollout worker against small fakes: every visit ends in a trajectory, a failure with its reason, or goes back."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from aiohttp import web

from megatron_sao.buffer.client import BufferError, Lease
from megatron_sao.config import RunConfig, parse_config
from megatron_sao.data.trajectory import Trajectory
from megatron_sao.rollout import worker as module
from megatron_sao.rollout.environment import EnvironmentFailure
from megatron_sao.rollout.worker import Player, Worker
from tests.fake_engines import FakeEngine, generated, hanging, http_error, with_engines
from tests.serving import eventually, skip_time


def config(tmp_path: Path, environment: str, **rollout: Any) -> RunConfig:
    return parse_config(
        {
            "name": "test",
            "model": {"path": tmp_path, "device": "cpu"},
            "data": {"train": "unused.jsonl"},
            "rollout": {"environment": f"{__name__}:{environment}", "concurrency": 2} | rollout,
        }
    )


ODD_METRICS = {"nothing": None, "text": "very good", "not a number": math.nan, "immense": 10**400}


class OneTurn:
    """Pays 1 for any action; the tasks named below misbehave."""

    cancelled: ClassVar[list[str]] = []  # ids of tasks
    in_tool: ClassVar[list[str]] = []

    def __init__(self, tokenizer: Any, prompt: int = 1) -> None:
        self.prompt = prompt

    async def run(self, session, task) -> None:
        if task.prompt == "crash":
            raise EnvironmentFailure("the sandbox is gone")
        if task.prompt == "half an emoji":
            raise EnvironmentFailure("no tool named \ud83d")
        if task.prompt in ODD_METRICS:
            session.metrics["rating"] = ODD_METRICS[task.prompt]
        session.prompt([self.prompt] * (5 if task.prompt == "long" else 1))
        if task.prompt == "silent":
            return
        if task.prompt == "slow tool":
            await session.generate(4)
            self.in_tool.append(task.id)
            await asyncio.sleep(3600)
        if task.prompt == "own timeout":
            raise TimeoutError("the service did not answer")
        if task.prompt == "two turns":
            await session.generate(4)
            await session.generate(4)
        if task.prompt == "endless":
            while True:
                await session.generate()
        if task.prompt == "buggy":
            raise KeyError("typo")
        try:
            await session.generate(4)
        except asyncio.CancelledError:
            self.cancelled.append(task.id)
            raise
        session.finish(1.0)


class Digits:
    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def half(task, transcript) -> float:
    assert transcript == [("prompt", "1"), ("action", "4 9")]
    return 0.5


class FakeBuffer:
    """Leases the given prompts once each, then waits for ever."""

    def __init__(self, *prompts: str) -> None:
        self.leases = [
            Lease(
                str(i), "train", {"id": f"t{i}", "prompt": prompt, "label": 0, "extra": {}}, 0, 1, 60.0, group=f"t{i}/0"
            )
            for i, prompt in enumerate(prompts)
        ]
        self.submitted, self.released, self.renewed, self.lost = [], [], [], set()
        self.full = False
        self.all_ended = asyncio.Event()
        self._open = len(prompts)

    def _end(self) -> None:
        self._open -= 1
        if not self._open:
            self.all_ended.set()

    async def lease(self, worker_id, max_leases, wait):
        if not self.leases:
            await asyncio.sleep(3600)
        given, self.leases = self.leases[:max_leases], self.leases[max_leases:]
        return given

    async def renew(self, visit_id, attempt):
        if visit_id in self.lost:
            raise BufferError(409, "the lease is lost")
        self.renewed.append(visit_id)

    async def release(self, visit_id, attempt, reason):
        self.released.append((visit_id, attempt, reason))
        self._end()

    async def submit(self, trajectory):
        if self.full:
            await asyncio.sleep(3600)
        self.submitted.append(trajectory)
        self._end()
        return "accepted"


def work(
    settings: RunConfig,
    prompts: list[str],
    engine: FakeEngine,
    during: Callable[[FakeBuffer], Awaitable[None]] | None = None,
    **options: Any,
) -> FakeBuffer:
    """Let a worker play ``prompts`` until all visits have ended and ``during(buffer)`` has returned; then stop it."""

    async def use(client, _):
        buffer = FakeBuffer(*prompts)
        worker = asyncio.create_task(Worker(settings, "w0", buffer, Player(settings, client, Digits())).run())
        await (during(buffer) if during else buffer.all_ended.wait())
        worker.cancel()
        await asyncio.wait([worker])
        assert worker.cancelled()
        return buffer

    return with_engines([engine], use, max_retries=0, **options)


def test_the_worker_plays_every_visit_and_submits_valid_trajectories(tmp_path):
    buffer = work(config(tmp_path, "OneTurn"), ["p"] * 5, FakeEngine("a", generated([4, 9])))
    assert [trajectory.validate(100, 10).total_reward for trajectory in buffer.submitted] == [1.0] * 5
    assert {(t.run_id, t.kind, t.attempt) for t in buffer.submitted} == {("test", "train", 1)}
    assert sorted(t.task_id for t in buffer.submitted) == ["t0", "t1", "t2", "t3", "t4"]
    assert all(t.group == f"{t.task_id}/0" for t in buffer.submitted)
    assert len({t.id for t in buffer.submitted}) == 5


def test_what_the_environment_fails_is_recorded_with_its_reason_and_limits_truncate(tmp_path):
    prompts = ["crash", "silent", "buggy", "endless"]
    buffer = work(config(tmp_path, "OneTurn", max_turns=3), prompts, FakeEngine("a", generated([4, 9])))
    ended = {prompt: next(t for t in buffer.submitted if t.task_id == f"t{i}") for i, prompt in enumerate(prompts)}
    assert ended["crash"].failure == "the sandbox is gone"
    assert "without calling session.finish" in ended["silent"].failure
    assert ended["buggy"].failure == "KeyError: 'typo'"
    assert ended["endless"].failure is None and ended["endless"].truncated and ended["endless"].num_tokens == 7


def test_text_that_cannot_be_sent_and_metrics_that_are_no_numbers_fail_their_own_episode_alone(tmp_path):
    prompts = ["half an emoji", *ODD_METRICS, "p"]
    buffer = work(config(tmp_path, "OneTurn"), prompts, FakeEngine("a", generated([4, 9])))
    ended = {t.task_id: Trajectory.decode(t.encode()).validate(100, 10).failure for t in buffer.submitted}
    assert ended["t0"] == "no tool named \\ud83d"
    for number in range(1, 5):
        assert re.fullmatch(
            r"session.metrics\['rating'\] = .*: a metric is a name and a finite number", ended[f"t{number}"]
        )
    assert ended["t5"] is None and len(ended) == len(prompts)


async def slow_second_turn(body: dict[str, Any]) -> web.Response:
    if len(body["input_ids"]) > 1:
        await asyncio.sleep(3600)
    return generated([4, 9])(body)


def test_whose_time_was_up_decides_what_becomes_of_the_episode(tmp_path):
    """The environment's is a failure; the policy's truncates what it has said so far, unless it has said nothing."""
    prompts = ["slow tool", "own timeout", "two turns"]
    settings = config(tmp_path, "OneTurn", episode_timeout=1000.0, concurrency=3)

    def out_of_time(engine: FakeEngine, prompts: list[str], stuck: Callable[[], Any]) -> FakeBuffer:
        async def during(buffer: FakeBuffer) -> None:
            await eventually(stuck)
            skip_time(1000)
            await buffer.all_ended.wait()

        return work(settings, prompts, engine, during, seconds=3000)

    engine = FakeEngine("a", slow_second_turn)
    OneTurn.in_tool.clear()
    second_turn = lambda: any(len(body["input_ids"]) > 1 for body in engine.bodies)  # noqa: E731
    buffer = out_of_time(engine, prompts, lambda: OneTurn.in_tool and second_turn())
    ended = {prompt: next(t for t in buffer.submitted if t.task_id == f"t{i}") for i, prompt in enumerate(prompts)}
    assert ended["slow tool"].failure == "the environment timed out (rollout.episode_timeout = 1000 s)"
    assert ended["own timeout"].failure == "TimeoutError in the environment: the service did not answer"
    assert ended["two turns"].failure is None and ended["two turns"].truncated
    assert ended["two turns"].validate(100, 10).token_ids.tolist() == [1, 4, 9]  # without the turn in flight
    silent_engine = FakeEngine("a", hanging)
    silent = out_of_time(silent_engine, ["p"], lambda: silent_engine.bodies).submitted[0]
    assert silent.failure == (
        "the policy could not act: its first turn was not over when the time was up (rollout.episode_timeout = 1000 s)"
    )


def test_an_episode_that_ran_out_of_time_for_want_of_engines_goes_back(tmp_path):
    settings = config(tmp_path, "OneTurn", episode_timeout=1.0)

    async def use(client, registry):
        registry[0] = replace(registry[0], state="dirty")
        buffer = FakeBuffer("p")
        worker = asyncio.create_task(Worker(settings, "w0", buffer, Player(settings, client, Digits())).run())
        await buffer.all_ended.wait()
        worker.cancel()
        await asyncio.wait([worker])
        return buffer

    buffer = with_engines([FakeEngine("a", generated([9]))], use)
    assert not buffer.submitted and "no engine was clean" in buffer.released[0][2]


def test_an_environment_that_only_fails_ends_the_worker(tmp_path):
    async def use(client, _):
        settings = config(tmp_path, "OneTurn", concurrency=200)
        buffer = FakeBuffer(*["crash"] * 150)
        await Worker(settings, "w0", buffer, Player(settings, client, Digits())).run()

    with pytest.raises(ExceptionGroup) as caught:
        with_engines([FakeEngine("a", generated([9]))], use)
    assert "100 episodes in a row failed" in str(caught.value.exceptions[0])


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("p", r"its first turn was not over .*episode_timeout = 0\.5 s"),
        ("long", r"5 tokens .* exceed rollout\.max_tokens"),
    ],
)
def test_a_policy_that_never_acted_is_a_failure_but_no_fault_of_the_environment(tmp_path, monkeypatch, prompt, reason):
    monkeypatch.setattr(module, "FAILURES_IN_A_ROW", 3)
    settings = config(tmp_path, "OneTurn", episode_timeout=0.5, max_tokens=4, concurrency=8)
    prompts = ["crash", "crash", *[prompt] * 6]
    buffer = work(settings, prompts, FakeEngine("a", hanging))  # asserts that the worker goes on
    never_acted = [t for t in buffer.submitted if t.failure != "the sandbox is gone"]
    assert len(never_acted) == 6
    assert all(re.match(f"the policy could not act: {reason}", t.failure) for t in never_acted)
    assert all(Trajectory.decode(t.encode()).validate(100, 10).num_action_tokens == 0 for t in never_acted)


def test_episodes_in_which_the_policy_never_acted_do_not_hide_that_the_environment_only_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "FAILURES_IN_A_ROW", 3)

    async def use(client, _):
        settings = config(tmp_path, "OneTurn", max_tokens=4)
        buffer = FakeBuffer("crash", "long", "crash", "long", "crash", "p")
        await Worker(settings, "w0", buffer, Player(settings, client, Digits())).run()

    with pytest.raises(ExceptionGroup) as caught:
        with_engines([FakeEngine("a", hanging)], use)
    assert "3 episodes in a row failed" in str(caught.value.exceptions[0])


def test_engines_that_fail_an_episode_give_the_visit_back(tmp_path):
    buffer = work(config(tmp_path, "OneTurn"), ["p"], FakeEngine("a", http_error(500)))
    assert not buffer.submitted
    assert buffer.released[0][:2] == ("0", 1) and "HTTP 500" in buffer.released[0][2]


def test_a_reward_function_replaces_the_environments_reward(tmp_path):
    settings = config(tmp_path, "OneTurn", reward=f"{__name__}:half")
    assert work(settings, ["p"], FakeEngine("a", generated([4, 9]))).submitted[0].total_reward == 0.5


def test_a_stopped_worker_gives_back_what_it_was_playing_and_a_lost_lease_ends_its_episode(tmp_path):
    async def during(buffer):
        await asyncio.sleep(0.2)
        buffer.lost.add("0")
        await eventually(lambda: OneTurn.cancelled == ["t0"])

    OneTurn.cancelled.clear()
    settings = config(tmp_path, "OneTurn")
    settings = settings.model_copy(update={"buffer": settings.buffer.model_copy(update={"lease_seconds": 0.6})})
    buffer = work(settings, ["p", "p"], FakeEngine("a", hanging), during)
    assert not buffer.submitted
    assert buffer.released == [("1", 1, "the worker stopped")]


def test_while_a_full_buffer_has_a_submission_wait_its_lease_is_renewed_and_a_stopped_worker_gives_it_back(tmp_path):
    async def during(buffer):
        buffer.full = True
        await eventually(lambda: len(buffer.renewed) > 3)

    settings = config(tmp_path, "OneTurn")
    settings = settings.model_copy(update={"buffer": settings.buffer.model_copy(update={"lease_seconds": 0.3})})
    buffer = work(settings, ["p"], FakeEngine("a", generated([4, 9])), during)
    assert set(buffer.renewed) == {"0"} and buffer.released == [("0", 1, "the worker stopped")]


class Closing(OneTurn):
    closed = 0

    async def close(self) -> None:
        Closing.closed += 1


def test_an_environment_is_closed_with_its_worker_where_it_can_be(tmp_path):
    asyncio.run(Player(config(tmp_path, "Closing"), None, Digits()).close())
    asyncio.run(Player(config(tmp_path, "OneTurn"), None, Digits()).close())
    assert Closing.closed == 1


def test_a_bug_in_an_environment_is_traced_once_and_named_each_time(tmp_path, caplog):
    buffer = work(config(tmp_path, "OneTurn"), ["buggy"] * 4, FakeEngine("a", generated([9])))
    assert [trajectory.failure for trajectory in buffer.submitted] == ["KeyError: 'typo'"] * 4
    assert len([record for record in caplog.records if record.exc_info]) == 1
    assert len([record for record in caplog.records if "failed: KeyError: 'typo'" in record.message]) == 4
