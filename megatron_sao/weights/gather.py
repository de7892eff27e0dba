"""Carrying out a reshard plan: each rank gives its shards, sources put full Hugging Face tensors together."""

from __future__ import annotations

from collections.abc import Iterator
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
from megatron_sao.weights.reshard import Layout, Plan, Transfer, Weight, place, shard_shape

_ALIGNMENT = 16


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
        self._to_give: list[list[tuple[Transfer, int]]] = [[] for _ in range(plan.rounds)]
        for transfer in plan.transfers:
            if transfer.source != self._rank and self._rank in transfer.holders:
                self._to_give[transfer.bucket].append((transfer, transfer.source))

    @property
    def is_source(self) -> bool:
        return bool(self._mine)

    @torch.no_grad()
    def buckets(self) -> Iterator[Bucket | None]:
        """One item per round of the plan: this rank's bucket, or None where it has none. Collective.

        A bucket is valid until the next one is asked for; the shards of that one arrive while the caller uses this one.
        The whole takes the memory of two buckets: one being used and one of shards arriving.
        """
        local = dict(local_tensors(self._chunks, self._config))
        out = self._memory(max((_bytes(bucket) for bucket in self._mine), default=0))
        staging = self._memory(max((self._staged_bytes(bucket) for bucket in self._mine), default=0))
        arriving = self._post(0, local, staging)
        for number in range(self.plan.rounds):
            bucket = self._finish(number, local, arriving, out)
            if number + 1 < self.plan.rounds:
                arriving = self._post(number + 1, local, staging)
            yield bucket

    @torch.no_grad()
    def bucket(self, number: int) -> Bucket | None:
        """That of round ``number`` alone, in memory of its own. Collective."""
        local = dict(local_tensors(self._chunks, self._config))
        mine = self._mine[number] if number < len(self._mine) else []
        arriving = self._post(number, local, self._memory(self._staged_bytes(mine)))
        return self._finish(number, local, arriving, self._memory(_bytes(mine)))

    def _finish(
        self,
        number: int,
        local: dict[str, torch.Tensor],
        arriving: tuple[list[dist.Work], dict[tuple[str, int], torch.Tensor]],
        out: torch.Tensor,
    ) -> Bucket | None:
        works, shards = arriving
        for work in works:
            work.wait()
        if number >= len(self._mine):
            return None
        return self._assemble(number, local, shards, out[: _bytes(self._mine[number])])

    def _memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def _staged_bytes(self, bucket: list[Transfer]) -> int:
        away = [(t.weight, len(t.holders)) for t in bucket for rank in t.holders if rank != self._rank]
        return sum(_aligned(shard_shape(w, n), w.dtype) for w, n in away)

    def _post(
        self, number: int, local: dict[str, torch.Tensor], staging: torch.Tensor
    ) -> tuple[list[dist.Work], dict[tuple[str, int], torch.Tensor]]:
        """Start what round ``number`` needs to be sent and received; received shards by parameter and shard."""
        operations, shards, offset = [], {}, 0
        for transfer, source in self._to_give[number]:
            shard = local[transfer.weight.entry.name].detach().contiguous()
            operations.append(dist.P2POp(dist.isend, shard, source))
        for transfer in self._mine[number] if number < len(self._mine) else []:
            weight = transfer.weight
            shape = shard_shape(weight, len(transfer.holders))
            for index, rank in enumerate(transfer.holders):
                if rank != self._rank:
                    nbytes = _shape_bytes(shape, weight.dtype)
                    shard = staging[offset : offset + nbytes].view(weight.dtype).view(shape)
                    offset += _aligned(shape, weight.dtype)
                    shards[weight.entry.name, index] = shard
                    operations.append(dist.P2POp(dist.irecv, shard, rank))
        return dist.batch_isend_irecv(operations) if operations else [], shards

    def _assemble(
        self,
        number: int,
        local: dict[str, torch.Tensor],
        shards: dict[tuple[str, int], torch.Tensor],
        memory: torch.Tensor,
    ) -> Bucket:
        tensors = []
        for transfer in self._mine[number]:
            weight, name, start = transfer.weight, transfer.weight.entry.name, transfer.offset
            full = []
            for shape in weight.shapes:
                end = start + _shape_bytes(shape, weight.dtype)
                full.append(memory[start:end].view(weight.dtype).view(shape))
                start = end
            for index in range(len(transfer.holders)):
                shard = shards[name, index] if (name, index) in shards else local[name].detach()
                place(weight, shard, index, len(transfer.holders), full)
            tensors += zip(weight.entry.hf, full, strict=True)
        return Bucket(memory, tensors)


def _bytes(bucket: list[Transfer]) -> int:
    return sum(transfer.weight.nbytes for transfer in bucket)


def _shape_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _aligned(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-_shape_bytes(shape, dtype) // _ALIGNMENT) * _ALIGNMENT
