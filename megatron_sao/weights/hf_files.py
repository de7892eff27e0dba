"""Directories of safetensors files as Hugging Face writes them, read and written within the memory of a tensor or two.

A file is an 8-byte little-endian header length, a JSON header with each tensor's dtype, shape and place, and the bytes.
It is read with plain reads, not mapped: mapped pages count as the process's memory.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_sao.config import ConfigError
from megatron_sao.weights.fp8 import FP8, SCALE_SUFFIX, FP8Error, dequantise, scale_shape

INDEX = "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": FP8,
    "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}


class WeightError(ConfigError):
    """Weights that do not match the model; the message lists the tensors."""


@dataclass(frozen=True)
class TensorSpec:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Group:
    """Tensors that are made together; ``read`` makes them, in the order of ``specs``."""

    specs: tuple[TensorSpec, ...]
    read: Callable[[], list[torch.Tensor]]

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs)


@dataclass(frozen=True)
class Shard:
    """One file of a safetensors directory."""

    file: str
    groups: tuple[Group, ...]

    @property
    def specs(self) -> list[TensorSpec]:
        return [spec for group in self.groups for spec in group.specs]


class HFTensors:
    """Lazy access to the tensors of a safetensors directory, sharded or not.

    FP8 weights come as the bfloat16 that they stand for, and their scales under no name of their own.

    Args:
        path: the directory.
        fp8_block: rows and columns of a block with one scale, for a quantised checkpoint.

    Raises:
        WeightError: there is no safetensors file, one is not whole, or the index names tensors that no file holds.
    """

    def __init__(self, path: Path, fp8_block: tuple[int, int] | None = None) -> None:
        self._path, self._block = path, fp8_block
        if (path / INDEX).exists():
            listed = dict(json.loads((path / INDEX).read_text())["weight_map"])
            files = sorted(set(listed.values()))
        elif (path / "model.safetensors").exists():
            listed, files = None, ["model.safetensors"]
        else:
            raise WeightError(f"{path} holds neither model.safetensors nor {INDEX}")
        self._files = [_SafetensorsFile(path / file) for file in files]
        self._where = {name: file for file in self._files for name in file.specs}
        if listed is not None and listed != {name: file.path.name for name, file in self._where.items()}:
            differing = set(listed) ^ set(self._where) or {"(a tensor lies in another file than it says)"}
            raise WeightError(f"{path / INDEX} does not list what the files hold; they differ in {_some(differing)}")
        self._check_scales()

    def names(self) -> set[str]:
        return {name for name in self._where if not self._is_scale(name)}

    def disk_specs(self, name: str) -> tuple[TensorSpec, ...]:
        """The tensor as it lies on the disk and, for an FP8 weight, its scale."""
        names = (name, name + SCALE_SUFFIX) if self._is_fp8(name) else (name,)
        return tuple(self._where[n].specs[n] for n in names)

    def spec(self, name: str) -> TensorSpec:
        """What ``self[name]`` is."""
        spec = self.disk_specs(name)[0]
        return TensorSpec(name, torch.bfloat16, spec.shape) if self._is_fp8(name) else spec

    def disk_tensors(self, name: str) -> list[torch.Tensor]:
        """The tensors of :meth:`disk_specs`, bit for bit."""
        return [self._where[spec.name].read(spec.name) for spec in self.disk_specs(name)]

    def __getitem__(self, name: str) -> torch.Tensor:
        tensors = self.disk_tensors(name)
        if not self._is_fp8(name):
            return tensors[0]
        try:
            return dequantise(*tensors, self._block)
        except FP8Error as error:
            raise WeightError(f"{name} in {self._path}: {error}") from error

    def scale_specs(self) -> list[TensorSpec]:
        """Of the scales of all FP8 weights."""
        return [self.disk_specs(name)[1] for name in sorted(self._where) if self._is_fp8(name)]

    def scale(self, name: str) -> torch.Tensor | None:
        """What belongs to the FP8 weight ``name``, which itself may be absent: a converted directory keeps scales."""
        scale = name + SCALE_SUFFIX
        return self._where[scale].read(scale) if scale in self._where else None

    def fingerprint(self) -> str:
        """Changes when a file is replaced. From headers, sizes and times; the tensors are not read."""
        digest = hashlib.sha256()
        for file in self._files:
            status = file.path.stat()
            digest.update(f"{file.path.name} {status.st_size} {status.st_mtime_ns} {file.specs}".encode())
        return digest.hexdigest()

    def _is_fp8(self, name: str) -> bool:
        return self._where[name].specs[name].dtype == FP8

    def _is_scale(self, name: str) -> bool:
        weight = name.removesuffix(SCALE_SUFFIX)
        return weight != name and weight in self._where and self._is_fp8(weight)

    def _check_scales(self) -> None:
        wrong = []
        for name in (name for name in self._where if self._is_fp8(name)):
            shape = self._where[name].specs[name].shape
            scale = self._where.get(name + SCALE_SUFFIX)
            if self._block is None or len(shape) != 2 or scale is None:
                wrong.append(name)
            elif scale.specs[name + SCALE_SUFFIX].shape != scale_shape(shape, self._block):
                wrong.append(name + SCALE_SUFFIX)
        if wrong:
            raise WeightError(
                f"{self._path} holds FP8 weights whose scales are missing or not one per block of {self._block} "
                f"(quantization_config.weight_block_size in config.json): {_some(wrong)}"
            )


class _SafetensorsFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if length > path.stat().st_size:
                    raise ValueError("it is cut short, or no safetensors file")
                header = json.loads(file.read(length))
        except (OSError, ValueError) as error:
            raise WeightError(f"cannot read {path}: {error}") from error
        header.pop("__metadata__", None)
        if unknown := {entry["dtype"] for entry in header.values()} - DTYPES.keys():
            raise WeightError(f"{path} holds tensors of the unknown dtypes {sorted(unknown)}")
        self.specs = {n: TensorSpec(n, DTYPES[e["dtype"]], tuple(e["shape"])) for n, e in header.items()}
        self._starts = {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items()}
        end = max((self._starts[name] + spec.nbytes for name, spec in self.specs.items()), default=8 + length)
        if end != path.stat().st_size:
            raise WeightError(f"{path} has {path.stat().st_size} bytes, but its header describes {end}: fetch it again")

    def read(self, name: str) -> torch.Tensor:
        spec = self.specs[name]
        data = torch.empty(spec.nbytes, dtype=torch.uint8)
        with self.path.open("rb", buffering=0) as file:
            file.seek(self._starts[name])
            view, filled = memoryview(data.numpy()), 0
            while filled < spec.nbytes:  # one read returns 2 GiB at most
                if not (count := file.readinto(view[filled:])):
                    raise WeightError(f"{self.path} ended in the middle of {name}: it changed while it was read")
                filled += count
        return data.view(spec.dtype).reshape(spec.shape)


def plan_shards(groups: Iterable[Group], max_bytes: int) -> list[Shard]:
    """Files of at most ``max_bytes`` of tensors, in order (a larger group is a file of its own), named as Hugging Face
    names them."""
    parts: list[list[Group]] = [[]]
    size = 0
    for group in groups:
        if parts[-1] and size + group.nbytes > max_bytes:
            parts.append([])
            size = 0
        parts[-1].append(group)
        size += group.nbytes
    if len(parts) == 1:
        return [Shard("model.safetensors", tuple(parts[0]))]
    return [Shard(f"model-{i:05}-of-{len(parts):05}.safetensors", tuple(part)) for i, part in enumerate(parts, 1)]


def write_shard(directory: Path, shard: Shard, progress: Callable[[int], object] = lambda _: None) -> None:
    """Write one file, a group at a time. Under its own name it is whole and on the disk.

    Args:
        progress: is told the bytes of every group written.

    Raises:
        WeightError: a tensor is not what its spec says.
    """
    # Widest first: a reader maps the file, and every tensor must lie at a multiple of its element's size.
    order = sorted(shard.specs, key=lambda spec: -spec.dtype.itemsize)
    places, offset = {}, 0
    for spec in order:
        places[spec.name] = offset
        offset += spec.nbytes
    header = {"__metadata__": {"format": "pt"}} | {
        s.name: {
            "dtype": _NAMES[s.dtype],
            "shape": list(s.shape),
            "data_offsets": [places[s.name], places[s.name] + s.nbytes],
        }
        for s in order
    }
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    temporary = directory / f"{shard.file}.tmp"
    with temporary.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for group in shard.groups:
            for spec, tensor in zip(group.specs, group.read(), strict=True):
                if (tensor.dtype, tuple(tensor.shape)) != (spec.dtype, spec.shape):
                    raise WeightError(f"{spec.name} came out as {tensor.dtype} {tuple(tensor.shape)}, not as {spec}")
                file.seek(8 + len(encoded) + places[spec.name])
                file.write(memoryview(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))
            progress(group.nbytes)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(directory / shard.file)


def write_index(directory: Path, shards: list[Shard]) -> None:
    """The index of a directory of several files; a single one has none."""
    if len(shards) <= 1:
        return
    names = {spec.name: shard.file for shard in shards for spec in shard.specs}
    size = sum(spec.nbytes for shard in shards for spec in shard.specs)
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(names.items()))}
    write_text(directory / INDEX, json.dumps(index, indent=2) + "\n")


def copy_companions(source: Path, directory: Path, config: dict[str, Any] | None = None) -> None:
    """Everything in ``source`` that is no weights: config, tokenizer, generation config, chat template, licence.

    Args:
        config: what ``config.json`` shall say instead, or None to copy it too.
    """
    for path in sorted(source.iterdir()):
        if not path.is_file() or path.suffix in _WEIGHT_SUFFIXES or path.name.endswith(".index.json"):
            continue
        shutil.copyfile(path, directory / path.name)
        with (directory / path.name).open("rb") as copy:
            os.fsync(copy.fileno())
    if config is not None:
        write_text(directory / "config.json", json.dumps(config, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _some(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
