"""Skip-observation, token-level generalised advantage estimation.

The recursion runs over action tokens only: the last token of one action links straight to the first token of
the next. With action tokens 1..n of a trajectory::

    delta_i = r_i + gamma V_{i+1} - V_i        V_{n+1} = bootstrap value (0 if the episode ended)
    A_i     = delta_i + gamma lam A_{i+1}      A_{n+1} = 0
    R_i     = r_i + gamma R_{i+1}              R_{n+1} = bootstrap value
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_sao.algorithm.packed import check_packed


def length_adaptive_lambda(num_action_tokens: int, alpha: float = 1.5) -> float:
    """``1 - 1 / (alpha n)`` clamped to [0, 1]; 0 for a trajectory without action tokens."""
    return max(0.0, 1.0 - 1.0 / (alpha * num_action_tokens)) if num_action_tokens else 0.0


def skip_observation_gae(
    rewards: Tensor,
    values: Tensor,
    loss_mask: Tensor,
    gamma: float,
    lam: float,
    bootstrap_value: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns (lambda 1) of one trajectory of length L.

    Args:
        rewards, values, loss_mask: [L]; what rewards and values hold off the mask is ignored.
        gamma, lam: discount and GAE lambda, in [0, 1].
        bootstrap_value: ``V(x[<L])`` of a truncated episode, 0 for one that ended.

    Returns:
        ``(advantages, returns)``, [L], at least float32, zero off the mask, without gradient.
    """
    cu_seqlens = torch.tensor([0, values.numel()], device=values.device)
    lambdas = torch.tensor([lam], dtype=torch.float64, device=values.device)
    bootstrap_values = torch.tensor([float(bootstrap_value)], dtype=torch.float64, device=values.device)
    return batched_skip_observation_gae(rewards, values, loss_mask, cu_seqlens, gamma, lambdas, bootstrap_values)


@torch.no_grad()
def batched_skip_observation_gae(
    rewards: Tensor,
    values: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    gamma: float,
    lam: Tensor,
    bootstrap_values: Tensor,
) -> tuple[Tensor, Tensor]:
    """:func:`skip_observation_gae` of B trajectories packed one after the other, without a loop over tokens.

    Args:
        rewards, values, loss_mask: [T].
        cu_seqlens: int [B + 1], trajectory k is ``[cu_seqlens[k], cu_seqlens[k + 1])``; from 0 to T.
        gamma: discount.
        lam, bootstrap_values: float [B], one per trajectory.

    Returns:
        ``(advantages, returns)``, [T], at least float32 (float64 inside), zero off the mask.

    Raises:
        ValueError: tensors that are not packed alike, or cu_seqlens, lam, bootstrap_values that do not fit them.
    """
    check_packed(values=values, rewards=rewards, loss_mask=loss_mask)
    check_packed(lam=lam, bootstrap_values=bootstrap_values, trajectories=cu_seqlens[1:])
    if cu_seqlens[0] != 0 or cu_seqlens[-1] != values.numel():
        raise ValueError(
            f"cu_seqlens runs from {cu_seqlens[0]} to {cu_seqlens[-1]}; it must span 0 to {values.numel()}"
        )
    positions = (loss_mask != 0).nonzero().squeeze(1)
    trajectory = torch.searchsorted(cu_seqlens[1:].contiguous(), positions.to(cu_seqlens.dtype), right=True)
    reward, value = rewards[positions].double(), values[positions].double()
    bootstrap, lam = bootstrap_values.double()[trajectory], lam.double()[trajectory]

    last = torch.ones_like(trajectory, dtype=torch.bool)
    last[:-1] = trajectory[1:] != trajectory[:-1]
    next_value = torch.where(last, bootstrap, value.roll(-1))
    delta = reward + gamma * next_value - value
    reward_to_go = torch.where(last, reward + gamma * bootstrap, reward)

    dtype = torch.promote_types(values.dtype, torch.float32)
    advantages = torch.zeros_like(values, dtype=dtype)
    returns = torch.zeros_like(values, dtype=dtype)
    advantages[positions] = _discounted_suffix_sums(delta, gamma * lam, trajectory).to(dtype)
    returns[positions] = _discounted_suffix_sums(reward_to_go, torch.full_like(lam, gamma), trajectory).to(dtype)
    return advantages, returns


def _discounted_suffix_sums(terms: Tensor, decay: Tensor, trajectory: Tensor) -> Tensor:
    """``S_i = terms_i + decay_i S_{i+1}`` inside each run of equal ``trajectory``; float64 [n] each.

    Doubling: after round k, S_i covers the next 2^k terms. log2(n) rounds, and only sums and products of
    numbers at most 1 (no division by decay^n, which underflows on long trajectories). `decay` is constant
    within a trajectory.
    """
    sums = terms
    longest = int(trajectory.bincount().max()) if trajectory.numel() else 0
    stride = 1
    while stride < longest:
        same = trajectory[stride:] == trajectory[:-stride]
        further = torch.where(same, decay[stride:] * sums[stride:], 0.0)
        sums = torch.cat([sums[:-stride] + further, sums[-stride:]])
        decay = decay * decay
        stride *= 2
    return sums
