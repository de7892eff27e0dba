"""The baselines' losses and advantages against plain implementations written here."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sao.algorithm import RunningMeanBaseline, group_advantages, ppo_clip_policy_loss
from tests.reference import close, f64, tensor

CLIP_LOW, CLIP_HIGH = 0.2, 0.28


finite = st.floats(-3, 3, allow_nan=False, width=32)
reported = st.one_of(finite, st.sampled_from([-math.inf, math.nan, math.inf, -2000.0]))


@given(st.lists(st.tuples(st.booleans(), reported, reported, finite), max_size=60))
@settings(max_examples=60)
def test_ppo_clip_equals_the_plain_formula(tokens: list) -> None:
    loss, gradient, ratios, num_clipped = 0.0, [], [], 0
    for is_action, logprob, old_logprob, advantage in tokens:
        difference, slope = logprob - old_logprob, 0.0
        if is_action and math.isfinite(difference) and difference < 700:
            ratio = math.exp(difference)
            ratios.append(ratio)
            loss -= min(ratio * advantage, min(max(ratio, 1 - CLIP_LOW), 1 + CLIP_HIGH) * advantage)
            if (ratio > 1 + CLIP_HIGH and advantage > 0) or (ratio < 1 - CLIP_LOW and advantage < 0):
                num_clipped += 1
            else:
                slope = -ratio * advantage
        gradient.append(slope)
    num_actions = sum(token[0] for token in tokens)

    logprobs = tensor([token[1] for token in tokens]).requires_grad_()
    columns = (tensor([token[k] for token in tokens]) for k in (2, 3, 0))
    loss_sum, stats = ppo_clip_policy_loss(logprobs, *columns, CLIP_LOW, CLIP_HIGH)
    loss_sum.backward()
    close(logprobs.grad, gradient)
    assert float(loss_sum.detach()) == pytest.approx(loss, rel=1e-12, abs=1e-12)
    expected = {
        "num_action_tokens": num_actions,
        "clipped": num_clipped,
        "nonfinite": num_actions - len(ratios),
        "ratio_sum": sum(ratios),
        "ratio_max": max(ratios, default=0.0),
    }
    assert {name: float(value) for name, value in stats.items()} == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_where_old_equals_new_nothing_is_clipped_and_the_gradient_is_minus_the_advantage() -> None:
    logprobs = torch.linspace(-5, 0, 50, dtype=f64).requires_grad_()
    advantages = torch.linspace(-2, 2, 50, dtype=f64)
    loss_sum, stats = ppo_clip_policy_loss(logprobs, logprobs, advantages, torch.ones(50), CLIP_LOW, CLIP_HIGH)
    loss_sum.backward()
    assert torch.equal(logprobs.grad, -advantages)
    assert int(stats["clipped"]) == 0 and float(stats["ratio_max"]) == 1.0 and float(stats["ratio_sum"]) == 50.0


@pytest.mark.parametrize(
    ("ratio", "advantage", "clipped"),
    [
        (1.29, 1.0, True),
        (1.27, 1.0, False),
        (0.79, -1.0, True),
        (0.81, -1.0, False),
        (1.29, -1.0, False),  # a bad token grown likelier, a good one grown rarer: the gradient pulls back
        (0.79, 1.0, False),
        (1.22, 1.0, False),  # past 1 + clip_low, not past 1 + clip_high
    ],
)
def test_the_clip_acts_on_the_side_the_advantage_pushes_to(ratio: float, advantage: float, clipped: bool) -> None:
    logprobs = tensor([math.log(ratio)]).requires_grad_()
    loss_sum, stats = ppo_clip_policy_loss(
        logprobs, tensor([0.0]), tensor([advantage]), torch.ones(1), CLIP_LOW, CLIP_HIGH
    )
    loss_sum.backward()
    assert int(stats["clipped"]) == clipped
    close(logprobs.grad, [0.0 if clipped else -ratio * advantage])


def test_ppo_clip_gradient_is_the_finite_difference_of_its_loss() -> None:
    generator = torch.Generator().manual_seed(1)
    old_logprobs, advantages = torch.randn(2, 30, generator=generator, dtype=f64)
    logprobs = (old_logprobs + 0.4 * torch.randn(30, generator=generator, dtype=f64)).requires_grad_()
    mask = torch.rand(30, generator=generator) < 0.8

    def loss(logprobs: torch.Tensor) -> torch.Tensor:
        return ppo_clip_policy_loss(logprobs, old_logprobs, advantages, mask, CLIP_LOW, CLIP_HIGH)[0]

    _, stats = ppo_clip_policy_loss(logprobs, old_logprobs, advantages, mask, CLIP_LOW, CLIP_HIGH)
    assert 3 < int(stats["clipped"]) < 20
    assert torch.autograd.gradcheck(loss, (logprobs,))


def test_old_logprobs_and_advantages_get_no_gradient() -> None:
    inputs = [torch.full((3,), x, dtype=f64, requires_grad=True) for x in (-1.0, -1.1, 0.5)]
    ppo_clip_policy_loss(*inputs, torch.ones(3), CLIP_LOW, CLIP_HIGH)[0].backward()
    assert inputs[0].grad is not None and inputs[1].grad is None and inputs[2].grad is None


def test_a_ratio_that_float32_cannot_hold_never_reaches_a_float32_gradient() -> None:
    logprobs = torch.zeros(2, requires_grad=True)
    loss_sum, stats = ppo_clip_policy_loss(
        logprobs, torch.tensor([-200.0, 0.0]), -torch.ones(2), torch.ones(2), CLIP_LOW, CLIP_HIGH
    )
    loss_sum.backward()
    assert int(stats["nonfinite"]) == 1 and loss_sum.dtype == torch.float32
    assert torch.equal(logprobs.grad, torch.tensor([0.0, 1.0]))


rewards_and_groups = st.lists(st.tuples(st.integers(-20, 20), st.integers(0, 4)), max_size=40)


@given(rewards_and_groups)
@settings(max_examples=60)
def test_group_advantages_equal_the_plain_formula(batch: list) -> None:
    rewards, groups = [reward / 4 for reward, _ in batch], [f"prompt-{group}" for _, group in batch]
    expected = []
    for reward, group in zip(rewards, groups, strict=True):
        members = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        mean = math.fsum(members) / len(members)
        std = math.sqrt(math.fsum((r - mean) ** 2 for r in members) / len(members))
        expected.append((reward - mean) / std if len(set(members)) > 1 else 0.0)
    advantages = group_advantages(tensor(rewards, torch.float32), groups)
    assert advantages.dtype == f64
    close(advantages, expected)


def test_group_advantages_do_not_depend_on_the_rewards_scale_or_the_batch_order() -> None:
    rewards, groups = tensor([1, 0, 0, 3, 7, 5, 1]), ["a", "b", "a", "b", "b", "a", "c"]
    expected = group_advantages(rewards, groups)
    close(group_advantages(100 * rewards - 7, groups), expected)
    order = [6, 2, 5, 0, 1, 4, 3]
    close(group_advantages(rewards[order], [groups[k] for k in order]), expected[order])


@pytest.mark.parametrize("reward", [0.1, 0.7, 1e9 + 0.1])
def test_a_group_of_equal_rewards_has_advantage_exactly_zero(reward: float) -> None:
    assert torch.equal(group_advantages(tensor([reward] * 7), ["a"] * 6 + ["alone"]), torch.zeros(7, dtype=f64))


def test_rewards_that_do_not_fit_the_groups_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(3,\) for 2 groups"):
        group_advantages(torch.ones(3), ["a", "b"])
    with pytest.raises(ValueError, match=r"rewards\[1\] is nan"):
        group_advantages(tensor([1.0, math.nan]), ["a", "b"])


visits = st.lists(st.tuples(st.sampled_from("abc"), finite), max_size=60)


@given(visits, st.integers(1, 9), st.integers(0, 60))
@settings(max_examples=60)
def test_running_mean_equals_the_plain_formula_across_batches_and_a_restart(batch: list, window: int, cut: int) -> None:
    expected = []
    for index, (task, reward) in enumerate(batch):
        previous = [r for t, r in batch[:index] if t == task][-window:]
        expected.append(reward - (math.fsum(previous) / len(previous) if previous else 0.0))

    first = RunningMeanBaseline(window)
    actual = first.advantages([task for task, _ in batch[:cut]], [reward for _, reward in batch[:cut]])
    resumed = RunningMeanBaseline(window)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    actual += resumed.advantages([task for task, _ in batch[cut:]], [reward for _, reward in batch[cut:]])
    assert actual == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_the_running_mean_of_eight_rewards_excludes_the_current_one() -> None:
    baseline = RunningMeanBaseline()
    advantages = baseline.advantages(["x"] * 10, [8.0] + [0.0] * 8 + [1.0])
    assert advantages == [8.0, *(-8.0 / visits for visits in range(1, 9)), 1.0]
    assert baseline.state_dict() == {"x": [0.0] * 7 + [1.0]}


def test_a_saved_state_does_not_follow_the_baseline_and_a_smaller_window_keeps_the_newest() -> None:
    baseline = RunningMeanBaseline(3)
    baseline.advantages(["x", "x", "x"], [1.0, 2.0, 4.0])
    state = baseline.state_dict()
    baseline.advantages(["x"], [9.0])
    assert state == {"x": [1.0, 2.0, 4.0]}
    smaller = RunningMeanBaseline(2)
    smaller.load_state_dict(state)
    assert smaller.advantages(["x"], [0.0]) == [-3.0]


def test_running_mean_refuses_what_it_cannot_average_and_records_nothing_of_it() -> None:
    baseline = RunningMeanBaseline()
    with pytest.raises(ValueError, match="1 rewards for 2 task ids"):
        baseline.advantages(["x", "y"], [1.0])
    with pytest.raises(ValueError, match="'y' is nan"):
        baseline.advantages(["x", "y"], [1.0, math.nan])
    assert baseline.state_dict() == {}
    with pytest.raises(ValueError, match="window=0"):
        RunningMeanBaseline(0)
