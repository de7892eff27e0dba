"""Skip-observation, token-level generalised advantage estimation.

The recursion runs over action tokens only: the last token of one action links straight to the first token of
the next. With action tokens 1..n of a trajectory::

    delta_i = r_i + gamma V_{i+1} - V_i        V_{n+1} = bootstrap value (0 if the episode ended)
    A_i     = delta_i + gamma lam A_{i+1}      A_{n+1} = 0
    R_i     = r_i + gamma R_{i+1}              R_{n+1} = bootstrap value
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from scipy.signal import lfilter
from torch import Tensor

from megatron_sao.algorithm.packed import check_packed

BLOCK = 32_768  # tokens whose arrays stay in a core's second-level cache together


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
    """:func:`skip_observation_gae` of B trajectories packed one after the other.

    Computed on the CPU wherever the tensors are: the recursion is sequential. It runs over blocks of tokens that
    stay in the cache (tools/bench/gae.py measures it).

    Args:
        rewards, values, loss_mask: [T].
        cu_seqlens: int [B + 1], trajectory k is ``[cu_seqlens[k], cu_seqlens[k + 1])``; ascending, from 0 to T.
        gamma: discount.
        lam, bootstrap_values: float [B], one per trajectory.

    Returns:
        ``(advantages, returns)``, [T], at least float32 (float64 inside), zero off the mask.

    Raises:
        ValueError: tensors that are not packed alike, or cu_seqlens, lam, bootstrap_values that do not fit them.
    """
    check_packed(values=values, rewards=rewards, loss_mask=loss_mask)
    check_packed(lam=lam, bootstrap_values=bootstrap_values, trajectories=cu_seqlens[1:])
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != values.numel() or bounds != sorted(bounds):
        raise ValueError(f"cu_seqlens runs from {bounds[0]} to {bounds[-1]}; it must ascend from 0 to {values.numel()}")
    inputs = [_numpy(rewards), _numpy(values), loss_mask.to("cpu", torch.bool).numpy()]
    # numpy asks the kernel for huge pages, torch does not: faulting in small ones would take as long as the maths
    advantages, returns = (np.zeros(values.numel(), inputs[1].dtype) for _ in range(2))
    scalars = zip(pairwise(bounds), lam.tolist(), bootstrap_values.tolist(), strict=True)
    for (start, stop), trajectory_lam, bootstrap in scalars:
        arrays = (array[start:stop] for array in (*inputs, advantages, returns))
        _fill_trajectory(*arrays, gamma, trajectory_lam, bootstrap)
    return torch.from_numpy(advantages).to(values.device), torch.from_numpy(returns).to(values.device)


def _fill_trajectory(
    rewards: np.ndarray,
    values: np.ndarray,
    mask: np.ndarray,
    advantages: np.ndarray,
    returns: np.ndarray,
    gamma: float,
    lam: float,
    bootstrap: float,
) -> None:
    """The recursion over one trajectory, [L] each; writes ``advantages`` and ``returns`` at the action tokens."""
    advantage, target, next_value = 0.0, bootstrap, bootstrap  # of the action token after the block
    for stop in range(len(mask), 0, -BLOCK):
        block = slice(max(0, stop - BLOCK), stop)
        actions = np.flatnonzero(mask[block])
        if actions.size == 0:
            continue
        reward = rewards[block][actions].astype(np.float64, copy=False)
        value = values[block][actions].astype(np.float64, copy=False)
        delta = reward - value
        delta[:-1] += gamma * value[1:]
        delta[-1] += gamma * next_value + gamma * lam * advantage
        reward[-1] += gamma * target
        advantages[block][actions] = discounted = _discounted_suffix_sums(delta, gamma * lam)
        returns[block][actions] = reward_to_go = _discounted_suffix_sums(reward, gamma)
        advantage, target, next_value = discounted[0], reward_to_go[0], value[0]


def _discounted_suffix_sums(terms: np.ndarray, decay: float) -> np.ndarray:
    """``S_i = terms_i + decay S_{i+1}``; float64 [n], n > 0."""
    # lfilter computes y_i = x_i + d y_{i-1}: no division by d^n, which underflows on long trajectories
    return lfilter([1.0], [1.0, -decay], terms[::-1])[::-1]


def _numpy(tensor: Tensor) -> np.ndarray:
    """The tensor on the CPU, at least float32 (numpy has no bfloat16); no copy where it is that already."""
    return tensor.detach().to("cpu", torch.promote_types(tensor.dtype, torch.float32)).numpy()
