"""Megatron's shards to full Hugging Face tensors on rank 0, one parameter at a time."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_sao.distributed import all_gather_json
from megatron_sao.models.hf import HFModel
from megatron_sao.models.mapping import Entry, entries, mtp_tensors
from megatron_sao.weights.fp8 import FP8, QUANTIZATION_CONFIG
from megatron_sao.weights.hf_files import (
    Group,
    HFTensors,
    TensorSpec,
    WeightError,
    copy_companions,
    plan_shards,
    write_index,
    write_shard,
)
from megatron_sao.weights.load import hf_shapes, hf_tensors, weights_of

SHARD_BYTES = 5 * 10**9


class HFExporter:
    """Exports the current weights as HF tensors, a critic's without its value head, for which Hugging Face has no name.
    Every method is collective over all trainer ranks.

    Which rank owns what is agreed once, at construction: of all ranks that hold a parameter the lowest one sends it.
    """

    def __init__(
        self,
        chunks: list[GPTModel],
        model: HFModel,
        config: TransformerConfig,
        head: Literal["policy", "critic"] = "policy",
    ) -> None:
        self._chunks, self._model, self._config = chunks, model, config
        self._device = next(chunks[0].parameters()).device
        table = {entry.name: entry for entry in entries(model, config, head)}
        self._own = {weight.name: weight for weight in weights_of(chunks, config)}
        held = all_gather_json(
            {name: [_dtype_name(w.tensor.dtype), list(w.tensor.shape)] for name, w in self._own.items()}, self._device
        )
        self._owner: dict[str, int] = {}
        self._shards: dict[str, TensorSpec] = {}  # what its owner holds of a parameter
        for rank, shards in enumerate(held):
            for name, (dtype, shape) in shards.items():
                if self._owner.setdefault(name, rank) == rank:
                    self._shards[name] = TensorSpec(name, getattr(torch, dtype), tuple(shape))
        value_head = {"output_layer.weight", "output_layer.bias"} if head == "critic" else set()
        unknown = self._owner.keys() - table.keys() - value_head
        unheld = table.keys() - self._owner.keys()
        if unknown or unheld:
            raise WeightError(
                f"parameters without an export rule: {sorted(unknown)[:8]}; rules without a parameter: "
                f"{sorted(unheld)[:8]}"
            )
        self.groups = [Group(self._hf_specs(entry), partial(self._read, entry)) for entry in table.values()]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and full tensor of every HF weight, in model order: on rank 0; other ranks get nothing but must iterate.

        The tensors are copies or views of the live parameters: use them before the next optimizer step.
        """
        for group in self.groups:
            yield from zip((spec.name for spec in group.specs), group.read(), strict=False)

    def _hf_specs(self, entry: Entry) -> tuple[TensorSpec, ...]:
        shard = self._shards[entry.name]
        shapes = hf_shapes(entry, shard.shape, self._model, self._config)
        return tuple(TensorSpec(hf, shard.dtype, shape) for hf, shape in zip(entry.hf, shapes, strict=True))

    @torch.no_grad()
    def _read(self, entry: Entry) -> list[torch.Tensor]:
        """The HF tensors of one parameter on rank 0, none elsewhere. Collective."""
        shards = self._gather(entry)
        if shards is None:
            return []
        return [tensor.contiguous() for tensor in hf_tensors(entry, shards, self._model, self._config)]

    def _gather(self, entry: Entry) -> list[torch.Tensor] | None:
        """All tensor-parallel shards of one parameter on rank 0, None elsewhere."""
        rank, owner = dist.get_rank(), self._owner[entry.name]
        group = (
            parallel_state.get_expert_tensor_parallel_group()
            if entry.expert
            else parallel_state.get_tensor_model_parallel_group()
        )
        members = dist.get_process_group_ranks(group)
        count = 1 if entry.kind == "replicated" else len(members)
        shards = None
        if entry.name in self._own and owner in members:
            weight = self._own[entry.name]
            local = attrgetter(weight.local_name)(self._chunks[weight.chunk]).detach().contiguous()
            shards = [local]
            if count > 1:
                shards = [torch.empty_like(local) for _ in members]
                dist.all_gather(shards, local, group=group)
        if rank == owner == 0:
            return shards
        if rank == owner:
            for shard in shards:
                dist.send(shard, 0)
        elif rank == 0 and owner > 0:
            spec = self._shards[entry.name]
            received = [torch.empty(spec.shape, dtype=spec.dtype, device=self._device) for _ in range(count)]
            for shard in received:
                dist.recv(shard, owner)
            return received
        return None


def save_hf(exporter: HFExporter, model: HFModel, out: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write an HF directory that ``transformers`` and SGLang load: weights, config, tokenizer. Collective.

    The weights are in the exporter's dtype; the tensors of multi-token-prediction layers, which are not trained, are
    those of ``model.path`` bit for bit (dequantised, if that is in FP8). The directory appears complete or not at all.
    """
    if dist.get_rank() == 0:
        untrained = mtp_groups(model, model.path, as_on_disk=model.fp8_block is None)
        shards = plan_shards([*exporter.groups, *untrained], shard_bytes)
        temporary = out.with_name(out.name + ".tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        for shard in shards:
            write_shard(temporary, shard)
        write_index(temporary, shards)
        copy_companions(model.path, temporary, exported_config(model.raw, exporter.groups[0].specs[0].dtype))
        shutil.rmtree(out, ignore_errors=True)
        temporary.rename(out)
    else:
        for _ in exporter.tensors():  # take part in the gathers
            pass
    dist.barrier()


def mtp_groups(model: HFModel, directory: Path, as_on_disk: bool) -> list[Group]:
    """The tensors of multi-token-prediction layers in an HF directory: bit for bit with FP8 scales, or dequantised."""
    if not model.num_mtp_layers or not any(directory.glob("*.safetensors")):
        return []  # a converted directory carries no weights where the original had none of these
    source = HFTensors(directory, model.fp8_block)
    names = sorted(mtp_tensors(model, source.names()))
    if as_on_disk:
        return [Group(source.disk_specs(name), partial(source.disk_tensors, name)) for name in names]
    return [Group((source.spec(name),), lambda name=name: [source[name]]) for name in names]


def exported_config(raw: dict[str, Any], dtype: torch.dtype) -> dict[str, Any] | None:
    """``config.json`` of weights exported in ``dtype`` (FP8: block-quantised); None where it stays as it is."""
    field = "torch_dtype" if "torch_dtype" in raw else "dtype"
    config = {key: value for key, value in raw.items() if key != "quantization_config"}
    config[field] = _dtype_name(torch.bfloat16 if dtype == FP8 else dtype)
    if dtype == FP8:
        config["quantization_config"] = dict(raw.get("quantization_config") or QUANTIZATION_CONFIG)
    return None if config == raw else config


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
