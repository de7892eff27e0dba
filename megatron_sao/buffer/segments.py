"""Append-only segment files that hold payloads: ``segments/00000001.seg``, … of records

    magic "SAO2" | uint32 length | uint64 xxh3 | payload            (little-endian)

of which large ones fill whole blocks of the disk. A process appends to a segment of its own making only, so a record
torn by a crash stays behind unreferenced at the end of an old file.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

_HEADER = struct.Struct("<4sIQ")
_MAGIC = b"SAO2"
_MAX_PARTS = 1024  # of one write, IOV_MAX of Linux
_BLOCK = 4096  # bytes; addresses, offsets and lengths of direct I/O are multiples of it

log = logging.getLogger(__name__)


class Frame:
    """Memory for a large record as it will lie in its segment, from which the disk takes it without a copy: the
    header, the payload, and zeros up to the end of the block.

    Args:
        length: of the payload, in bytes.
    """

    def __init__(self, length: int) -> None:
        size = _whole_blocks(_HEADER.size + length)
        memory = np.empty(size + _BLOCK, np.uint8)
        start = -memory.ctypes.data % _BLOCK
        self.memory = memoryview(memory[start : start + size])
        self.payload = self.memory[_HEADER.size : _HEADER.size + length]
        self.memory[_HEADER.size + length :] = bytes(size - _HEADER.size - length)


class Record(NamedTuple):
    """A payload and its checksum, which need not be computed on the store's thread."""

    payload: bytes | memoryview
    checksum: int
    frame: Frame | None = None  # that the payload lies in

    @classmethod
    def of(cls, payload: bytes | memoryview, frame: Frame | None = None) -> Record:
        return cls(payload, xxhash.xxh3_64_intdigest(payload), frame)


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
        ours = [path for path in directory.glob("*.seg") if path.stem.isdecimal()]
        self._sizes = {int(path.stem): path.stat().st_size for path in ours}
        self._active: int | None = None
        self._file: int | None = None
        self._direct: int | None = None  # the same file, past the page cache; None if the file system cannot
        self._takes_direct = True
        self._unwritten: list[memoryview] = []  # the last bytes of the active segment, in order
        self._unwritten_direct = False  # whether they go past the page cache
        self._next = max(self._sizes, default=0) + 1

    @property
    def stored_bytes(self) -> int:
        return sum(self._sizes.values())

    @contextmanager
    def appending(self) -> Iterator[None]:
        """What is appended inside is durable when it ends. If it raises, none of it stays, nor its space."""
        size = 0 if self._active is None else self._sizes[self._active]
        segment = self._next if self._active is None else self._active
        try:
            yield
            self._sync()
        except BaseException:
            self._cut(segment, size)
            raise

    def append(self, record: Record) -> tuple[int, int]:
        """Give a record its place; inside :meth:`appending`, which writes it. Returns (segment, offset). Raises
        OSError."""
        if self._active is not None and self._sizes[self._active] > self._roll_bytes:
            self._sync()
            self.close()
        if self._active is None:
            self._open()
        header = _HEADER.pack(_MAGIC, len(record.payload), record.checksum)
        offset, end = self._sizes[self._active], self._sizes[self._active]
        direct = record.frame is not None and self._direct is not None
        if direct:
            offset = _whole_blocks(end)
            record.frame.memory[: len(header)] = header
        if self._unwritten and (direct, offset) != (self._unwritten_direct, end):
            self._write()
        self._unwritten_direct = direct
        self._unwritten += [record.frame.memory] if direct else [memoryview(header), memoryview(record.payload)]
        self._sizes[self._active] = offset + (len(record.frame.memory) if direct else len(header) + len(record.payload))
        return self._active, offset

    def _write(self) -> None:
        """What has its place in the active segment, all in one call: after each, the thread would wait for the
        interpreter's lock again."""
        parts, self._unwritten = self._unwritten, []
        offset = self._sizes[self._active] - sum(map(len, parts))
        file = self._direct if self._unwritten_direct else self._file
        while parts:
            written = os.pwritev(file, parts[:_MAX_PARTS], offset)
            if written == 0:
                raise OSError(errno.EIO, "the disk takes no more bytes, and gives no reason")
            offset += written
            while parts and written >= len(parts[0]):
                written -= len(parts.pop(0))
            if written:
                parts[0] = parts[0][written:]
                file = self._file  # what is left need not be whole blocks

    def _sync(self) -> None:
        if self._unwritten:
            self._write()
        if self._file is not None:
            os.fsync(self._file)

    def _cut(self, segment: int, size: int) -> None:
        """Back to where ``segment`` had ``size`` bytes and was the last. None of the open files is used again: after a
        failed fsync the kernel may have dropped what a second one would confirm."""
        self.close()
        with suppress(OSError):  # the rest stays, unreferenced, until a commit
            last = segment if size else segment - 1
            for later in [number for number in self._sizes if number > last]:
                self._path(later).unlink(missing_ok=True)
                del self._sizes[later]
            if self._sizes.get(segment, 0) > size:
                os.truncate(self._path(segment), size)
                self._sizes[segment] = size

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
        for file in (self._file, self._direct):
            if file is not None:
                os.close(file)
        self._file = self._direct = self._active = None
        self._unwritten = []

    def _open(self) -> None:
        path = self._path(self._next)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._active, self._next = self._next, self._next + 1
        self._sizes[self._active] = 0
        if self._takes_direct:
            self._try_direct(path)
        directory = os.open(self._directory, os.O_RDONLY)
        try:
            os.fsync(directory)  # the new name must survive a power cut along with the content
        finally:
            os.close(directory)

    def _try_direct(self, path: Path) -> None:
        try:
            self._direct = os.open(path, os.O_WRONLY | os.O_DIRECT)
            os.pwrite(self._direct, Frame(0).memory, 0)
            os.ftruncate(self._direct, 0)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            log.info("%s takes no direct I/O (%s): large records go through the page cache", self._directory, error)
            if self._direct is not None:
                os.close(self._direct)
            self._direct, self._takes_direct = None, False

    def _path(self, segment: int) -> Path:
        return self._directory / f"{segment:08d}.seg"


def _whole_blocks(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK
