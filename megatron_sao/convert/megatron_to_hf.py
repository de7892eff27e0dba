"""The policy of a Megatron checkpoint into a Hugging Face directory, in the memory of a few tensors.

A checkpoint knows no layout, so each rank reads whole parameters from it and writes whole files: more ranks are faster,
and the result is the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from tqdm import tqdm

from megatron_sao.config import ConfigError, ParallelConfig
from megatron_sao.convert.hf_to_megatron import HF, SOURCE, layout
from megatron_sao.convert.ranks import on_rank_0, stop_on
from megatron_sao.convert.staging import Staging
from megatron_sao.models.hf import HFModel, read_hf_model
from megatron_sao.models.mapping import Entry, entries
from megatron_sao.trainer import checkpoint_files as files
from megatron_sao.trainer.checkpoint import policy_checkpoint
from megatron_sao.weights.export import exported_config, mtp_groups
from megatron_sao.weights.fp8 import (
    FP8,
    QUANTIZATION_CONFIG,
    SCALE_SUFFIX,
    is_quantisable,
    quantise,
    scale_shape,
    unquantised_modules,
)
from megatron_sao.weights.hf_files import (
    Group,
    HFTensors,
    Shard,
    TensorSpec,
    WeightError,
    copy_companions,
    plan_shards,
    write_index,
    write_shard,
)
from megatron_sao.weights.load import hf_shapes, hf_tensors
from megatron_sao.weights.megatron_files import MegatronTensors, build_on_meta, places

Format = Literal["source", "bfloat16", "float32", "fp8"]


@dataclass(frozen=True)
class Original:
    """What a checkpoint does not say of its model, from the HF directory that it was made of.

    Attributes:
        directory: with config, tokenizer and the tensors that Megatron does not build.
        dtypes: of every tensor, by name; FP8 for block-quantised ones.
    """

    directory: Path
    model: HFModel
    dtypes: dict[str, torch.dtype]


def convert(megatron: Path, out: Path, hf: Path | None, dtype: Format, shard_bytes: int) -> None:
    """Write the HF directory ``out``. Collective over ranks that each hold a whole model's share: none but
    data-parallel ones.

    Args:
        megatron: a converted directory, or a checkpoint of a training run, whose policy is exported.
        hf: the directory the checkpoint was made from; a converted directory carries what is needed of it.

    Raises:
        ConfigError: the checkpoint is damaged, of another model than ``hf``, or does not hold just its parameters;
            ``out`` exists.
    """
    model = read_hf_model(_original_directory(megatron, hf))
    policy_checkpoint(megatron, model.raw, torch.device("cpu"))
    original = Original(model.path, model, _original_dtypes(megatron, model, carried=hf is None))
    source = MegatronTensors(megatron)
    groups, problems = _trained_groups(source, model)
    stop_on(f"{megatron} does not hold the parameters of its model: {problems}" if problems else "")
    if lacking := {spec.name for group in groups for spec in group.specs} - original.dtypes.keys():
        raise WeightError(f"{original.directory} lacks {sorted(lacking)}, so it is not what {megatron} was made from")
    shards = plan_shards(_Formats(original, dtype).all(groups), shard_bytes)
    made = files.read_meta(megatron)["files"]
    job = {"from": made, "original": str(original.directory), "dtype": dtype, "shard_bytes": shard_bytes}
    staging = Staging(out, job)
    on_rank_0(staging.prepare)
    mine = shards[dist.get_rank() :: dist.get_world_size()]
    total = sum(spec.nbytes for shard in mine for spec in shard.specs)
    with tqdm(total=total, unit="B", unit_scale=True, desc=out.name, disable=dist.get_rank() > 0) as bar:
        for shard in mine:
            if staging.note(shard.file) is None:
                write_shard(staging.directory, shard, bar.update)
                staging.finish(shard.file)
            else:
                bar.update(sum(spec.nbytes for spec in shard.specs))
    dist.barrier()
    on_rank_0(lambda: _complete(staging, shards, original, dtype))


def _complete(staging: Staging, shards: list[Shard], original: Original, dtype: Format) -> None:
    write_index(staging.directory, shards)
    copy_companions(original.directory, staging.directory, _config(original, dtype))
    staging.publish()


def _original_directory(megatron: Path, hf: Path | None) -> Path:
    if hf is None and not (megatron / HF).is_dir():
        raise ConfigError(
            f"{megatron} was not made by tools/convert_hf_to_megatron.py, so it carries neither config nor tokenizer: "
            "give the model directory that the training run was started from (model.path) with --hf"
        )
    return hf or megatron / HF


def _original_dtypes(megatron: Path, model: HFModel, carried: bool) -> dict[str, torch.dtype]:
    if carried:
        return {name: getattr(torch, dtype) for name, dtype in json.loads((megatron / SOURCE).read_text()).items()}
    tensors = HFTensors(model.path, model.fp8_block)
    return {name: tensors.disk_specs(name)[0].dtype for name in tensors.names()}


def _trained_groups(source: MegatronTensors, model: HFModel) -> tuple[list[Group], str]:
    """The HF tensors of every Megatron parameter, as stored; and what is wrong with those stored, "" if nothing."""
    size = dist.get_world_size()
    config = layout(model, ParallelConfig(world_size=size, nproc_per_node=size))
    weights, _ = places(build_on_meta(model, config), config)
    if problems := source.problems(weights):
        return [], problems
    by_name = {place.name: place for place in weights}

    def group(entry: Entry) -> Group:
        place = by_name[entry.name]
        shapes = hf_shapes(entry, place.tensor.shape, model, config)
        specs = tuple(TensorSpec(n, source.dtype(place), s) for n, s in zip(entry.hf, shapes, strict=True))
        return Group(specs, lambda: hf_tensors(entry, [source.read(place)], model, config))

    return [group(entry) for entry in entries(model, config)], ""


class _Formats:
    """Which dtype each tensor is exported in, and bringing it there."""

    def __init__(self, original: Original, dtype: Format) -> None:
        self._original, self._dtype, model = original, dtype, original.model
        quantization = model.raw.get("quantization_config") or QUANTIZATION_CONFIG
        self._block = tuple(quantization["weight_block_size"])
        self._power_of_two = quantization.get("scale_fmt") == "ue8m0"
        self._scales = HFTensors(original.directory, model.fp8_block) if model.fp8_block else None

    def all(self, trained: list[Group]) -> Iterator[Group]:
        """The groups of the export; the tensors of multi-token-prediction layers come last."""
        untrained = mtp_groups(self._original.model, self._original.directory, as_on_disk=self._dtype == "source")
        for group in trained:
            yield self._cast(group)
        for group in untrained:
            yield group if self._dtype == "source" else self._cast(group)

    def _dtype_of(self, spec: TensorSpec) -> torch.dtype:
        """FP8 means block-quantised."""
        original = self._original.dtypes[spec.name]
        if self._dtype == "source":
            return original
        # the expert bias decides between experts whose scores are close
        if self._dtype == "float32" or spec.name.endswith("e_score_correction_bias"):
            return torch.float32
        if self._dtype == "bfloat16":
            return torch.bfloat16
        if self._original.model.fp8_block:
            return FP8 if original == FP8 else torch.bfloat16
        return FP8 if len(spec.shape) == 2 and is_quantisable(spec.name) else torch.bfloat16

    def _cast(self, group: Group) -> Group:
        specs: list[TensorSpec] = []
        for spec in group.specs:
            specs.append(TensorSpec(spec.name, self._dtype_of(spec), spec.shape))
            if specs[-1].dtype == FP8:
                shape = scale_shape(spec.shape, self._block)
                specs.append(TensorSpec(spec.name + SCALE_SUFFIX, torch.float32, shape))
        return Group(tuple(specs), lambda: self._read(group))

    def _read(self, group: Group) -> list[torch.Tensor]:
        tensors: list[torch.Tensor] = []
        for spec, tensor in zip(group.specs, group.read(), strict=True):
            dtype = self._dtype_of(spec)
            if dtype == FP8:
                previous = self._scales.scale(spec.name) if self._scales else None
                tensors += quantise(tensor, self._block, self._power_of_two, previous)
            else:
                tensors.append(tensor.to(dtype))
        return tensors


def _config(original: Original, dtype: Format) -> dict[str, Any] | None:
    """What config.json says of the export, None where it is the original's."""
    if dtype == "source":
        return None
    config = exported_config(original.model.raw, FP8 if dtype == "fp8" else getattr(torch, dtype))
    if dtype == "fp8" and not original.model.fp8_block and (kept := unquantised_modules(original.dtypes)):
        config["quantization_config"] |= {"modules_to_not_convert": ["lm_head", *kept]}
    return config
