"""PPO's clipped policy loss with clip-higher, of the baselines SAO is compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_sao.algorithm.packed import check_packed


def ppo_clip_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """``-sum_i min(r_i A_i, clip(r_i, 1 - clip_low, 1 + clip_high) A_i)`` with ``r_i = exp(l_i - o_i)``.

    The clip removes a token's gradient only on the side its advantage pushes to: r above the band with A > 0, r
    below it with A < 0. A token whose ratio (in the loss's dtype) or its logarithm is not finite contributes
    exactly zero gradient; so does every position off the mask, whatever it holds.

    Args:
        logprobs: ``l``, float [T], current policy, requires grad.
        old_logprobs: ``o``, float [T], old policy; no gradient.
        advantages: ``A``, float [T].
        loss_mask: [T], non-zero on action tokens.
        clip_low, clip_high: half-widths of the band below and above 1.

    Returns:
        The loss summed over tokens (0-d, at least float32; the caller divides by the global denominator), and
        0-d statistics over action tokens. int64: ``num_action_tokens``, ``clipped`` (tokens whose gradient the clip
        removed), ``nonfinite``. float64: ``ratio_sum, ratio_max`` over those with a finite ratio.

    Raises:
        ValueError: tensors that are not packed alike.
    """
    check_packed(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, loss_mask=loss_mask)
    action = loss_mask != 0
    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    # float64, so that float32 rounds no ratio across the band's edge
    log_ratio = logprobs.double() - old_logprobs.detach().double()
    # the loss is unbounded where r is large and A < 0, hence finite in the loss's own dtype
    finite = action & log_ratio.exp().to(dtype).isfinite() & log_ratio.isfinite()

    # torch.where selects before exp: a product with a mask would turn NaN and inf into NaN gradients
    ratio = torch.where(finite, log_ratio, 0.0).exp()
    advantages = torch.where(finite, advantages.detach().double(), 0.0)
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss_sum = -torch.minimum(ratio * advantages, clipped_ratio * advantages).to(dtype).sum()

    ratio = ratio.detach()
    too_high = (ratio > 1 + clip_high) & (advantages > 0)
    too_low = (ratio < 1 - clip_low) & (advantages < 0)
    finite_ratio = torch.where(finite, ratio, 0.0)
    stats = {
        "num_action_tokens": action.sum(),
        "clipped": (too_high | too_low).sum(),
        "nonfinite": (action & ~finite).sum(),
        "ratio_sum": finite_ratio.sum(),
        "ratio_max": finite_ratio.max() if ratio.numel() else ratio.new_zeros(()),
    }
    return loss_sum, stats
