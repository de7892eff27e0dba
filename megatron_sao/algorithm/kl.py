"""Divergence of the policy from the one that sampled the tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_sao.algorithm.packed import check_packed


def kl_to_rollout_policy(
    logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor, eps_low: float, eps_high: float
) -> Tensor:
    """``sum_i rho_i log rho_i - rho_i + 1`` over the action tokens that DIS accepts.

    The tokens are samples of the rollout policy, under which this estimates KL(pi_theta || rollout policy) without
    bias, is never negative, and has the gradient ``rho log rho`` per log-probability. Outside the band it is not taken:
    there it is unbounded, in value and gradient.

    Args:
        logprobs: ``l``, float [T], current policy, requires grad.
        rollout_logprobs: ``b``, float [T].
        loss_mask: [T], non-zero on action tokens; positions off it are ignored, whatever they hold.
        eps_low, eps_high: the band, as in :func:`dis_policy_loss`.

    Returns:
        The sum, 0-d, at least float32; zero gradient off the band.
    """
    check_packed(logprobs=logprobs, rollout_logprobs=rollout_logprobs, loss_mask=loss_mask)
    log_ratio = logprobs.double() - rollout_logprobs.double()
    rho = log_ratio.detach().exp()
    accepted = (loss_mask != 0) & (rho > 1 - eps_low) & (rho < 1 + eps_high) & log_ratio.detach().isfinite()
    log_ratio = torch.where(accepted, log_ratio, 0.0)  # before exp: its gradient elsewhere may be no number
    terms = log_ratio.exp() * log_ratio - log_ratio.exp() + 1
    return terms.sum().to(torch.promote_types(logprobs.dtype, torch.float32))
