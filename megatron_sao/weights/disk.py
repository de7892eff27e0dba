"""Weights as a version directory on a shared file system: sharded safetensors, complete or absent, checked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from megatron_sao.models.hf import HFModel
from megatron_sao.weights.export import exported_config
from megatron_sao.weights.gather import Bucket
from megatron_sao.weights.hf_files import (
    INDEX,
    Group,
    HFTensors,
    Shard,
    TensorSpec,
    WeightError,
    copy_companions,
    write_shard,
    write_text,
)
from megatron_sao.weights.reshard import Plan

KEPT_VERSIONS = 2


def part_name(source: int, number: int) -> str:
    return f"model-{source:05d}-{number:05d}.safetensors"


def write_tensors(directory: Path, file: str, tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Write one safetensors file, whole and on the disk when it has its name."""
    specs = tuple(TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors)
    write_shard(directory, Shard(file, (Group(specs, lambda: [tensor for _, tensor in tensors]),)))


def write_bucket(directory: Path, source: int, number: int, bucket: Bucket) -> None:
    write_tensors(directory, part_name(source, number), bucket.tensors)


def finish_version(temporary: Path, final: Path, plan: Plan, model: HFModel) -> None:
    """Complete a directory into which every source has written its buckets, check it, and give it its name.

    Raises:
        WeightError: a file is missing or truncated, or a tensor is missing, unexpected or not what the plan says.
    """
    files = {hf: part_name(t.source, t.bucket) for t in plan.transfers for hf in t.weight.entry.hf}
    total = sum(transfer.weight.nbytes for transfer in plan.transfers)
    write_text(temporary / INDEX, json.dumps({"metadata": {"total_size": total}, "weight_map": files}))
    copy_companions(model.path, temporary, exported_config(model.raw, plan.transfers[0].weight.dtype))
    check_version(temporary, plan)
    temporary.rename(final)


def check_version(directory: Path, plan: Plan) -> None:
    """Compare files, names, dtypes, shapes and sizes with the plan; see :func:`finish_version` for the errors."""
    held = HFTensors(directory)
    expected = {
        name: TensorSpec(name, transfer.weight.dtype, shape)
        for transfer in plan.transfers
        for name, shape in zip(transfer.weight.entry.hf, transfer.weight.shapes, strict=True)
    }
    for name in sorted(expected.keys() | held.names()):
        found = held.spec(name) if name in held.names() else None
        if found != expected.get(name):
            raise WeightError(f"{directory}: {name} is {found or 'missing'}, expected {expected.get(name, 'none')}")


def remove_old(root: Path, current: Path) -> None:
    """Delete all but the newest version directories, and what a killed trainer left unfinished."""
    others = [path for path in root.iterdir() if path.is_dir() and path != current]
    others.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    finished = [path for path in others if path.suffix != ".tmp"]
    for path in [path for path in others if path.suffix == ".tmp"] + finished[KEPT_VERSIONS - 1 :]:
        shutil.rmtree(path, ignore_errors=True)
