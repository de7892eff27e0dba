"""Carrying out a reshard plan: each rank gives its shards, sources put full Hugging Face tensors together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_sao.distributed import all_gather_json
from megatron_sao.models.hf import HFModel
from megatron_sao.models.mapping import entries
from megatron_sao.weights.hf_files import WeightError
from megatron_sao.weights.load import hf_shapes, local_tensors
from megatron_sao.weights.reshard import Layout, Plan, Transfer, Weight, lies_as_held, place, shard_nbytes, shard_shape


@dataclass(frozen=True)
class Bucket:
    """Full HF tensors side by side in one block of memory.

    Attributes:
        data: uint8, the tensors' bytes without gaps.
        tensors: name and tensor, views of ``data`` in that order.
    """

    data: torch.Tensor
    tensors: list[tuple[str, torch.Tensor]]


def trainer_layout(
    model: HFModel, config: TransformerConfig, world_size: int, head: Literal["policy", "critic"] = "policy"
) -> Layout:
    """The layout that Megatron gives the ranks of ``world_size`` under ``config``."""
    stages = [0] * config.num_layers
    for stage in range(config.pipeline_model_parallel_size):
        for chunk in range(config.virtual_pipeline_model_parallel_size or 1):
            vp_stage = chunk if config.virtual_pipeline_model_parallel_size else None
            first = get_transformer_layer_offset(config, vp_stage, stage)
            for layer in range(first, first + get_num_layers_to_build(config, vp_stage, stage)):
                stages[layer] = stage
    return Layout(
        world_size,
        tuple(stages),
        tp=config.tensor_model_parallel_size,
        pp=config.pipeline_model_parallel_size,
        ep=config.expert_model_parallel_size,
        etp=config.expert_tensor_parallel_size or config.tensor_model_parallel_size,
        experts=config.num_moe_experts or 0,
        tied=model.tied and head == "policy",
    )


def collect_weights(
    chunks: list[GPTModel],
    model: HFModel,
    config: TransformerConfig,
    layout: Layout,
    head: Literal["policy", "critic"] = "policy",
) -> list[Weight]:
    """What the model that the ranks hold is made of, in model order. Collective.

    Raises:
        WeightError: a parameter without an export rule, a rule without a parameter, or a shard of a wrong shape.
    """
    table = {entry.name: entry for entry in entries(model, config, head)}
    local = dict(local_tensors(chunks, config))
    mine = []
    for name, tensor in local.items():
        if name not in table or layout.replicas(table[name])[0][0] == dist.get_rank():
            mine.append([name, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")])
    device = next(chunks[0].parameters()).device
    held = {name: (tuple(shape), dtype) for part in all_gather_json(mine, device) for name, shape, dtype in part}
    value_head = {"output_layer.weight", "output_layer.bias"} if head == "critic" else set()
    unknown, unheld = held.keys() - table.keys() - value_head, table.keys() - held.keys()
    if unknown or unheld:
        raise WeightError(
            f"parameters without an export rule: {sorted(unknown)[:8]}; rules without a parameter: {sorted(unheld)[:8]}"
        )
    weights = []
    for name, entry in table.items():
        shape, dtype = held[name]
        shapes = tuple(hf_shapes(entry, torch.Size(shape), model, config))
        weights.append(Weight(entry, shapes, getattr(torch, dtype), config.num_query_groups or 1))
        if name in local and local[name].shape != shape:
            raise WeightError(f"{name} has shape {tuple(local[name].shape)} here, but {shape} elsewhere")
    return weights


class Gatherer:
    """This rank's part of a plan. It keeps no memory between two rounds of gathering.

    Args:
        plan: the same on every rank, made from :func:`collect_weights`.
        chunks, config: the model that this rank holds a part of.
    """

    def __init__(self, plan: Plan, chunks: list[GPTModel], config: TransformerConfig) -> None:
        self.plan, self._chunks, self._config = plan, chunks, config
        self._rank = dist.get_rank()
        self.device = next(chunks[0].parameters()).device
        self._mine = plan.buckets.get(self._rank, [])
        self._to_give: list[list[Transfer]] = [[] for _ in range(plan.rounds)]
        for transfer in plan.transfers:
            if transfer.source != self._rank and self._rank in transfer.holders:
                self._to_give[transfer.bucket].append(transfer)

    @property
    def is_source(self) -> bool:
        return bool(self._mine)

    @torch.no_grad()
    def buckets(self) -> Iterator[Bucket | None]:
        """One item per round of the plan: this rank's bucket, or None where it has none. Collective.

        A bucket is valid until the next but one is asked for, so that it can be used while the next one is gathered
        (:func:`use_in_turn`). The whole takes the memory of two buckets and of the shards of one weight.
        """
        local = dict(local_tensors(self._chunks, self._config))
        memory = [self._memory(self._mine[parity::2]) for parity in (0, 1)]
        scratch = self._scratch(self._mine)
        for number in range(self.plan.rounds):
            yield self._gather(number, local, memory[number % 2], scratch)

    @torch.no_grad()
    def bucket(self, number: int) -> Bucket | None:
        """That of round ``number`` alone, in memory of its own. Collective."""
        local = dict(local_tensors(self._chunks, self._config))
        mine = self._mine[number : number + 1]
        return self._gather(number, local, self._memory(mine), self._scratch(mine))

    def _memory(self, buckets: list[list[Transfer]]) -> torch.Tensor:
        """Room for any one of ``buckets``."""
        return self._empty(max((_bytes(bucket) for bucket in buckets), default=0))

    def _scratch(self, buckets: list[list[Transfer]]) -> torch.Tensor:
        """Room for the other ranks' shards of any one weight that do not lie in its HF tensors as they are."""
        moved = [
            shard_nbytes(t.weight, 0, len(t.holders)) * sum(rank != self._rank for rank in t.holders)
            for bucket in buckets
            for t in bucket
            if not lies_as_held(t.weight, len(t.holders))
        ]
        return self._empty(max(moved, default=0))

    def _empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def _gather(
        self, number: int, local: dict[str, torch.Tensor], memory: torch.Tensor, scratch: torch.Tensor
    ) -> Bucket | None:
        mine = self._mine[number] if number < len(self._mine) else []
        for work in self._post(number, mine, local, memory):
            work.wait()
        if not mine:
            return None
        tensors = []
        for transfer in mine:
            full = _views(transfer, memory)
            self._arrange(transfer, local, memory, scratch, full)
            tensors += zip(transfer.weight.entry.hf, full, strict=True)
        return Bucket(memory[: _bytes(mine)], tensors)

    def _post(
        self, number: int, mine: list[Transfer], local: dict[str, torch.Tensor], memory: torch.Tensor
    ) -> list[dist.Work]:
        """Start what round ``number`` needs to be sent and received. Shards arrive one after the other where their
        weight lies in the bucket."""
        operations = []
        for transfer in self._to_give[number]:
            weight = transfer.weight
            shard = local[weight.entry.name].detach().contiguous().view(-1)
            nbytes = shard_nbytes(weight, transfer.holders.index(self._rank), len(transfer.holders))
            if nbytes:
                operations.append(dist.P2POp(dist.isend, shard[: nbytes // weight.dtype.itemsize], transfer.source))
        for transfer in mine:
            for rank, slot in zip(transfer.holders, _slots(transfer, memory), strict=True):
                if rank != self._rank and slot.numel():
                    operations.append(dist.P2POp(dist.irecv, slot, rank))
        return dist.batch_isend_irecv(operations) if operations else []

    def _arrange(
        self,
        transfer: Transfer,
        local: dict[str, torch.Tensor],
        memory: torch.Tensor,
        scratch: torch.Tensor,
        full: list[torch.Tensor],
    ) -> None:
        """Make a weight's HF tensors ``full`` of this rank's shard and of those that have arrived."""
        weight, shards, used = transfer.weight, len(transfer.holders), 0
        held = []
        for index, (rank, slot) in enumerate(zip(transfer.holders, _slots(transfer, memory), strict=True)):
            if rank == self._rank:
                held.append((index, local[weight.entry.name].detach()))
            elif not lies_as_held(weight, shards):
                # They are where the weight will be, so they step aside before any of it is written.
                shard = scratch[used : used + slot.nbytes].view(weight.dtype)
                used += slot.nbytes
                held.append((index, shard.copy_(slot).view(shard_shape(weight, shards))))
        for index, shard in held:
            place(weight, shard, index, shards, full)


def use_in_turn(buckets: Iterable[Bucket | None], use: Callable[[int, Bucket], None]) -> None:
    """Call ``use`` with the number of each bucket and the bucket, in a thread, while the next one is gathered.

    Args:
        buckets: of :meth:`Gatherer.buckets`.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="bucket") as thread:
        using: Future[None] | None = None
        for number, bucket in enumerate(buckets):
            if using is not None:
                using.result()
            using = None if bucket is None else thread.submit(use, number, bucket)
        if using is not None:
            using.result()


def _views(transfer: Transfer, memory: torch.Tensor) -> list[torch.Tensor]:
    """The HF tensors of a weight in its bucket's ``memory``."""
    start, out = transfer.offset, []
    for shape in transfer.weight.shapes:
        nbytes = torch.Size(shape).numel() * transfer.weight.dtype.itemsize
        out.append(memory[start : start + nbytes].view(transfer.weight.dtype).view(shape))
        start += nbytes
    return out


def _slots(transfer: Transfer, memory: torch.Tensor) -> list[torch.Tensor]:
    """Flat pieces of a weight's part of ``memory``, one for what each shard holds of it."""
    start, out, shards = transfer.offset, [], len(transfer.holders)
    for index in range(shards):
        nbytes = shard_nbytes(transfer.weight, index, shards)
        out.append(memory[start : start + nbytes].view(transfer.weight.dtype))
        start += nbytes
    return out


def _bytes(bucket: list[Transfer]) -> int:
    return sum(transfer.weight.nbytes for transfer in bucket)
