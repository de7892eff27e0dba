"""Trajectories as the packed tensors that a forward pass takes.

Everything is aligned with the *predicting* position: entry q of ``labels``, ``loss_mask``, ``rollout_logprobs`` and
``rewards`` concerns token q + 1 of the same trajectory, because that is the token whose log-probability the logits at q
give and whose value (of the state before it) the hidden state at q gives. The last position of a trajectory predicts
nothing and is masked.

A pack is built whole and then split over the context-parallel ranks (data/packing.py), so that what a position is told
about the token after it does not depend on the split. All that is per token is this rank's share: a sum over ranks
counts each token once.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_sao.data.packing import context_positions, in_pack_order, pack
from megatron_sao.data.trajectory import Trajectory
from megatron_sao.models.routing import RoutedSeqParams


@dataclass
class MicroBatch:
    """This context-parallel rank's T tokens of trajectories packed end to end, on the training device.

    Attributes:
        trajectories: the packed ones, in order; may be empty (a dummy that keeps ranks in step).
        positions: int64 [T], where the tokens lie in the pack; without context parallelism 0 … T - 1.
        tokens, position_ids, labels: int64 [1, T].
        loss_mask: bool [T]; rollout_logprobs, rewards: float32 [T]; see the module's docstring.
        support: int64 [T, K], the ids that truncated sampling could have drawn, filled up with -1; else None.
        routed_experts: int16 [T, MoE layers, top_k] for routing replay, -1 where the engine did not route; else None.
        real_tokens: bool [T], False for padding.
        cu_seqlens: int32 [n + 1] over the whole pack: trajectories, each with the padding that makes it divisible, and,
            where T had to be padded, one sequence of padding.
        values, advantages, returns, old_logprobs, logprobs: float32 [T], filled in by the step; the last are those of
            the policy that takes it.
        value_mask: bool [T], where values are trained; ``loss_mask`` except under plain GAE.
    """

    trajectories: list[Trajectory]
    positions: torch.Tensor
    tokens: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    rollout_logprobs: torch.Tensor
    rewards: torch.Tensor
    real_tokens: torch.Tensor
    cu_seqlens: torch.Tensor
    support: torch.Tensor | None = None
    routed_experts: torch.Tensor | None = None
    values: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    old_logprobs: torch.Tensor | None = None
    logprobs: torch.Tensor | None = None
    value_mask: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return self.tokens.shape[1]

    @property
    def num_action_tokens(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def num_trajectories(self) -> int:
        """How many to count on this rank: each counts once, where its first token is."""
        starts = torch.tensor([start for start, _ in self.spans()], dtype=torch.int64, device=self.positions.device)
        return int(torch.isin(starts, self.positions).sum())

    @property
    def packed_seq_params(self) -> RoutedSeqParams:
        # A trajectory's own padding counts as part of it: it comes last, where a causal mask lets nothing see it.
        # Transformer Engine wants the padded lengths under context parallelism; the very same tensor tells it that
        # there is nothing between the sequences to skip, which not all of its kernels could.
        longest = int(self.cu_seqlens.diff().max())
        return RoutedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=self.cu_seqlens,
            cu_seqlens_kv=self.cu_seqlens,
            cu_seqlens_q_padded=self.cu_seqlens,
            cu_seqlens_kv_padded=self.cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            real_tokens=self.real_tokens,
            routed_experts=self.routed_experts,
        )

    def spans(self) -> list[tuple[int, int]]:
        """Start and end of each trajectory in the whole pack, without its padding."""
        starts = self.cu_seqlens.tolist()
        return [(start, start + t.num_tokens) for start, t in zip(starts, self.trajectories, strict=False)]

    def pack_zeros(self, dtype: torch.dtype) -> torch.Tensor:
        """A zero for every token of the whole pack; its values at ``positions`` are this rank's."""
        return torch.zeros(int(self.cu_seqlens[-1]), dtype=dtype, device=self.cu_seqlens.device)

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """The whole pack's values from each context-parallel rank's [T]. Collective over these ranks."""
        size = int(self.cu_seqlens[-1]) // self.num_tokens
        if size == 1:
            return local
        parts = [torch.empty_like(local) for _ in range(size)]
        dist.all_gather(parts, local.contiguous(), group=parallel_state.get_context_parallel_group())
        return in_pack_order(torch.cat(parts), self.cu_seqlens, size)

    def sampled_under(self, versions: Collection[str]) -> torch.Tensor:
        """bool [T]: whether the token that each position predicts was sampled under one of ``versions``."""
        mask = self.pack_zeros(torch.bool)
        for trajectory, (start, end) in zip(self.trajectories, self.spans(), strict=True):
            for label, first, last in trajectory.versions:
                if label in versions:
                    mask[start + max(first - 1, 0) : min(start + last - 1, end)] = True
        return mask[self.positions] & self.loss_mask


