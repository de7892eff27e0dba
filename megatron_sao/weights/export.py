"""Megatron's shards to full Hugging Face tensors on rank 0, one parameter at a time."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_sao.models.hf import HFModel
from megatron_sao.models.mapping import mtp_tensors
from megatron_sao.weights.fp8 import FP8, QUANTIZATION_CONFIG
from megatron_sao.weights.gather import Gatherer, collect_weights, trainer_layout
from megatron_sao.weights.hf_files import (
    Group,
    HFTensors,
    TensorSpec,
    copy_companions,
    plan_shards,
    write_index,
    write_shard,
)
from megatron_sao.weights.reshard import Transfer, build_plan

SHARD_BYTES = 5 * 10**9


class HFExporter:
    """Exports the current weights as HF tensors, a critic's without its value head, for which Hugging Face has no name.
    Every method is collective over all trainer ranks.

    Attributes:
        layout, weights: who holds what, agreed once, at construction.
        groups: the HF tensors of one parameter each, in model order. To read one is collective: every rank reads all of
            them in the same order, and gets tensors on rank 0 alone. They are copies.
    """

    def __init__(
        self,
        chunks: list[GPTModel],
        model: HFModel,
        config: TransformerConfig,
        head: Literal["policy", "critic"] = "policy",
    ) -> None:
        self.layout = trainer_layout(model, config, dist.get_world_size(), head)
        self.weights = collect_weights(chunks, model, config, self.layout, head)
        plan = build_plan(self.weights, self.layout, bucket_bytes=1, sources=(0,))
        self._gatherer = Gatherer(plan, chunks, config)
        self.groups = [Group(_specs(t), partial(self._read, t.bucket)) for t in plan.transfers]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and full tensor of every HF weight, in model order, on rank 0. Others get nothing, but must iterate."""
        for group in self.groups:
            yield from zip((spec.name for spec in group.specs), group.read(), strict=False)

    def _read(self, number: int) -> list[torch.Tensor]:
        bucket = self._gatherer.bucket(number)
        return [] if bucket is None else [tensor for _, tensor in bucket.tensors]


def _specs(transfer: Transfer) -> tuple[TensorSpec, ...]:
    weight = transfer.weight
    return tuple(TensorSpec(hf, weight.dtype, s) for hf, s in zip(weight.entry.hf, weight.shapes, strict=True))


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
