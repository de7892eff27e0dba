"""Direct double-sided importance sampling (DIS), SAO's policy loss."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_sao.algorithm.packed import check_packed

RATIO_EDGES = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99, 1.01, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0, 6.0)


def dis_policy_loss(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    eps_low: float,
    eps_high: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """``-sum_i sg[f(rho_i)] A_i l_i`` with ``rho_i = exp(l_i - b_i)`` and ``f(rho) = rho`` strictly inside
    ``(1 - eps_low, 1 + eps_high)``, else 0.

    A token outside the band, or whose ratio or its logarithm is not finite (``b = -inf``, NaN), contributes
    exactly zero gradient; so does every position off the mask, whatever it holds.

    Args:
        logprobs: ``l``, float [T], current policy, requires grad.
        rollout_logprobs: ``b``, float [T], reported by the engine when it sampled the token.
        advantages: ``A``, float [T].
        loss_mask: [T], non-zero on action tokens.
        eps_low, eps_high: the band; eps_low >= 1 leaves only the upper side.

    Returns:
        The loss summed over tokens (0-d, at least float32; the caller divides by the global denominator), and
        0-d statistics over action tokens. int64: ``num_action_tokens = accepted + below + above + nonfinite``.
        float64: ``rho_sum, rho_max, abs_logprob_diff_sum`` over those with a finite ratio, and
        ``accepted_rho_sum, accepted_rho_sq_sum`` (effective sample size = sum^2 / sq_sum).

    Raises:
        ValueError: tensors that are not packed alike.
    """
    check_packed(logprobs=logprobs, rollout_logprobs=rollout_logprobs, advantages=advantages, loss_mask=loss_mask)
    action = loss_mask != 0
    # float64, so that float32 neither overflows a merely large ratio nor rounds one across the band's edge
    log_ratio = logprobs.detach().double() - rollout_logprobs.double()
    rho = log_ratio.exp()
    finite = action & rho.isfinite() & log_ratio.isfinite()
    below = finite & (rho <= 1 - eps_low)
    above = finite & (rho >= 1 + eps_high)
    accepted = finite & ~below & ~above

    # torch.where selects: a product with a mask would turn NaN and inf into NaN gradients
    weights = torch.where(accepted, rho * advantages.detach().double(), 0.0)
    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    loss_sum = -(weights.to(dtype) * torch.where(accepted, logprobs, 0.0)).sum()

    finite_rho = torch.where(finite, rho, 0.0)
    accepted_rho = torch.where(accepted, rho, 0.0)
    stats = {
        "num_action_tokens": action.sum(),
        "accepted": accepted.sum(),
        "below": below.sum(),
        "above": above.sum(),
        "nonfinite": (action & ~finite).sum(),
        "rho_sum": finite_rho.sum(),
        "rho_max": finite_rho.max() if rho.numel() else rho.new_zeros(()),
        "abs_logprob_diff_sum": torch.where(finite, log_ratio.abs(), 0.0).sum(),
        "accepted_rho_sum": accepted_rho.sum(),
        "accepted_rho_sq_sum": accepted_rho.square().sum(),
    }
    return loss_sum, stats


def ratio_histogram(log_ratio: Tensor, loss_mask: Tensor) -> Tensor:
    """How many action tokens have ``rho`` in each interval between neighbours of ``0, *RATIO_EDGES, inf``.

    Args:
        log_ratio: float64 [T], ``l - b``.
        loss_mask: [T], non-zero on action tokens.

    Returns:
        int64 [len(RATIO_EDGES) + 1]. An interval contains its upper edge. Ratios that are not finite are left out.
    """
    rho = log_ratio.exp()
    counted = (loss_mask != 0) & rho.isfinite() & log_ratio.isfinite()
    edges = torch.tensor(RATIO_EDGES, dtype=rho.dtype, device=rho.device)
    interval = torch.bucketize(rho, edges)
    intervals = torch.arange(len(RATIO_EDGES) + 1, device=rho.device)
    return ((interval[:, None] == intervals) & counted[:, None]).sum(0)