def build_microbatches(
    trajectories: list[Trajectory],
    data_rank: int,
    data_size: int,
    max_tokens: int,
    multiple: int,
    device: torch.device,
    count_multiple: int = 1,
    context_rank: int = 0,
    context_size: int = 1,
    routing_replay: bool = False,
) -> list[MicroBatch]:
    """This rank's share of a batch, over data and context parallelism.

    Args:
        trajectories: the whole batch in the buffer's order, the same on every rank.
        max_tokens: bound on a pack, over all context-parallel ranks; a longer trajectory gets one of its own.
        multiple: T is padded to a multiple of it (sequence parallelism splits T over ranks).
        count_multiple: so is the number of micro-batches, with dummies (the interleaved schedule needs it).
        routing_replay: whether to carry the trajectories' ``routed_experts``.
    """
    chunks = 2 * context_size if context_size > 1 else 1
    lengths = [_round_up(t.num_tokens, chunks) for t in trajectories]
    plan = pack(lengths, data_size, max_tokens, count_multiple)
    micro_batches = []
    for members in plan[data_rank]:
        cu_seqlens = _cu_seqlens([lengths[i] for i in members], math.lcm(multiple * context_size, chunks))
        positions = context_positions(cu_seqlens, context_rank, context_size)
        packed = [trajectories[i] for i in members]
        micro_batches.append(_pack(packed, cu_seqlens, *positions, device, routing_replay))
    return micro_batches


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _cu_seqlens(lengths: list[int], multiple: int) -> torch.Tensor:
    padding = _round_up(max(sum(lengths), 1), multiple) - sum(lengths)
    return torch.tensor([0, *lengths, *([padding] if padding else [])]).cumsum(0).to(torch.int32)


def _pack(
    trajectories: list[Trajectory],
    cu_seqlens: torch.Tensor,
    positions: torch.Tensor,
    position_ids: torch.Tensor,
    device: torch.device,
    routing_replay: bool,
) -> MicroBatch:
    def packed(arrays: list[np.ndarray], dtype: type[np.generic], shift: int) -> torch.Tensor:
        whole = np.zeros(int(cu_seqlens[-1]), dtype)
        for start, array in zip(cu_seqlens.tolist(), arrays, strict=False):
            whole[start : start + len(array) - shift] = array[shift:]
        return torch.from_numpy(whole)

    def local(whole: torch.Tensor) -> torch.Tensor:
        return whole[positions].to(device)

    token_ids = [t.token_ids for t in trajectories]
    loss_mask = packed([t.loss_mask for t in trajectories], np.bool_, shift=1)
    support = _packed_support(trajectories, loss_mask)
    experts = _packed_experts(trajectories, cu_seqlens) if routing_replay else None
    return MicroBatch(
        trajectories=trajectories,
        positions=positions.long().to(device),
        tokens=local(packed(token_ids, np.int64, shift=0))[None],
        position_ids=position_ids.long().to(device)[None],
        labels=local(packed(token_ids, np.int64, shift=1))[None],
        loss_mask=local(loss_mask),
        rollout_logprobs=local(packed([t.logprobs for t in trajectories], np.float32, shift=1)),
        rewards=local(packed([t.rewards for t in trajectories], np.float32, shift=1)),
        cu_seqlens=cu_seqlens.to(device),
        real_tokens=local(packed([np.ones(t.num_tokens, np.bool_) for t in trajectories], np.bool_, shift=0)),
        support=None if support is None else local(support),
        routed_experts=None if experts is None else local(experts),
    )


def _packed_experts(trajectories: list[Trajectory], cu_seqlens: torch.Tensor) -> torch.Tensor | None:
    """Routing belongs to the token that is routed, so that nothing is shifted here."""
    recorded = [t.routed_experts for t in trajectories if t.routed_experts is not None]
    if not recorded:
        return None
    experts = np.full((int(cu_seqlens[-1]), *recorded[0].shape[1:]), -1, np.int16)
    for start, trajectory in zip(cu_seqlens.tolist(), trajectories, strict=False):
        if trajectory.routed_experts is not None:
            experts[start : start + len(trajectory.routed_experts)] = trajectory.routed_experts
    return torch.from_numpy(experts)


def _packed_support(trajectories: list[Trajectory], loss_mask: torch.Tensor) -> torch.Tensor | None:
    rows = [torch.from_numpy(t.support.padded()).long() for t in trajectories if t.support is not None]
    if not rows:
        return None
    width = max(row.shape[1] for row in rows)
    support = torch.full((len(loss_mask), width), -1)
    # check_sampling has seen to it that all have one
    support[loss_mask] = torch.cat([torch.nn.functional.pad(row, (0, width - row.shape[1]), value=-1) for row in rows])
    return support
