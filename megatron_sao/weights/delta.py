"""Weights as changes: the elements that differ from the version before, in the served dtype, by index.

The trainer publishes ``deltas/<version>/`` beside ``full/<version>/`` and names the newest version in
``latest.json``. The sidecar of every engine keeps a copy of the weights as safetensors, patches it, and says in
``engines/<id>.json`` which version it holds. A delta names the version that it starts from and the checksum of every
tensor that it ends in: applied to anything else it is refused.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_sao.trainer.checkpoint_files import write_atomically
from megatron_sao.weights.disk import write_tensors
from megatron_sao.weights.gather import Bucket
from megatron_sao.weights.hf_files import DTYPES, INDEX

_BLOCK = 1 << 16  # elements that a 16-bit index can tell apart
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_KEPT_DELTAS = 8


class DeltaRefused(RuntimeError):
    """A delta does not fit the copy it should be applied to; a full version is needed."""


@dataclass(frozen=True)
class Change:
    """The changed elements of a tensor.

    Attributes:
        counts: int32, how many there are in each block of 65,536 elements.
        offsets: int16, the bits of an unsigned 16-bit position within the block, ascending.
        values: the new elements, in the tensor's dtype.
    """

    counts: torch.Tensor
    offsets: torch.Tensor
    values: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.counts.nbytes + self.offsets.nbytes + self.values.nbytes


def encode(old: torch.Tensor, new: torch.Tensor) -> Change:
    """What to change in ``old`` to get ``new``, bit for bit; both of one shape and dtype."""
    bits = _BITS[new.element_size()]
    changed = torch.nonzero(old.reshape(-1).view(bits) != new.reshape(-1).view(bits))[:, 0]
    blocks = -(-new.numel() // _BLOCK)
    counts = torch.bincount(changed // _BLOCK, minlength=blocks).to(torch.int32)
    offsets = changed % _BLOCK
    signed = torch.where(offsets < _BLOCK // 2, offsets, offsets - _BLOCK).to(torch.int16)  # the same 16 bits
    return Change(counts, signed, new.reshape(-1)[changed])


def apply(change: Change, tensor: torch.Tensor) -> None:
    """Patch a contiguous tensor in place."""
    starts = torch.arange(len(change.counts)) * _BLOCK
    index = torch.repeat_interleave(starts, change.counts.long()) + (change.offsets.long() & (_BLOCK - 1))
    tensor.view(-1)[index] = change.values


def checksum(tensor: torch.Tensor) -> str:
    data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.sha256(memoryview(data)).hexdigest()[:16]


@dataclass
class DeltaSize:
    """How much of the weights a delta changes."""

    changed: int = 0
    elements: int = 0
    nbytes: int = 0
    full_nbytes: int = 0

    def __add__(self, other: DeltaSize) -> DeltaSize:
        return DeltaSize(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


class DeltaWriter:
    """A source's buckets as it last published them, in host memory, and the changes since."""

    def __init__(self) -> None:
        self.version: str | None = None  # of what is remembered
        self._buckets: dict[int, torch.Tensor] = {}

    def remember(self, number: int, bucket: Bucket) -> None:
        if number in self._buckets:
            self._buckets[number].copy_(bucket.data)
        else:
            self._buckets[number] = bucket.data.cpu().clone()

    def write(self, directory: Path, source: int, number: int, bucket: Bucket) -> DeltaSize:
        """Write the changes of a bucket since it was remembered, and remember it as it is now."""
        parts: list[tuple[str, torch.Tensor]] = []
        checksums: dict[str, str] = {}
        size, offset, old = DeltaSize(), 0, self._buckets[number]
        for name, tensor in bucket.tensors:
            new = tensor.cpu()
            change = encode(old[offset : offset + new.nbytes].view(new.dtype), new)
            offset += new.nbytes
            checksums[name] = checksum(new)
            size += DeltaSize(len(change.values), new.numel(), change.nbytes, new.nbytes)
            if len(change.values):
                parts += [(f"{name}#{field}", getattr(change, field)) for field in ("counts", "offsets", "values")]
        part = f"part-{source:05d}-{number:05d}"
        if parts:
            write_tensors(directory, f"{part}.safetensors", parts)
        write_json(directory / f"{part}.json", checksums)
        self.remember(number, bucket)
        return size


