"""The divergence from the rollout policy, estimated on its own samples."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_sao.algorithm import kl_to_rollout_policy

pytestmark = pytest.mark.unit
f64 = torch.float64
BAND = {"eps_low": 0.999999, "eps_high": 1e6}


def test_its_expectation_under_the_rollout_policy_is_the_divergence_and_so_is_its_gradient() -> None:
    rollout = torch.tensor([0.1, 0.2, 0.7], dtype=f64)
    logits = torch.tensor([1.0, -0.3, 0.2], dtype=f64, requires_grad=True)
    logprobs = logits.log_softmax(-1)
    exact = (logprobs.exp() * (logprobs - rollout.log())).sum()
    (exact_gradient,) = torch.autograd.grad(exact, logits, retain_graph=True)
    # every symbol as often as the rollout policy samples it
    terms = [
        kl_to_rollout_policy(logprobs[i : i + 1], rollout[i : i + 1].log(), torch.ones(1), **BAND) for i in range(3)
    ]
    estimate = sum(p * term for p, term in zip(rollout.tolist(), terms, strict=True))
    (gradient,) = torch.autograd.grad(estimate, logits)
    assert float(estimate) == pytest.approx(float(exact), rel=1e-12)
    torch.testing.assert_close(gradient, exact_gradient, rtol=1e-12, atol=1e-12)


def test_it_is_never_negative_and_zero_where_the_policies_agree() -> None:
    logprobs = torch.linspace(-3, 0, 50, dtype=f64)
    rollout = torch.full((50,), -1.5, dtype=f64)
    terms = [kl_to_rollout_policy(logprobs[i : i + 1], rollout[:1], torch.ones(1), 0.99, 50) for i in range(50)]
    assert min(terms) >= 0 and max(terms) > 1
    assert kl_to_rollout_policy(logprobs, logprobs, torch.ones(50), 0.3, 5.0) == 0


@pytest.mark.parametrize("rollout", [math.nan, math.inf, -math.inf, -500.0, 99.5])
def test_a_token_that_dis_rejects_adds_nothing_and_has_no_gradient(rollout: float) -> None:
    logprobs = torch.tensor([-0.5, -1.0], requires_grad=True)
    total = kl_to_rollout_policy(logprobs, torch.tensor([-0.6, rollout]), torch.ones(2), 0.3, 5.0)
    total.backward()
    rho = math.exp(0.1)
    assert float(total.detach()) == pytest.approx(rho * 0.1 - rho + 1, rel=1e-4)
    assert logprobs.grad[1] == 0 and logprobs.grad[0] == pytest.approx(rho * 0.1, rel=1e-4)


def test_junk_off_the_mask_is_ignored() -> None:
    logprobs = torch.tensor([-0.5, math.nan], requires_grad=True)
    total = kl_to_rollout_policy(logprobs, torch.tensor([-0.6, math.inf]), torch.tensor([1, 0]), 0.3, 5.0)
    total.backward()
    assert total.isfinite() and logprobs.grad[1] == 0
