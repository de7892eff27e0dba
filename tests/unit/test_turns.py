"""An environment by turns on a real session: where tokens and rewards go, and that every episode is closed."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_sao.config import RolloutConfig, SamplingConfig
from megatron_sao.data.tasks import Task
from megatron_sao.rollout import turns
from megatron_sao.rollout.client import Generation, ModelLimits
from megatron_sao.rollout.environment import EnvironmentFailure, Observation
from megatron_sao.rollout.session import BudgetExceeded, Session
from megatron_sao.rollout.turns import Turns


class Echo:
    """Says back what it hears, three times; what it is told to do otherwise is in the class of a test."""

    stop_token_ids = (9,)
    max_new_tokens = 2

    def __init__(self) -> None:
        self.acted, self.closed = 0, 0
        self.metrics = {"acted": 0.0}

    async def reset(self, task: Task) -> list[int]:
        return [1, 2]

    async def act(self, token_ids: list[int]) -> Observation:
        self.acted += 1
        self.metrics["acted"] += 1
        return Observation(token_ids, reward=0.25 * self.acted, done=self.acted == 3)

    async def close(self) -> None:
        self.closed += 1


def play(environment: Any, **limits: Any) -> Session:
    """An episode in which the policy says 5 and 9 at every turn."""

    async def generate(input_ids, sampling, max_new_tokens, stop_token_ids=(), prefer=None) -> Generation:
        assert (max_new_tokens, stop_token_ids) == (2, [9])
        return Generation([5, 9], [-0.5] * 2, [("1.0", 0, 2)], "stop", "e1")

    engine = SimpleNamespace(limits=ModelLimits(vocab_size=10, context=100), generate=generate)
    session = Session(engine, RolloutConfig(environment="a:b", **limits), SamplingConfig())
    asyncio.run(Turns(lambda: environment).run(session, Task("t", "p", None, {})))
    return session


def test_observations_follow_actions_and_every_reward_sits_on_its_own_action() -> None:
    environment = Echo()
    session = play(environment)
    assert session.token_ids == [1, 2, 5, 9, 5, 9, 5, 9, 5, 9, 5, 9]  # nothing is observed after the last action
    assert session.loss_mask == [0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1]
    assert session.rewards == [0, 0, 0, 0.25, 0, 0, 0, 0.5, 0, 0, 0, 0.75]
    assert session.finished and session.metrics == {"acted": 3.0} and environment.closed == 1


def test_an_episode_that_runs_into_a_limit_is_closed_and_keeps_its_figures() -> None:
    environment = Echo()
    with pytest.raises(BudgetExceeded, match="max_turns = 2"):
        play(environment, max_turns=2)
    assert environment.closed == 1 and environment.acted == 2


class Broken(Echo):
    async def act(self, token_ids: list[int]) -> Observation:
        return Observation(failure="the simulator is gone")


def test_a_failure_that_is_answered_is_one_of_the_environment_and_its_episode_is_closed() -> None:
    environment = Broken()
    with pytest.raises(EnvironmentFailure, match="the simulator is gone"):
        play(environment)
    assert environment.closed == 1


class Unclosable(Echo):
    async def close(self) -> None:
        await asyncio.sleep(3600)


def test_an_episode_that_does_not_close_fails_rather_than_to_hold_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "CLOSE_SECONDS", 0.05)
    with pytest.raises(TimeoutError):
        play(Unclosable())


class Bare:
    """Nothing but the protocol."""

    async def reset(self, task: Task) -> list[int]:
        return [1]

    async def act(self, token_ids: list[int]) -> Observation:
        return Observation(done=True, reward=1.0)

    async def close(self) -> None: ...


def test_stops_limits_and_figures_are_optional() -> None:
    assert turns.options_of(Bare()) == {"max_new_tokens": None, "stop_token_ids": []}
    assert turns.metrics_of(Bare()) == {}
