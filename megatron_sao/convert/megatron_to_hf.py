"""The policy of a Megatron checkpoint into a Hugging Face directory, in the memory of a few tensors.

A checkpoint knows no layout, so each rank reads whole parameters from it and writes whole files: more ranks are faster,
and the result is the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from tqdm import tqdm

from megatron_sao.config import ConfigError, ParallelConfig
from megatron_sao.convert.hf_to_megatron import HF, SOURCE, layout
from megatron_sao.convert.ranks import stop_on
from megatron_sao.convert.staging import Staging
from megatron_sao.models.hf import HFModel, read_hf_model
from megatron_sao.models.mapping import Entry, entries
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
    original = read_original(megatron, hf)
    meta = policy_checkpoint(megatron, original.model.raw)
    source = MegatronTensors(megatron)
    groups, problems = _trained_groups(source, original.model)
    stop_on(f"{megatron} does not hold the parameters of its model: {problems}" if problems else "")
    if lacking := {spec.name for group in groups for spec in group.specs} - original.dtypes.keys():
        raise WeightError(f"{original.directory} lacks {sorted(lacking)}, so it is not what {megatron} was made from")
    _check_sizes(megatron, meta, source.files() | {name for name in meta["files"] if name.startswith(f"{HF}/")})
    shards = plan_shards(_in_format(groups, original, dtype), shard_bytes)
    job = {"from": meta["files"], "original": str(original.directory), "dtype": dtype, "shard_bytes": shard_bytes}
    staging = Staging(out, job)
    if dist.get_rank() == 0:
        staging.prepare()
    dist.barrier()
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
    if dist.get_rank() == 0:
        write_index(staging.directory, shards)
        copy_companions(original.directory, staging.directory, _config(original, dtype))
        staging.publish()
    dist.barrier()


def read_original(megatron: Path, hf: Path | None) -> Original:
    """From ``hf`` or else from what a converted directory carries. Raises ConfigError where neither is there."""
    if hf is not None:
        model = read_hf_model(hf)
        tensors = HFTensors(hf, model.fp8_block)
        return Original(hf, model, {name: tensors.disk_specs(name)[0].dtype for name in tensors.names()})
    if not (megatron / SOURCE).is_file():
        raise ConfigError(
            f"{megatron} is a checkpoint of a training run, which has neither config nor tokenizer: give the model "
            "directory that the run was started from (model.path) with --hf"
        )
    dtypes = json.loads((megatron / SOURCE).read_text())
    model = read_hf_model(megatron / HF)
    return Original(megatron / HF, model, {name: getattr(torch, dtype) for name, dtype in dtypes.items()})


def _check_sizes(megatron: Path, meta: dict, names: set[str]) -> None:
    """What the files hold is verified as it is read; this finds a file that is cut short before hours have passed."""
    for name in sorted(names):
        size, path = meta["files"][name][0], megatron / name
        if not path.is_file() or path.stat().st_size != size:
            found = f"{path.stat().st_size} bytes" if path.is_file() else "no bytes: it is missing"
            raise WeightError(f"the checkpoint is damaged: {path} has {found}, not the {size} that were written")


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


def _in_format(groups: list[Group], original: Original, dtype: Format) -> Iterator[Group]:
    """All groups of the export; the tensors of multi-token-prediction layers come last."""
    model, block, power_of_two = original.model, *_quantisation(original.model)
    dtype_of = _dtype_rule(original, dtype)
    for group in groups:
        yield _cast(group, dtype_of, block, power_of_two)
    untrained = mtp_groups(model, original.directory, as_on_disk=dtype == "source")
    yield from untrained if dtype == "source" else (_cast(g, dtype_of, block, power_of_two) for g in untrained)


def _dtype_rule(original: Original, dtype: Format) -> Callable[[TensorSpec], torch.dtype]:
    """To which dtype a tensor is exported; FP8 means block-quantised."""

    def rule(spec: TensorSpec) -> torch.dtype:
        if dtype == "source":
            return original.dtypes[spec.name]
        if spec.name.endswith("e_score_correction_bias") or dtype == "float32":
            return torch.float32  # it decides between experts whose scores are close
        if dtype == "fp8" and original.model.fp8_block:
            quantised = original.dtypes[spec.name] == FP8
        else:
            quantised = dtype == "fp8" and len(spec.shape) == 2 and is_quantisable(spec.name)
        return FP8 if quantised else torch.bfloat16

    return rule


def _quantisation(model: HFModel) -> tuple[tuple[int, int], bool]:
    """Block size of exported FP8 weights, and whether their scales are powers of two: as in the original."""
    quantization = model.raw.get("quantization_config") or QUANTIZATION_CONFIG
    return tuple(quantization["weight_block_size"]), quantization.get("scale_fmt") == "ue8m0"


def _cast(
    group: Group, dtype_of: Callable[[TensorSpec], torch.dtype], block: tuple[int, int], power_of_two: bool
) -> Group:
    targets = [dtype_of(spec) for spec in group.specs]
    specs: list[TensorSpec] = []
    for spec, target in zip(group.specs, targets, strict=True):
        specs.append(TensorSpec(spec.name, target, spec.shape))
        if target == FP8:
            specs.append(TensorSpec(spec.name + SCALE_SUFFIX, torch.float32, scale_shape(spec.shape, block)))

    def read() -> list[torch.Tensor]:
        tensors: list[torch.Tensor] = []
        for tensor, target in zip(group.read(), targets, strict=True):
            tensors += quantise(tensor, block, power_of_two) if target == FP8 else [tensor.to(target)]
        return tensors

    return Group(tuple(specs), read)


def _config(original: Original, dtype: Format) -> dict[str, Any] | None:
    """What config.json says of the export, None where it is the original's."""
    if dtype == "source":
        return None
    config = exported_config(original.model.raw, FP8 if dtype == "fp8" else getattr(torch, dtype))
    if dtype == "fp8" and not original.model.fp8_block and (kept := unquantised_modules(original.dtypes)):
        config["quantization_config"] |= {"modules_to_not_convert": ["lm_head", *kept]}
    return config
