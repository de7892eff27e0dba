"""Append-only segment files that hold payloads: ``segments/00000001.seg``, … of records

    magic "SAO2" | uint32 length | uint64 xxh3 | payload            (little-endian)

A process appends to a segment of its own making only, so a record torn by a crash stays behind unreferenced at
the end of an old file.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import NamedTuple

import xxhash

_HEADER = struct.Struct("<4sIQ")
_MAGIC = b"SAO2"


class Record(NamedTuple):
    """A payload and its checksum, which need not be computed on the store's thread."""

    payload: bytes | memoryview
    checksum: int

    @classmethod
    def of(cls, payload: bytes | memoryview) -> Record:
        return cls(payload, xxhash.xxh3_64_intdigest(payload))


class SegmentCorrupt(RuntimeError):
    """A stored record does not read back; the message names file and offset."""


class Segments:
    """The segment files of one directory; one writer, one thread at a time.

    Args:
        directory: created if absent.
        roll_bytes: a segment is closed once it is larger than this.
    """

    def __init__(self, directory: Path, roll_bytes: int = 64 * 2**20) -> None:
        self._directory = directory
        self._roll_bytes = roll_bytes
        directory.mkdir(parents=True, exist_ok=True)
        self._sizes = {int(path.stem): path.stat().st_size for path in directory.glob("*.seg")}
        self._active: int | None = None
        self._file: int | None = None
        self._next = max(self._sizes, default=0) + 1

    @property
    def stored_bytes(self) -> int:
        return sum(self._sizes.values())

    def append(self, record: Record) -> tuple[int, int]:
        """Write a record, not yet durable. Returns (segment, offset). Raises OSError, leaving the segment closed."""
        if self._active is not None and self._sizes[self._active] > self._roll_bytes:
            self.sync()
            self.close()
        if self._active is None:
            self._open()
        offset = self._sizes[self._active]
        header = _HEADER.pack(_MAGIC, len(record.payload), record.checksum)
        parts = [memoryview(header), memoryview(record.payload)]
        try:
            while parts:  # both in one call: after each the thread waits for the interpreter's lock
                written = os.writev(self._file, parts)
                self._sizes[self._active] += written
                while parts and written >= len(parts[0]):
                    written -= len(parts.pop(0))
                if written:
                    parts[0] = parts[0][written:]
        except OSError:
            self.close()  # what was half-written is never referenced
            raise
        return self._active, offset

    def sync(self) -> None:
        """Make every appended record durable. Raises OSError; the records appended since the last sync are lost."""
        if self._file is None:
            return
        try:
            os.fsync(self._file)
        except OSError:
            self.close()  # the kernel may have dropped the pages: a second fsync would lie
            raise

    def read(self, segment: int, offset: int) -> bytes:
        path = self._path(segment)
        try:
            with path.open("rb") as file:
                file.seek(offset)
                magic, length, checksum = _HEADER.unpack(file.read(_HEADER.size))
                payload = file.read(length)
        except (OSError, struct.error) as error:
            raise SegmentCorrupt(f"{path} cannot be read at {offset}: {error}; restore it from a copy") from error
        if magic != _MAGIC and magic[:3] == _MAGIC[:3]:
            raise SegmentCorrupt(f"{path} has format {magic!r}, not {_MAGIC!r}; resume with the version that wrote it")
        if magic != _MAGIC or len(payload) != length or xxhash.xxh3_64_intdigest(payload) != checksum:
            raise SegmentCorrupt(f"{path} is corrupt at offset {offset}; restore it from a copy")
        return payload

    def keep_only(self, live: set[int]) -> None:
        """Delete the segments that nothing refers to any more."""
        if self._active not in live:
            self.close()
        for segment in self._sizes.keys() - live:
            self._path(segment).unlink(missing_ok=True)
            del self._sizes[segment]

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file = self._active = None

    def _open(self) -> None:
        self._file = os.open(self._path(self._next), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self._active, self._next = self._next, self._next + 1
        self._sizes[self._active] = 0
        directory = os.open(self._directory, os.O_RDONLY)
        try:
            os.fsync(directory)  # the new name must survive a power cut along with the content
        finally:
            os.close(directory)

    def _path(self, segment: int) -> Path:
        return self._directory / f"{segment:08d}.seg"
