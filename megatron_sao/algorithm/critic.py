"""The critic's loss."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_sao.algorithm.packed import check_packed


def value_loss(
    values: Tensor,
    returns: Tensor,
    loss_mask: Tensor,
    old_values: Tensor | None = None,
    clip: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """``sum_i 1/2 (V_i - R_i)^2`` over action tokens.

    With ``clip``, a value further than ``clip`` from ``old_values`` is pessimistic, as in PPO: the larger of the
    loss at V and at V clamped to ``old_values +- clip``.

    Args:
        values: ``V``, float [T], requires grad.
        returns: ``R``, float [T].
        loss_mask: [T], non-zero on action tokens; positions off it are ignored, whatever they hold.
        old_values: float [T], the values before the first critic update on this batch; needed by ``clip``.
        clip: half-width of the trust region, or None.

    Returns:
        The summed loss (0-d, at least float32) and 0-d statistics ``num_action_tokens`` (int64) and ``clipped``
        (int64, tokens whose gradient the clip removed).

    Raises:
        ValueError: tensors that are not packed alike, or ``clip`` without ``old_values``.
    """
    check_packed(values=values, returns=returns, loss_mask=loss_mask)
    action = loss_mask != 0
    dtype = torch.promote_types(values.dtype, torch.float32)
    values, returns = values.to(dtype), returns.detach().to(dtype)
    loss = 0.5 * torch.where(action, values - returns, 0.0).square()
    clipped = torch.zeros_like(action)
    if clip is not None:
        if old_values is None:
            raise ValueError(f"clip={clip} needs old_values: pass the values from before the update, or clip=None")
        check_packed(values=values, old_values=old_values)
        old_values = old_values.detach().to(dtype)
        clamped = old_values + (values - old_values).clamp(-clip, clip)
        clamped_loss = 0.5 * torch.where(action, clamped - returns, 0.0).square()
        # inside the region `clamped` is the value up to rounding, which must not count
        clipped = action & ((values - old_values).abs() > clip) & (clamped_loss > loss)
        loss = torch.where(clipped, clamped_loss, loss)  # `maximum` would halve the gradient where both are equal
    return loss.sum(), {"num_action_tokens": action.sum(), "clipped": clipped.sum()}
