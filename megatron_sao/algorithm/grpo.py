"""Group-relative advantages (GRPO), of the baselines SAO is compared with."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor


def group_advantages(rewards: Tensor, groups: Sequence[Hashable]) -> Tensor:
    """``(r - mean) / std`` over the trajectories of a group, and 0 where all of its rewards are equal.

    ``std`` is the population's (divided by the group's size, not by one less) with nothing added to it: a group's
    advantages then have mean square 1 whatever its size and the rewards' scale. A group of one has advantage 0.

    Args:
        rewards: float [B], total reward of each trajectory.
        groups: B labels; equal labels are rollouts of the same prompt visit, in any order.

    Returns:
        float64 [B], without gradient.

    Raises:
        ValueError: rewards that are not one per label, or not finite.
    """
    if rewards.shape != (len(groups),):
        raise ValueError(f"rewards has shape {tuple(rewards.shape)} for {len(groups)} groups; pass one per trajectory")
    if not rewards.isfinite().all():
        index = int((~rewards.isfinite()).nonzero()[0])
        raise ValueError(f"rewards[{index}] is {float(rewards[index])}; an advantage needs finite rewards")
    rewards = rewards.detach().double()
    members: dict[Hashable, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    advantages = torch.zeros_like(rewards)
    for indices in members.values():
        group_rewards = rewards[indices]
        # not std == 0: rounding in the mean gives equal rewards a tiny one
        if (group_rewards != group_rewards[0]).any():
            std, mean = torch.std_mean(group_rewards, correction=0)
            advantages[indices] = (group_rewards - mean) / std
    return advantages
