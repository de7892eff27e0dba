"""SAO's losses against the reference vectors, autograd, and plain implementations written here."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_sao.algorithm import (
    RATIO_EDGES,
    dis_policy_loss,
    length_adaptive_lambda,
    ratio_histogram,
    skip_observation_gae,
    value_loss,
)
from tests.reference import EDGE, VECTORS, close, f64, tensor


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
        return [
            advantages,
            returns,
            policy,
            critic,
            logprobs.grad,
            values.grad,
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


finite = st.floats(-3, 3, allow_nan=False, width=32)
reported = st.one_of(finite, st.sampled_from([-math.inf, math.nan, math.inf, -2000.0]))


@given(st.lists(st.tuples(st.booleans(), reported, reported, finite), max_size=60))
@settings(max_examples=60)
def test_dis_equals_the_plain_formula(tokens: list) -> None:
    eps_low, eps_high = 0.3, 5.0
    loss, gradient, rhos, accepted = 0.0, [], [], []
    for is_action, logprob, rollout_logprob, advantage in tokens:
        difference, weight = logprob - rollout_logprob, 0.0
        if is_action and math.isfinite(difference) and difference < 700:
            rhos.append(math.exp(difference))
            if 1 - eps_low < rhos[-1] < 1 + eps_high:
                accepted.append(rhos[-1])
                weight = rhos[-1] * advantage
                loss -= weight * logprob
        gradient.append(-weight)
    num_actions = sum(token[0] for token in tokens)

    logprobs = tensor([token[1] for token in tokens]).requires_grad_()
    columns = (tensor([token[k] for token in tokens]) for k in (2, 3, 0))
    loss_sum, stats = dis_policy_loss(logprobs, *columns, eps_low, eps_high)
    loss_sum.backward()
    close(logprobs.grad, gradient)
    assert float(loss_sum.detach()) == pytest.approx(loss, rel=1e-12, abs=1e-12)
    expected = {
        "num_action_tokens": num_actions,
        "accepted": len(accepted),
        "below": sum(rho <= 1 - eps_low for rho in rhos),
        "above": sum(rho >= 1 + eps_high for rho in rhos),
        "nonfinite": num_actions - len(rhos),
        "rho_sum": sum(rhos),
        "rho_max": max(rhos, default=0.0),
        "accepted_rho_sum": sum(accepted),
        "accepted_rho_sq_sum": sum(rho**2 for rho in accepted),
    }
    assert {name: float(stats[name]) for name in expected} == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_dis_gradient_is_the_finite_difference_of_the_surrogate_with_frozen_weights() -> None:
    """The stop-gradient: the loss's own finite difference has a term for the ratio, its gradient has not."""
    generator = torch.Generator().manual_seed(2)
    point, rollout, advantages = torch.randn(3, 40, generator=generator, dtype=f64)
    mask = torch.rand(40, generator=generator) < 0.7
    frozen = [math.exp(a - b) for a, b in zip(point.tolist(), rollout.tolist(), strict=True)]
    frozen = [rho if m and 0.2 < rho < 4.0 else 0.0 for rho, m in zip(frozen, mask.tolist(), strict=True)]

    def surrogate(logprobs: torch.Tensor) -> float:
        terms = zip(frozen, advantages.tolist(), logprobs.tolist(), strict=True)
        return -math.fsum(weight * advantage * logprob for weight, advantage, logprob in terms)

    def loss(logprobs: torch.Tensor) -> float:
        return float(dis_policy_loss(logprobs, rollout, advantages, mask, 0.8, 3.0)[0].detach())

    def differences(function, step: float) -> list[float]:
        steps = torch.eye(40, dtype=f64) * step
        return [(function(point + h) - function(point - h)) / (2 * step) for h in steps]

    logprobs = point.clone().requires_grad_()
    dis_policy_loss(logprobs, rollout, advantages, mask, 0.8, 3.0)[0].backward()
    assert loss(point) == pytest.approx(surrogate(point), rel=1e-12)
    close(logprobs.grad, differences(surrogate, 1e-3), 1e-10)
    assert (logprobs.grad - tensor(differences(loss, 1e-6))).abs().max() > 0.1


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


@pytest.mark.parametrize("clip", [None, 0.2])
@given(st.lists(st.tuples(st.booleans(), finite, finite, st.one_of(finite, st.floats(-0.3, 0.3))), max_size=60))
@example([(True, 0.0, 1.0, 0.2)])  # exactly as far as it may
@settings(max_examples=60)
def test_value_loss_equals_the_plain_formula(clip: float | None, tokens: list) -> None:
    loss, gradient, num_clipped = 0.0, [], 0
    for is_action, value, target, moved in tokens:
        old_value = value + moved
        term, slope = 0.5 * (value - target) ** 2, value - target
        if clip is not None and abs(value - old_value) > clip:
            clamped = min(max(value, old_value - clip), old_value + clip)
            if 0.5 * (clamped - target) ** 2 > term:
                term, slope = 0.5 * (clamped - target) ** 2, 0.0
                num_clipped += is_action
        loss += term * is_action
        gradient.append(slope * is_action)

    values = tensor([token[1] for token in tokens]).requires_grad_()
    old_values = tensor([token[1] + token[3] for token in tokens])
    returns, mask = (tensor([token[k] for token in tokens]) for k in (2, 0))
    loss_sum, stats = value_loss(values, returns, mask, old_values, clip)
    loss_sum.backward()
    close(values.grad, gradient)
    assert float(loss_sum.detach()) == pytest.approx(loss, rel=1e-12, abs=1e-12)
    assert int(stats["clipped"]) == num_clipped
    assert int(stats["num_action_tokens"]) == sum(token[0] for token in tokens)


def test_value_clip_without_old_values_is_refused() -> None:
    with pytest.raises(ValueError, match="old_values"):
        value_loss(torch.ones(2), torch.ones(2), torch.ones(2), clip=0.2)


def test_tensors_that_would_broadcast_are_refused() -> None:
    with pytest.raises(ValueError, match="loss_mask has shape"):
        dis_policy_loss(torch.ones(3), torch.ones(3), torch.ones(3), torch.ones(1), 0.3, 5.0)
    with pytest.raises(ValueError, match="packed 1-D"):
        value_loss(torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 3))


def test_the_ratio_histogram_counts_each_action_token_with_a_finite_ratio_in_its_interval() -> None:
    rho = [0.0, 0.05, 0.3, 0.30001, 1.0, 1.0, 5.9, 7.0, 1.0, math.inf, math.nan]
    mask = torch.tensor([1, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1])
    counts = ratio_histogram(torch.tensor(rho, dtype=f64).log(), mask)
    upper = dict(zip((*RATIO_EDGES, math.inf), counts.tolist(), strict=True))
    # 0 is the ratio of a token that the current policy gives log-probability -inf: not a finite ratio
    expected = {0.1: 1, 0.3: 1, 0.5: 1, 1.01: 2, 6.0: 1, math.inf: 1}
    assert {edge: count for edge, count in upper.items() if count} == expected
