"""Facts about this process's place in the world that the loop needs, without Megatron's globals in it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_sao.config import ParallelConfig


@dataclass(frozen=True)
class World:
    """Attributes:
    device: of parameters and batches.
    is_leader: whether this is global rank 0, which alone talks to buffer and engines.
    data_rank, data_size: which share of a batch is this rank's, of how many.
    context_rank, context_size: which share of each trajectory, of how many.
    sequence_multiple: packed micro-batches are padded to a multiple of it.
    count_multiple: so is their number.
    """

    device: torch.device
    is_leader: bool
    data_rank: int
    data_size: int
    context_rank: int
    context_size: int
    sequence_multiple: int
    count_multiple: int

    @classmethod
    def current(cls, device: torch.device, parallel: ParallelConfig) -> World:
        return cls(
            device=device,
            is_leader=dist.get_rank() == 0,
            data_rank=parallel_state.get_data_parallel_rank(),
            data_size=parallel_state.get_data_parallel_world_size(),
            context_rank=parallel_state.get_context_parallel_rank(),
            context_size=parallel_state.get_context_parallel_world_size(),
            sequence_multiple=parallel.tp if parallel.sequence_parallel else 1,
            count_multiple=parallel.pp if parallel.vpp else 1,
        )
