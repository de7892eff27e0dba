"""A directory under construction: it appears under its name when it is whole, and a killed job finds its files again.

While it is made it is ``OUT.partial/data``. Each file is written under a temporary name, forced to disk and renamed;
then its checksum is recorded in ``OUT.partial/done``, so that the next job of the same kind verifies and keeps it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from megatron_sao.config import ConfigError
from megatron_sao.trainer import checkpoint_files as files


class Staging:
    """``OUT`` while it is made, seen by one of the ranks that make it.

    Args:
        out: what it is to become.
        job: describes what is made from what; files of another job are of no use.
    """

    def __init__(self, out: Path, job: dict[str, Any]) -> None:
        self._out, self._job = out, json.dumps(job, sort_keys=True)
        self._partial = out.with_name(f"{out.name}.partial")
        self.directory = self._partial / "data"
        self._done = self._partial / "done"

    def prepare(self) -> None:
        """By one rank, before all others go on. Raises ConfigError where ``out`` exists."""
        if self._out.exists():
            raise ConfigError(f"--out {self._out} exists; choose another directory, or delete it first")
        job = self._partial / "job.json"
        if not job.is_file() or job.read_text() != self._job:
            shutil.rmtree(self._partial, ignore_errors=True)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._done.mkdir(exist_ok=True)
        files.write_atomically(job, self._job)

    def note(self, file: str) -> Any | None:
        """What :meth:`finish` was told of a file, if that is still what was written; else None."""
        record = self._done / f"{file}.json"
        if not record.is_file():
            return None
        content = json.loads(record.read_text())
        intact = files.damage(self.directory / file, tuple(content["checksum"])) is None
        return content["note"] if intact else None

    def finish(self, file: str, note: Any = True) -> None:
        """Record that a file is whole, and anything worth knowing about it."""
        content = {"checksum": files.checksum(self.directory / file), "note": note}
        record = self._done / f"{file}.json"
        record.parent.mkdir(parents=True, exist_ok=True)
        files.write_atomically(record, json.dumps(content))

    def finished(self) -> dict[str, tuple[files.Checksum, Any]]:
        """Checksum and note of every file finished so far, by name."""
        records = {}
        for path in sorted(self._done.rglob("*.json")):
            content = json.loads(path.read_text())
            name = str(path.relative_to(self._done)).removesuffix(".json")
            records[name] = (tuple(content["checksum"]), content["note"])
        return records

    def publish(self) -> None:
        """By one rank, when all have finished their files."""
        files.sync(self.directory)
        self.directory.rename(self._out)
        files.sync_directory(self._out.parent)
        shutil.rmtree(self._partial)
