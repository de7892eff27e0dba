"""Advantages of a batch: from the critic's values, or from the trajectories' outcomes alone."""

from __future__ import annotations

import torch

from megatron_sao.algorithm import (
    RunningMeanBaseline,
    batched_skip_observation_gae,
    group_advantages,
    length_adaptive_lambda,
)
from megatron_sao.config import AlgorithmConfig
from megatron_sao.data.trajectory import Trajectory, TrajectoryError
from megatron_sao.trainer.microbatch import MicroBatch


def fill_critic_advantages(batch: list[MicroBatch], algorithm: AlgorithmConfig) -> None:
    """Set ``advantages``, ``returns`` and ``value_mask`` from ``rewards`` and ``values``, where the values are."""
    for micro in batch:
        micro.value_mask = _acted_span(micro) if algorithm.gae == "all_tokens" else micro.loss_mask
        if micro.values is None:
            continue
        num_sequences = micro.cu_seqlens.numel() - 1
        lambdas = torch.zeros(num_sequences, dtype=torch.float64)
        bootstrap = torch.zeros(num_sequences, dtype=torch.float64)
        # the recursion runs over whole trajectories
        rewards, values, mask = (micro.gather(t) for t in (micro.rewards, micro.values, micro.value_mask))
        counts = mask.cumsum(0).cpu()
        for index, (trajectory, (start, end)) in enumerate(zip(micro.trajectories, micro.spans(), strict=True)):
            length = int(counts[end - 1]) - (int(counts[start - 1]) if start else 0)
            lambdas[index] = length_adaptive_lambda(length, algorithm.lambda_alpha)
            if trajectory.truncated and algorithm.truncation == "bootstrap":
                bootstrap[index] = values[end - 1]  # the state after the last token
        advantages, returns = batched_skip_observation_gae(
            rewards,
            values,
            mask,
            micro.cu_seqlens,
            algorithm.gamma,
            lambdas.to(values.device),
            bootstrap.to(values.device),
        )
        micro.advantages, micro.returns = advantages[micro.positions], returns[micro.positions]


def outcome_advantages(
    trajectories: list[Trajectory], algorithm: AlgorithmConfig, baseline: RunningMeanBaseline
) -> list[float]:
    """One advantage per trajectory of the global batch: against its group, or against its prompt's running mean.

    Raises:
        TrajectoryError: groups are compared, and a trajectory belongs to none.
    """
    rewards = [t.total_reward for t in trajectories]
    if algorithm.advantage == "running_mean":
        return baseline.advantages([t.task_id for t in trajectories], rewards)
    for trajectory in trajectories:
        if trajectory.group is None:
            raise TrajectoryError(
                f"group: trajectory {trajectory.id!r} belongs to none, but algorithm.advantage = 'group' compares "
                "within groups; record the batches with rl.group_size above 1"
            )
    advantages = group_advantages(torch.tensor(rewards, dtype=torch.float64), [t.group for t in trajectories])
    return advantages.tolist()


def fill_outcome_advantages(batch: list[MicroBatch], advantages: dict[str, float]) -> None:
    """Give every token of a trajectory the trajectory's advantage, by trajectory id."""
    for micro in batch:
        packed = micro.pack_zeros(micro.rewards.dtype)
        for trajectory, (start, end) in zip(micro.trajectories, micro.spans(), strict=True):
            packed[start:end] = advantages[trajectory.id]
        micro.advantages = packed[micro.positions]


def _acted_span(micro: MicroBatch) -> torch.Tensor:
    """bool [T]: everything from each trajectory's first action token to its last, observations between included."""
    loss_mask, span = micro.gather(micro.loss_mask), micro.pack_zeros(torch.bool)
    for start, end in micro.spans():
        acted = loss_mask[start:end].nonzero()
        if acted.numel():
            span[start + int(acted[0]) : start + int(acted[-1]) + 1] = True
    return span[micro.positions]
