"""Advantages of packed micro-batches, with values computed by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_sao.algorithm import RunningMeanBaseline
from megatron_sao.config import AlgorithmConfig
from megatron_sao.trainer.advantages import fill_critic_advantages, fill_outcome_advantages, outcome_advantages
from megatron_sao.trainer.microbatch import MicroBatch, build_microbatches
from tests.trajectories import make_trajectory

pytestmark = pytest.mark.unit

# Tokens 1..6, actions at positions 2, 3 and 5; the values of the states before them are those at positions 1, 2 and 4.
VALUES = [9.0, 0.5, 0.25, 9.0, 0.75, 0.125]


def one_trajectory(**changes: object) -> MicroBatch:
    (batch,) = build_microbatches([make_trajectory(**changes)], 0, 1, 100, 1, torch.device("cpu"))
    batch.values = torch.tensor(VALUES)
    return batch


def filled(batch: MicroBatch, **settings: object) -> MicroBatch:
    fill_critic_advantages([batch], AlgorithmConfig(**settings))
    return batch


def test_a_terminal_reward_reaches_every_action_and_skips_the_observation() -> None:
    batch = filled(one_trajectory())
    assert batch.returns.tolist() == [0, 1, 1, 0, 1, 0]
    lam = 1 - 1 / (1.5 * 3)
    last = 1 - 0.75
    middle = 0.75 - 0.25 + lam * last
    first = 0.25 - 0.5 + lam * middle
    assert batch.advantages.tolist() == pytest.approx([0, first, middle, 0, last, 0])


def test_per_turn_rewards_stay_on_their_turns() -> None:
    batch = filled(one_trajectory(rewards=np.array([0, 0, 0, 0.5, 0, 1], np.float32)))
    assert batch.returns.tolist() == [0, 1.5, 1.5, 0, 1, 0]


def test_a_truncated_episode_is_terminal_or_bootstrapped_from_the_state_after_its_last_token() -> None:
    unpaid = {"rewards": np.zeros(6, np.float32), "truncated": True}
    assert filled(one_trajectory(**unpaid)).returns.tolist() == [0, 0, 0, 0, 0, 0]
    bootstrapped = filled(one_trajectory(**unpaid), truncation="bootstrap")
    assert bootstrapped.returns.tolist() == [0, 0.125, 0.125, 0, 0.125, 0]
    ended = filled(one_trajectory(rewards=np.zeros(6, np.float32)), truncation="bootstrap")
    assert not ended.returns.any(), "an episode that ended by itself has nothing to bootstrap from"


def test_plain_gae_treats_observations_between_actions_as_actions_and_nothing_outside() -> None:
    batch = filled(one_trajectory(), gae="all_tokens")
    assert batch.value_mask.tolist() == [False, True, True, True, True, False]
    assert batch.returns.tolist() == [0, 1, 1, 1, 1, 0]
    lam = 1 - 1 / (1.5 * 4)
    expected = [0.0] * 6
    following = 0.0
    for position, next_value in ((4, None), (3, 0.75), (2, 9.0), (1, 0.25)):
        delta = (1.0 if next_value is None else next_value) - VALUES[position]
        following = expected[position] = delta + lam * following
    assert batch.advantages.tolist() == pytest.approx(expected)


def test_each_trajectory_gets_its_own_outcome() -> None:
    trajectories = [make_trajectory(id="a"), make_trajectory(id="b")]
    (batch,) = build_microbatches(trajectories, 0, 1, 100, 1, torch.device("cpu"))
    fill_outcome_advantages([batch], {"a": 0.5, "b": -2.0})
    assert batch.advantages.tolist() == [0.5] * 6 + [-2.0] * 6


def test_outcomes_are_compared_with_the_group_or_with_the_prompts_own_past() -> None:
    lost = replace(make_trajectory(), rewards=np.zeros(6, np.float32))
    won = make_trajectory()
    pair = [replace(won, group="g"), replace(lost, group="g"), replace(won, group="h"), replace(won, group="h")]
    grouped = outcome_advantages(pair, AlgorithmConfig(advantage="group"), RunningMeanBaseline(8))
    assert grouped == [1, -1, 0, 0]
    baseline = RunningMeanBaseline(8)
    running = AlgorithmConfig(advantage="running_mean")
    assert outcome_advantages([won, lost, won], running, baseline) == [1, -1, 0.5]
    assert outcome_advantages([won], running, baseline) == [pytest.approx(1 / 3)]
