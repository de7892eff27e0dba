"""The maths of SAO against the reference vectors, autograd, and a plain implementation written here."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sao.algorithm import (
    batched_skip_observation_gae,
    dis_policy_loss,
    explained_variance,
    length_adaptive_lambda,
    skip_observation_gae,
    value_loss,
)

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "sao.json").read_text())
EDGE = {case["name"]: case for case in VECTORS["edge"]}
f64 = torch.float64


def tensor(values: list, dtype: torch.dtype = f64) -> torch.Tensor:
    return torch.tensor([float(v) for v in values], dtype=dtype)


def close(actual: torch.Tensor, expected: list | torch.Tensor, tolerance: float = 1e-12) -> None:
    expected = expected if isinstance(expected, torch.Tensor) else tensor(expected)
    torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", VECTORS["random"], ids=lambda case: case["name"])
def test_random_vectors_are_reproduced(case: dict) -> None:
    expect = case["expect"]
    mask = torch.tensor(case["loss_mask"])
    lam = length_adaptive_lambda(int(mask.sum()), case["alpha"])
    assert lam == pytest.approx(expect["lambda_policy"], abs=1e-15)
    advantages, returns = skip_observation_gae(
        tensor(case["rewards"]), tensor(case["values"]), mask, case["gamma"], lam, case["bootstrap_value"]
    )
    close(advantages, expect["advantages"])
    close(returns, expect["returns"])

    logprobs = tensor(case["logprobs"]).requires_grad_()
    loss_sum, stats = dis_policy_loss(
        logprobs, tensor(case["rollout_logprobs"]), advantages, mask, case["eps_low"], case["eps_high"]
    )
    loss_sum.backward()
    close(loss_sum.detach(), torch.tensor(expect["dis_loss_sum"], dtype=f64))
    close(logprobs.grad, expect["dis_grad_wrt_logprobs"])
    for name in ("num_action_tokens", "accepted", "below", "above", "nonfinite"):
        assert int(stats[name]) == expect[name], name


def test_two_actions_computed_by_hand() -> None:
    case = EDGE["hand-two-actions"]
    advantages, returns = skip_observation_gae(
        tensor(case["rewards"]), tensor(case["values"]), torch.tensor(case["loss_mask"]), case["gamma"], case["lam"]
    )
    close(advantages, case["expect"]["advantages"])
    close(returns, case["expect"]["returns"])


def test_the_band_is_strict_on_both_sides() -> None:
    case = EDGE["band-edges"]
    logprobs = tensor(case["logprobs"]).requires_grad_()
    loss_sum, stats = dis_policy_loss(
        logprobs,
        tensor(case["rollout_logprobs"]),
        tensor(case["advantages"]),
        torch.tensor(case["loss_mask"]),
        case["eps_low"],
        case["eps_high"],
    )
    loss_sum.backward()
    close(logprobs.grad, case["expect"]["dis_grad_wrt_logprobs"])
    assert {name: int(stats[name]) for name in ("accepted", "below", "above", "nonfinite")} == {
        name: case["expect"][name] for name in ("accepted", "below", "above", "nonfinite")
    }


def test_a_ratio_exactly_on_the_band_is_rejected() -> None:
    logprobs = torch.zeros(1, dtype=f64)  # rho = 1
    for eps_low, eps_high, side in ((0.0, 5.0, "below"), (0.5, 0.0, "above")):
        loss_sum, stats = dis_policy_loss(
            logprobs, torch.zeros(1, dtype=f64), torch.ones(1, dtype=f64), torch.ones(1), eps_low, eps_high
        )
        assert int(stats[side]) == 1 and loss_sum.detach() == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_long_horizon_keeps_its_precision(dtype: torch.dtype) -> None:
    case, plan = EDGE["long-horizon"], EDGE["long-horizon"]["generate"]
    turn = [1] * plan["action"] + [0] * plan["observation"]
    mask = torch.tensor([0] * plan["prompt"] + turn * plan["turns"])
    values = (0.3 * torch.sin(0.01 * torch.arange(len(mask), dtype=f64))).to(dtype)
    actions = mask.nonzero().squeeze(1)
    rewards = torch.zeros(len(mask), dtype=dtype)
    rewards[actions[-1]] = plan["terminal_reward"]
    lam = length_adaptive_lambda(len(actions), case["alpha"])
    advantages, _ = skip_observation_gae(rewards, values, mask, case["gamma"], lam)
    expect, tolerance = case["expect"], 1e-11 if dtype == f64 else 1e-5
    assert len(actions) == expect["num_action_tokens"] and lam == pytest.approx(expect["lambda_policy"], abs=1e-15)
    assert float(advantages[actions[0]]) == pytest.approx(expect["first_advantage"], rel=tolerance)
    assert float(advantages[actions[4000]]) == pytest.approx(expect["middle_advantage"], rel=tolerance)
    assert float(advantages[actions[-1]]) == pytest.approx(expect["last_advantage"], rel=tolerance)
    assert float(advantages.double().sum()) == pytest.approx(expect["sum_advantages"], rel=tolerance)


def plain_gae(rewards: list, values: list, mask: list, gamma: float, lam: float, bootstrap: float) -> tuple:
    """The recursion as it is printed in the paper, token by token."""
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    advantage, target, next_value = 0.0, bootstrap, bootstrap
    for i in reversed(range(len(mask))):
        if mask[i]:
            advantage = rewards[i] + gamma * next_value - values[i] + gamma * lam * advantage
            target = rewards[i] + gamma * target
            next_value = values[i]
            advantages[i], returns[i] = advantage, target
    return advantages, returns


numbers = st.floats(-3, 3, allow_nan=False, width=32)
tokens = st.lists(st.tuples(st.booleans(), numbers, numbers), min_size=0, max_size=70)
trajectories = st.lists(st.tuples(tokens, st.floats(0, 1), numbers), min_size=1, max_size=5)


@given(trajectories, st.sampled_from([1.0, 0.99, 0.5, 0.0]))
@settings(max_examples=200, deadline=None)
def test_batched_gae_equals_the_plain_recursion(batch: list, gamma: float) -> None:
    flat = [token for trajectory, _, _ in batch for token in trajectory]
    mask = [token[0] for token in flat]
    values = tensor([v if m else math.nan for m, v, _ in flat])
    rewards = tensor([r if m else math.inf for m, _, r in flat])
    cu_seqlens = torch.tensor([0] + [len(trajectory) for trajectory, _, _ in batch]).cumsum(0).int()
    actual = batched_skip_observation_gae(
        rewards,
        values,
        torch.tensor(mask, dtype=torch.uint8),
        cu_seqlens,
        gamma,
        tensor([lam for _, lam, _ in batch]),
        tensor([bootstrap for _, _, bootstrap in batch]),
    )
    expected: tuple[list, list] = ([], [])
    for trajectory, lam, bootstrap in batch:
        columns = [list(column) for column in zip(*trajectory, strict=True)] or [[], [], []]
        plain = plain_gae(columns[2], columns[1], columns[0], gamma, lam, bootstrap)
        for total, part in zip(expected, plain, strict=True):
            total.extend(part)
    close(actual[0], expected[0], 1e-10)
    close(actual[1], expected[1], 1e-10)


def test_junk_off_the_mask_changes_nothing_and_gets_no_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    mask = torch.tensor([0, 1, 0, 1, 1, 0])
    clean = {
        name: torch.randn(6, generator=generator, dtype=f64) * 0.1
        for name in ("logprobs", "rollout", "rewards", "values", "returns", "old")
    }

    def everything(inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        logprobs = inputs["logprobs"].clone().requires_grad_()
        values = inputs["values"].clone().requires_grad_()
        advantages, returns = skip_observation_gae(inputs["rewards"], values, mask, 0.9, 0.8, 0.3)
        policy, stats = dis_policy_loss(logprobs, inputs["rollout"], advantages, mask, 0.3, 5.0)
        critic, critic_stats = value_loss(values, inputs["returns"], mask, inputs["old"], 0.05)
        (policy + critic).backward()
        variance = torch.tensor(explained_variance(values, inputs["returns"], mask))
        return [
            advantages,
            returns,
            policy,
            critic,
            logprobs.grad,
            values.grad,
            variance,
            *stats.values(),
            *critic_stats.values(),
        ]

    reference = everything(clean)
    assert float(reference[4].abs().sum()) > 0 and float(reference[5].abs().sum()) > 0
    for junk in (math.nan, math.inf, -math.inf, 1e300):
        dirty = {name: torch.where(mask != 0, value, junk) for name, value in clean.items()}
        for actual, expected in zip(everything(dirty), reference, strict=True):
            assert torch.equal(actual, expected)


@pytest.mark.parametrize("broken", [(-1.0, -math.inf), (-1.0, math.nan), (math.nan, -1.0), (-math.inf, -1.0)])
def test_a_non_finite_ratio_is_counted_and_never_reaches_the_gradient(broken: tuple[float, float]) -> None:
    logprobs = tensor([0.0, -0.5, broken[0]], torch.float32).requires_grad_()
    rollout = tensor([0.0, -0.6, broken[1]], torch.float32)
    mask = torch.tensor([0, 1, 1], dtype=torch.uint8)
    loss_sum, stats = dis_policy_loss(logprobs, rollout, torch.ones(3), mask, 1.5, 5.0)
    loss_sum.backward()
    assert int(stats["nonfinite"]) == 1 and int(stats["accepted"]) == 1 and int(stats["num_action_tokens"]) == 2
    assert all(value.isfinite() for value in stats.values()) and loss_sum.isfinite()
    close(logprobs.grad, [0.0, -math.exp(0.1), 0.0], 1e-6)


def test_dis_gradient_is_autograd_of_the_formula() -> None:
    generator = torch.Generator().manual_seed(1)
    logprobs = torch.randn(200, generator=generator, dtype=f64).requires_grad_()
    rollout, advantages = torch.randn(2, 200, generator=generator, dtype=f64)
    mask = torch.rand(200, generator=generator) < 0.6
    formula = torch.zeros((), dtype=f64)
    for i in mask.nonzero().flatten().tolist():
        rho = torch.exp(logprobs[i] - rollout[i]).detach()
        if 0.2 < rho < 4.0:
            formula = formula - rho * advantages[i] * logprobs[i]
    (expected,) = torch.autograd.grad(formula, logprobs)
    loss_sum, stats = dis_policy_loss(logprobs, rollout, advantages.requires_grad_(), mask, 0.8, 3.0)
    loss_sum.backward()
    close(loss_sum.detach(), formula.detach())
    close(logprobs.grad, expected)
    assert advantages.grad is None
    assert min(int(stats[name]) for name in ("accepted", "below", "above")) > 5


def test_dis_statistics_describe_the_ratios() -> None:
    rho = torch.tensor([9.0, 0.5, 1.0, 2.0, 8.0], dtype=f64)
    mask = torch.tensor([0, 1, 1, 1, 1])
    _, stats = dis_policy_loss(rho.log(), torch.zeros(5, dtype=f64), torch.ones(5, dtype=f64), mask, 0.3, 5.0)
    assert float(stats["rho_sum"]) == pytest.approx(11.5) and float(stats["rho_max"]) == pytest.approx(8.0)
    assert float(stats["accepted_rho_sum"]) == pytest.approx(3.0)
    assert float(stats["accepted_rho_sq_sum"]) == pytest.approx(5.0)
    assert float(stats["abs_logprob_diff_sum"]) == pytest.approx(math.log(0.5 * 2 * 2 * 8 * 2))


def test_a_ratio_too_large_for_float32_is_above_the_band_not_broken() -> None:
    _, stats = dis_policy_loss(torch.zeros(1), torch.tensor([-200.0]), torch.ones(1), torch.ones(1), 0.3, 5.0)
    assert int(stats["above"]) == 1 and int(stats["nonfinite"]) == 0


def test_bfloat16_inputs_give_float32_results() -> None:
    ones = torch.ones(4, dtype=torch.bfloat16)
    assert dis_policy_loss(-ones, -ones, ones, ones, 0.3, 5.0)[0].dtype == torch.float32
    assert value_loss(ones, ones, ones)[0].dtype == torch.float32
    assert skip_observation_gae(ones, ones, ones, 1.0, 0.5)[0].dtype == torch.float32


def test_lambda_stays_in_the_unit_interval() -> None:
    assert length_adaptive_lambda(8000) == pytest.approx(1 - 1 / 12000)
    assert length_adaptive_lambda(1, alpha=0.5) == 0.0
    assert length_adaptive_lambda(0) == 0.0


def test_value_loss_is_half_the_squared_error_over_action_tokens() -> None:
    values = torch.tensor([7.0, 1.0, 2.0], requires_grad=True)
    loss_sum, stats = value_loss(values, torch.tensor([0.0, 0.5, 4.0]), torch.tensor([0, 1, 1]))
    loss_sum.backward()
    assert float(loss_sum.detach()) == pytest.approx(0.5 * (0.25 + 4.0)) and int(stats["num_action_tokens"]) == 2
    close(values.grad, [0.0, 0.5, -2.0], 1e-6)


def test_value_clip_removes_the_gradient_of_a_value_that_moved_too_far_towards_its_target() -> None:
    old, returns = torch.zeros(3), torch.ones(3)
    values = torch.tensor([0.1, 0.5, -0.5], requires_grad=True)  # inside; outside, closer; outside, further away
    loss_sum, stats = value_loss(values, returns, torch.ones(3), old, clip=0.2)
    loss_sum.backward()
    close(values.grad, [-0.9, 0.0, -1.5], 1e-6)
    assert int(stats["clipped"]) == 1
    assert float(loss_sum.detach()) == pytest.approx(0.5 * (0.9**2 + 0.8**2 + 1.5**2))


def test_value_clip_without_old_values_is_refused() -> None:
    with pytest.raises(ValueError, match="old_values"):
        value_loss(torch.ones(2), torch.ones(2), torch.ones(2), clip=0.2)


def test_explained_variance_of_good_useless_and_undefined_critics() -> None:
    returns, mask = torch.tensor([0.0, 1.0, 0.0, 1.0, 99.0]), torch.tensor([1, 1, 1, 1, 0])
    assert explained_variance(returns, returns, mask) == 1.0
    assert explained_variance(torch.full((5,), 0.5), returns, mask) == pytest.approx(0.0)
    assert explained_variance(torch.rand(5), torch.full((5,), 0.1), mask) == 0.0
    assert explained_variance(returns, returns, torch.zeros(5)) == 0.0


def test_tensors_that_would_broadcast_are_refused() -> None:
    with pytest.raises(ValueError, match="loss_mask has shape"):
        dis_policy_loss(torch.ones(3), torch.ones(3), torch.ones(3), torch.ones(1), 0.3, 5.0)
    with pytest.raises(ValueError, match="packed 1-D"):
        value_loss(torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 3))
    with pytest.raises(ValueError, match="cu_seqlens"):
        batched_skip_observation_gae(
            torch.ones(3), torch.ones(3), torch.ones(3), torch.tensor([0, 2]), 1.0, torch.ones(1), torch.zeros(1)
        )
