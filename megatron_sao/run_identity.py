"""Which run a directory holds: the parts of one run know each other by it, and no other run by the same name."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from megatron_sao.config import ConfigError


def run_identity(run_dir: Path, name: str) -> str:
    """``name`` and a number drawn once per run directory, as in ``demo-1f0c9a6b``; kept in ``<run_dir>/run_id``.

    Whichever part of the run comes first draws it; the others read it. A run that is resumed has the directory of the
    old one, so the same identity; a new directory is another run, also under the same name and config.

    Raises:
        ConfigError: the file is there and empty.
    """
    path = run_dir / "run_id"
    if not path.exists():
        run_dir.mkdir(parents=True, exist_ok=True)
        number = secrets.token_hex(4)
        temporary = run_dir / f"run_id.{number}.tmp"  # parts in containers may share a process id
        with temporary.open("x") as file:
            file.write(f"{name}-{number}\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)  # unlike a rename it fails if another part was faster
        except FileExistsError:
            pass
        finally:
            temporary.unlink()
    identity = path.read_text().strip()
    if not identity:
        raise ConfigError(f"{path} is empty: write into it what logs/buffer.log says is served, or start a new run")
    return identity
