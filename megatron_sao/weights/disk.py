"""Weights as a version directory on a shared file system: sharded safetensors, complete or absent, checked."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from megatron_sao.weights.gather import Bucket
from megatron_sao.weights.reshard import Plan

INDEX = "model.safetensors.index.json"
KEPT_VERSIONS = 2
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int32: "I32", torch.int16: "I16"}


class DiskError(RuntimeError):
    """A version directory does not hold what it should; the message names file and tensor."""


def write_tensors(
    path: Path, tensors: Iterable[tuple[str, torch.Tensor]], metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file and force it to the disk. The tensors' bytes are not copied first, except from a GPU."""
    tensors = [(name, tensor.detach().cpu().contiguous()) for name, tensor in tensors]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"} | (metadata or {})}
    offset = 0
    for name, tensor in tensors:
        end = offset + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in tensors:
            file.write(memoryview(tensor.view(-1).view(torch.uint8).numpy()))
        file.flush()
        os.fsync(file.fileno())


def read_header(path: Path) -> dict[str, Any]:
    """Entries of a safetensors file by tensor name. Raises DiskError unless the file is as long as they say."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        size = os.fstat(file.fileno()).st_size
        if length > size:
            raise DiskError(f"{path} is truncated: its header alone should have {length} bytes")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size != 8 + length + end:
        raise DiskError(f"{path} has {size} bytes instead of {8 + length + end}: it was not written completely")
    return header


def part_name(source: int, number: int) -> str:
    return f"model-{source:05d}-{number:05d}.safetensors"


def bucket_file(directory: Path, source: int, number: int, bucket: Bucket) -> None:
    write_tensors(directory / part_name(source, number), bucket.tensors)


def finish_version(temporary: Path, final: Path, plan: Plan, model_path: Path) -> None:
    """Complete a directory into which every source has written its buckets, check it, and give it its name.

    Raises:
        DiskError: a file is missing or truncated, or a tensor is missing, unexpected or mis-shaped.
    """
    files = {
        name: part_name(transfer.source, transfer.bucket)
        for transfer in plan.transfers
        for name in transfer.weight.entry.hf
    }
    total = sum(transfer.weight.nbytes for transfer in plan.transfers)
    (temporary / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": files}))
    for file in model_path.iterdir():
        if file.is_file() and ".safetensors" not in file.name:
            shutil.copy2(file, temporary)
    check_version(temporary, plan)
    temporary.rename(final)


def check_version(directory: Path, plan: Plan) -> None:
    """Compare names, dtypes, shapes and sizes with the plan; see :func:`finish_version` for the errors."""
    expected: dict[str, dict[str, tuple[str, list[int]]]] = {}
    for transfer in plan.transfers:
        weight = transfer.weight
        entries = expected.setdefault(part_name(transfer.source, transfer.bucket), {})
        for name, shape in zip(weight.entry.hf, weight.shapes, strict=True):
            entries[name] = (_DTYPES[weight.dtype], list(shape))
    present = {path.name for path in directory.glob("*.safetensors")}
    if present != expected.keys():
        raise DiskError(
            f"{directory}: missing {sorted(expected.keys() - present)[:4]}, unexpected "
            f"{sorted(present - expected.keys())[:4]}"
        )
    for file, entries in expected.items():
        found = {n: (entry["dtype"], entry["shape"]) for n, entry in read_header(directory / file).items()}
        for name in sorted(entries.keys() | found.keys()):
            if entries.get(name) != found.get(name):
                raise DiskError(
                    f"{directory / file}: {name} is {found.get(name, 'missing')}, expected {entries.get(name, 'none')}"
                )


def remove_old(root: Path, current: Path) -> None:
    """Delete all but the newest version directories, and what a killed trainer left unfinished."""
    others = [path for path in root.iterdir() if path.is_dir() and path != current]
    others.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    finished = [path for path in others if path.suffix != ".tmp"]
    for path in [path for path in others if path.suffix == ".tmp"] + finished[KEPT_VERSIONS - 1 :]:
        shutil.rmtree(path, ignore_errors=True)
