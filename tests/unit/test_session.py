"""The session records exactly what was sampled, where rewards sit, and which limits end an episode."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from megatron_sao.config import RolloutConfig, SamplingConfig
from megatron_sao.data.trajectory import Trajectory
from megatron_sao.rollout.client import EngineClient, Generation, ModelLimits, RequestRefused
from megatron_sao.rollout.session import BudgetExceeded, Session


class ScriptedEngine:
    """Answers each turn with the next scripted generation, cut to the tokens asked for."""

    def __init__(self, *turns: Generation, context: int = 100) -> None:
        self.limits = ModelLimits(vocab_size=50, context=context)
        self.turns = list(turns)
        self.calls: list[tuple[list[int], int, str | None]] = []

    async def generate(self, input_ids, sampling, max_new_tokens, stop_token_ids=(), prefer=None) -> Generation:
        self.calls.append((list(input_ids), max_new_tokens, prefer))
        turn = self.turns.pop(0)
        assert len(turn.token_ids) <= max_new_tokens
        return turn


def session(engine: ScriptedEngine, **limits) -> Session:
    return Session(engine, RolloutConfig(environment="a:b", **limits), SamplingConfig())


def record(played: Session) -> Trajectory:
    return played.trajectory(id="x", run_id="r", task_id="t", epoch=3, attempt=1, kind="train")


TURN_1 = Generation([5, 6, 7], [-0.1, -0.2, -0.3], [("1.0", 0, 2), ("1.1", 2, 3)], "stop", "e1", 2)
TURN_2 = Generation([8], [-0.4], [("1.1", 0, 1)], "stop", "e1")


def play_two_turns(played: Session) -> None:
    async def run() -> None:
        played.prompt([1, 2])
        assert await played.generate() == [5, 6, 7]
        played.reward(0.25)
        played.observe([9, 9])
        await played.generate(max_new_tokens=4)
        played.finish(1.0)

    asyncio.run(run())


def test_tokens_masks_versions_and_turns_are_recorded_at_absolute_positions():
    played = session(ScriptedEngine(TURN_1, TURN_2))
    play_two_turns(played)
    trajectory = record(played)
    trajectory.validate(vocab_size=50, max_tokens=100)
    assert trajectory.token_ids.tolist() == [1, 2, 5, 6, 7, 9, 9, 8]
    assert trajectory.loss_mask.tolist() == [0, 0, 1, 1, 1, 0, 0, 1]
    np.testing.assert_allclose(trajectory.logprobs, [0, 0, -0.1, -0.2, -0.3, 0, 0, -0.4])
    assert trajectory.versions == [("1.0", 2, 4), ("1.1", 4, 5), ("1.1", 7, 8)]
    assert trajectory.turns == [("prompt", 0, 2), ("action", 2, 5), ("observation", 5, 7), ("action", 7, 8)]
    assert trajectory.metrics["engine_retries"] == 2 and trajectory.metrics["turns"] == 2


def test_the_routing_of_the_turn_that_sampled_a_token_is_recorded():
    """The second request covers the first one's tokens again, computed anew under other weights."""
    reports = [np.full((tokens, 1, 2), turn, np.uint8) for turn, tokens in enumerate((4, 7))]
    turns = [replace(turn, routed_experts=report) for turn, report in zip((TURN_1, TURN_2), reports, strict=True)]
    played = session(ScriptedEngine(*turns))
    play_two_turns(played)
    assert record(played).routed_experts[:, 0, 0].tolist() == [0] * 4 + [1] * 3


def test_a_turns_reward_and_the_terminal_reward_sit_on_last_action_tokens():
    played = session(ScriptedEngine(TURN_1, TURN_2))
    play_two_turns(played)
    assert record(played).rewards.tolist() == [0, 0, 0, 0, 0.25, 0, 0, 1]
    played.replace_rewards(0.5)
    assert record(played).rewards.tolist() == [0, 0, 0, 0, 0, 0, 0, 0.5]


def test_a_reward_after_an_observation_still_sits_on_the_action():
    played = session(ScriptedEngine(TURN_1))
    played.prompt([1, 2])
    asyncio.run(played.generate())
    played.observe([9])
    played.finish(1.0)
    assert record(played).rewards.tolist() == [0, 0, 0, 0, 1, 0]


def test_each_turn_sends_the_whole_history_and_asks_for_the_engine_that_has_it():
    engine = ScriptedEngine(TURN_1, TURN_2)
    play_two_turns(session(engine, max_tokens_per_turn=30, max_tokens=60))
    assert engine.calls == [([1, 2], 30, None), ([1, 2, 5, 6, 7, 9, 9], 4, "e1")]


@pytest.mark.parametrize(("max_tokens", "context", "expected"), [(10, 100, 8), (90, 20, 11)])
def test_a_turn_may_use_what_the_episode_or_the_context_leaves(max_tokens, context, expected):
    engine = ScriptedEngine(TURN_1, context=context)
    played = session(engine, max_tokens=max_tokens)
    played.prompt([1, 2])
    asyncio.run(played.generate())
    assert engine.calls[0][1] == expected


def test_a_turn_of_no_tokens_is_refused_rather_than_unlimited():
    async def no_engines() -> list:
        return []

    played = session(EngineClient(ModelLimits(vocab_size=50, context=100), "token", no_engines))
    played.prompt([1, 2])
    with pytest.raises(RequestRefused, match="max_new_tokens = 0: at least one token"):
        asyncio.run(played.generate(max_new_tokens=0))


def test_limits_on_turns_and_tokens_end_the_episode():
    played = session(ScriptedEngine(TURN_1, TURN_2), max_turns=1, max_tokens=7)
    with pytest.raises(BudgetExceeded, match=r"exceed rollout.max_tokens = 7"):
        played.prompt(range(8))
    played.prompt([1, 2])
    asyncio.run(played.generate())
    with pytest.raises(BudgetExceeded, match="max_turns = 1"):
        asyncio.run(played.generate())
    with pytest.raises(BudgetExceeded, match="8 tokens with this observation exceed"):
        played.observe([1, 1, 1])
    assert len(played.token_ids) == 5  # what did not fit was not recorded
    full = session(ScriptedEngine(TURN_1), max_tokens=2)
    full.prompt([1, 2])
    with pytest.raises(BudgetExceeded, match="2 tokens leave none"):
        asyncio.run(full.generate())


def test_misuse_is_a_sentence():
    played = session(ScriptedEngine(TURN_1))
    with pytest.raises(RequestRefused, match="encodes to no tokens"):
        played.prompt([])
    with pytest.raises(RequestRefused, match=r"prompt\[1\] = 50 is outside the vocabulary"):
        played.prompt([1, 50])
    with pytest.raises(RequestRefused, match=r"before session.prompt"):
        played.observe([1])
    played.prompt([1])
    with pytest.raises(RequestRefused, match="called twice"):
        played.prompt([1])
    with pytest.raises(RequestRefused, match="has not acted yet"):
        played.finish(1.0)
    asyncio.run(played.generate())
    with pytest.raises(RequestRefused, match="finite"):
        played.reward(float("nan"))
    played.finish(truncated=True)
    with pytest.raises(RequestRefused, match="finish was called twice"):
        played.finish()
    assert record(played).truncated


def test_a_metric_of_any_number_type_is_recorded_as_a_float():
    played = session(ScriptedEngine(TURN_1, TURN_2))
    play_two_turns(played)
    played.metrics |= {"success": True, "score": np.float32(0.5)}
    metrics = record(played).metrics
    assert metrics["success"] == 1.0
    assert {type(value) for value in metrics.values()} == {float}
