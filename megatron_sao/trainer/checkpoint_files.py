"""The files of a checkpoint: their checksums, and changes that are whole or absent whenever the process dies.

While it is written a checkpoint has the suffix ``.tmp``, while it is deleted ``.removed``. ``meta.json`` is written
last: a directory that holds one is complete.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from pathlib import Path
from typing import Any

META = "meta.json"
_BLOCK = 2**22

Checksum = tuple[int, str]  # size in bytes, CRC-32 in hexadecimal


def checksum(path: Path) -> Checksum:
    """Reads the file in blocks, at about 3 GB/s. Raises OSError."""
    size = crc = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return size, f"{crc:08x}"


def damage(path: Path, expected: Checksum) -> str | None:
    """What is wrong with a file, as a sentence that names it; None where it is what was written."""
    try:
        size, crc = checksum(path)
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    if size != expected[0]:
        return f"{path} has {size} bytes, not the {expected[0]} that were written"
    if crc != expected[1]:
        return f"{path} has the CRC-32 {crc}, not the {expected[1]} of what was written"
    return None


def write_meta(directory: Path, meta: dict[str, Any]) -> None:
    """Declare the files in ``directory``, all of them on the disk already, a complete checkpoint."""
    text = json.dumps({"meta": meta, "crc32": _crc(meta)})
    with (directory / META).open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    sync_directory(directory)


def read_meta(directory: Path) -> dict[str, Any]:
    """What :func:`write_meta` was given. Raises ValueError with a sentence where it cannot be read back."""
    path = directory / META
    try:
        content = json.loads(path.read_text())
        meta, crc = content["meta"], content["crc32"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({error!r})") from error
    if crc != _crc(meta):
        raise ValueError(f"{path} is not what was written: its CRC-32 is {_crc(meta)}, not {crc}")
    return meta


def _crc(meta: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(meta, sort_keys=True).encode()):08x}"


def sync(directory: Path) -> None:
    """Force every file below ``directory`` to disk, so that a rename never precedes its content."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_directory(directory)


def sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sweep(directory: Path) -> None:
    """Delete what interrupted saves and deletions left in ``directory``."""
    for pattern in ("*.tmp", "*.removed"):
        for path in directory.glob(pattern):
            if path.is_dir():
                shutil.rmtree(path)


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint so that no part of it ever looks like a whole one."""
    doomed = checkpoint.with_name(f"{checkpoint.name}.removed")
    shutil.rmtree(doomed, ignore_errors=True)
    checkpoint.rename(doomed)
    shutil.rmtree(doomed)


def publish(temporary: Path, final: Path) -> None:
    """Rename a complete checkpoint into place. Where one is replaced, :func:`roll_forward` mends an interruption."""
    if final.exists():
        remove(final)
    temporary.rename(final)
    sync_directory(final.parent)


def roll_forward(final: Path) -> None:
    """Finish an interrupted :func:`publish` over an older checkpoint of the same name."""
    temporary = final.with_name(f"{final.name}.tmp")
    if not final.exists() and (temporary / META).exists():
        publish(temporary, final)


def write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)