def publish_delta(temporary: Path, final: Path, base: str) -> None:
    """Give a directory that all sources have written its version's name. Old ones are deleted."""
    parts = sorted(path.stem for path in temporary.glob("part-*.json"))
    (temporary / "manifest.json").write_text(json.dumps({"base": base, "parts": parts}))
    temporary.rename(final)
    published = sorted(final.parent.glob("*/manifest.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for manifest in published[_KEPT_DELTAS:]:
        shutil.rmtree(manifest.parent, ignore_errors=True)


def write_json(path: Path, value: Any) -> None:
    """Replace a file at once, so that a reader sees the old or the new one, after a power cut as well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(value))


def read_json(path: Path) -> dict[str, Any]:
    """Empty where there is no such file."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}


class LocalCopy:
    """An engine's copy of the weights, kept by its sidecar.

    Args:
        shared: the directory that the trainer publishes in.
        engine: id of the engine.
        path: where the copy goes.
    """

    def __init__(self, shared: Path, engine: str, path: Path) -> None:
        self._shared, self._path = shared, path
        self._report = shared / "engines" / f"{engine}.json"
        self._state = path / "state.json"

    @property
    def version(self) -> str | None:
        """What the copy holds; None while it is being changed, and if that was interrupted."""
        return read_json(self._state).get("version")

    def advance(self) -> None:
        """Bring the copy to the newest published version, and report it or why it cannot be brought there."""
        newest = read_json(self._shared / "latest.json").get("version")
        report = read_json(self._report)
        if newest is None or report.get("asked") == newest:
            return
        error = None
        try:
            self._bring_to(newest)
        except (DeltaRefused, LookupError, ValueError, OSError) as problem:
            error = str(problem) or repr(problem)
        write_json(
            self._report, {"asked": newest, "version": self.version, "path": str(self._path.absolute()), "error": error}
        )

    def _bring_to(self, newest: str) -> None:
        version, deltas = newest, []
        while version != self.version and not (self._shared / "full" / version).exists():
            directory = self._shared / "deltas" / version
            manifest = read_json(directory / "manifest.json")
            if not manifest:
                raise DeltaRefused(f"the copy holds {self.version}, and no chain of deltas leads from it to {newest}")
            deltas.append(directory)
            version = manifest["base"]
        if version != self.version:
            self._seed(version)
        for directory in reversed(deltas):
            self.apply(directory)

    def _seed(self, version: str) -> None:
        shutil.rmtree(self._path, ignore_errors=True)
        shutil.copytree(self._shared / "full" / version, self._path)
        write_json(self._state, {"version": version})

    def apply(self, directory: Path) -> None:
        """Patch the copy with a published delta.

        Raises:
            DeltaRefused: it starts from another version, or does not end in the checksums that it states. After the
                latter the copy has no version.
        """
        base, here = read_json(directory / "manifest.json")["base"], self.version
        if base != here:
            raise DeltaRefused(f"{directory.name} starts from {base}, but the copy holds {here}: deltas go in order")
        write_json(self._state, {"version": None})
        files = json.loads((self._path / INDEX).read_text())["weight_map"]
        for part in read_json(directory / "manifest.json")["parts"]:
            self._apply_part(directory / part, files)
        write_json(self._state, {"version": directory.name})

    def _apply_part(self, part: Path, files: dict[str, str]) -> None:
        """``part`` is the path of a checksum file and, where anything changed, of a safetensors file, less suffix."""
        file = part.with_suffix(".safetensors")
        changes, mapped = dict(_mapped(file)) if file.exists() else {}, {}
        for name, expected in read_json(part.with_suffix(".json")).items():
            if files[name] not in mapped:
                mapped[files[name]] = dict(_mapped(self._path / files[name], writable=True))
            tensor = mapped[files[name]][name]
            if f"{name}#values" in changes:
                apply(Change(*(changes[f"{name}#{field}"] for field in ("counts", "offsets", "values"))), tensor)
            if checksum(tensor) != expected:
                raise DeltaRefused(f"{name} does not have the checksum that {part.parent.name} states")


def _mapped(path: Path, writable: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a safetensors file, in the file: what is written to ``writable`` ones is written to it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(start - 8))
    header.pop("__metadata__", None)
    if size != start + max((entry["data_offsets"][1] for entry in header.values()), default=0):
        raise DeltaRefused(f"{path} is not whole")
    data = torch.from_file(str(path), shared=writable, size=size, dtype=torch.uint8)
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        yield name, data[start + first : start + last].view(DTYPES[entry["dtype"]]).view(entry["shape"])
