"""Trajectories as the packed tensors that a forward pass takes.

Everything is aligned with the *predicting* position: entry q of ``labels``, ``loss_mask``, ``rollout_logprobs`` and
``rewards`` concerns token q + 1 of the same trajectory, because that is the token whose log-probability the logits at q
give and whose value (of the state before it) the hidden state at q gives. The last position of a trajectory predicts
nothing and is masked.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch

from megatron_sao.data.packing import pack
from megatron_sao.data.trajectory import Trajectory
from megatron_sao.models.routing import RoutedSeqParams


@dataclass
class MicroBatch:
    """Trajectories packed end to end into T tokens, on the training device.

    Attributes:
        trajectories: the packed ones, in order; may be empty (a dummy that keeps ranks in step).
        tokens, position_ids, labels: int64 [1, T].
        loss_mask: bool [T]; rollout_logprobs, rewards: float32 [T]; see the module's docstring.
        support: int64 [T, K], the ids that truncated sampling could have drawn, filled up with -1; else None.
        routed_experts: int16 [T, MoE layers, top_k] for routing replay, -1 where the engine did not route; else None.
        cu_seqlens: int32 [n + 1] over trajectories and, where T had to be padded, one sequence of padding.
        values, advantages, returns, old_logprobs: float32 [T], filled in by the step.
        value_mask: bool [T], where values are trained; ``loss_mask`` except under plain GAE.
    """

    trajectories: list[Trajectory]
    tokens: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    rollout_logprobs: torch.Tensor
    rewards: torch.Tensor
    cu_seqlens: torch.Tensor
    support: torch.Tensor | None = None
    routed_experts: torch.Tensor | None = None
    values: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    old_logprobs: torch.Tensor | None = None
    value_mask: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return self.tokens.shape[1]

    @property
    def num_action_tokens(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def packed_seq_params(self) -> RoutedSeqParams:
        longest = int(self.cu_seqlens.diff().max())
        tokens = sum(t.num_tokens for t in self.trajectories)
        return RoutedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=self.cu_seqlens,
            cu_seqlens_kv=self.cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            real_tokens=torch.arange(self.num_tokens, device=self.tokens.device) < tokens,
            routed_experts=self.routed_experts,
        )

    def spans(self) -> list[tuple[int, int]]:
        """Start and end of each trajectory in the packed tensors."""
        edges = self.cu_seqlens.tolist()
        return list(itertools.pairwise(edges))[: len(self.trajectories)]

    def sampled_under(self, versions: Collection[str]) -> torch.Tensor:
        """bool [T]: whether the token that each position predicts was sampled under one of ``versions``."""
        mask = torch.zeros_like(self.loss_mask)
        for trajectory, (start, end) in zip(self.trajectories, self.spans(), strict=True):
            for label, first, last in trajectory.versions:
                if label in versions:
                    mask[start + max(first - 1, 0) : min(start + last - 1, end)] = True
        return mask & self.loss_mask


def build_microbatches(
    trajectories: list[Trajectory],
    data_rank: int,
    data_size: int,
    max_tokens: int,
    multiple: int,
    device: torch.device,
    count_multiple: int = 1,
    routing_replay: bool = False,
) -> list[MicroBatch]:
    """This data-parallel rank's share of a batch.

    Args:
        trajectories: the whole batch in the buffer's order, the same on every rank.
        max_tokens: bound on a micro-batch; a longer trajectory gets one of its own.
        multiple: T is padded to a multiple of it (sequence parallelism splits T over ranks).
        count_multiple: so is the number of micro-batches, with dummies (the interleaved schedule needs it).
        routing_replay: whether to carry the trajectories' ``routed_experts``.
    """
    plan = pack([t.num_tokens for t in trajectories], data_size, max_tokens, count_multiple)
    share = [[trajectories[i] for i in members] for members in plan[data_rank]]
    return [_pack(members, multiple, device, routing_replay) for members in share]


def _pack(trajectories: list[Trajectory], multiple: int, device: torch.device, routing_replay: bool) -> MicroBatch:
    lengths = [t.num_tokens for t in trajectories]
    total = max(sum(lengths), 1)
    padding = -(-total // multiple) * multiple - sum(lengths)
    if padding:
        lengths.append(padding)

    def packed(arrays: list[np.ndarray], dtype: torch.dtype, shift: bool) -> torch.Tensor:
        shifted = [np.append(a[1:], a.dtype.type(0)) for a in arrays] if shift else arrays
        tail = [np.zeros(padding, dtype=np.int64)] if padding else []
        joined = [torch.from_numpy(np.ascontiguousarray(a)).to(dtype) for a in (*shifted, *tail)]
        return torch.cat(joined).to(device)

    token_ids = [t.token_ids for t in trajectories]
    loss_mask = packed([t.loss_mask for t in trajectories], torch.bool, shift=True)
    positions = torch.cat([torch.arange(length) for length in lengths])
    return MicroBatch(
        trajectories=trajectories,
        tokens=packed(token_ids, torch.int64, shift=False)[None],
        position_ids=positions.to(device)[None],
        labels=packed(token_ids, torch.int64, shift=True)[None],
        loss_mask=loss_mask,
        rollout_logprobs=packed([t.logprobs for t in trajectories], torch.float32, shift=True),
        rewards=packed([t.rewards for t in trajectories], torch.float32, shift=True),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device),
        support=_packed_support(trajectories, loss_mask),
        routed_experts=_packed_experts(trajectories, len(loss_mask), device) if routing_replay else None,
    )


def _packed_experts(trajectories: list[Trajectory], length: int, device: torch.device) -> torch.Tensor | None:
    """Routing belongs to the token that is routed, so that nothing is shifted here."""
    recorded = [t.routed_experts for t in trajectories if t.routed_experts is not None]
    if not recorded:
        return None
    experts = np.full((length, *recorded[0].shape[1:]), -1, np.int16)
    start = 0
    for trajectory in trajectories:
        if trajectory.routed_experts is not None:
            experts[start : start + len(trajectory.routed_experts)] = trajectory.routed_experts
        start += trajectory.num_tokens
    return torch.from_numpy(experts).to(device)


def _packed_support(trajectories: list[Trajectory], loss_mask: torch.Tensor) -> torch.Tensor | None:
    rows = [torch.from_numpy(t.support.padded()).long() for t in trajectories if t.support is not None]
    if not rows:
        return None
    width = max(row.shape[1] for row in rows)
    support = torch.full((len(loss_mask), width), -1, device=loss_mask.device)
    filled = torch.cat([torch.nn.functional.pad(row, (0, width - row.shape[1]), value=-1) for row in rows])
    support[loss_mask] = filled.to(loss_mask.device)  # check_sampling has seen to it that all have one
    return support
