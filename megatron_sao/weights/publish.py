"""Weights for engines through a shared file system: full version directories, and deltas between them."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from megatron_sao.config import WeightsConfig
from megatron_sao.distributed import all_gather_json, broadcast_json
from megatron_sao.models.hf import HFModel
from megatron_sao.weights.delta import DeltaSize, DeltaWriter, publish_delta, read_json, write_json
from megatron_sao.weights.disk import finish_version, remove_old, write_bucket
from megatron_sao.weights.gather import Bucket, Gatherer, use_in_turn
from megatron_sao.weights.verify import EngineChecksums, add_bucket

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Receiver:
    """An engine that takes part in a push. ``fresh``: it may be a new server process, unknown to any old group."""

    key: str
    id: str
    url: str
    tp: int
    fresh: bool = False


class Publisher:
    """Writes versions into a directory. Methods are collective over trainer ranks.

    Args:
        model: its ``config.json`` and tokenizer go into a full version.
        directory: ``full/<version>/`` and ``deltas/<version>/`` go there.
    """

    def __init__(self, gatherer: Gatherer, model: HFModel, settings: WeightsConfig, directory: Path) -> None:
        self._gatherer, self._model, self._settings = gatherer, model, settings
        self._directory = directory
        self._leads = dist.get_rank() == 0
        self._delta = DeltaWriter()
        self.delta_size = DeltaSize()  # of the last delta

    def publish(self, receivers: list[Receiver], version: str, checksums: list[EngineChecksums]) -> dict[str, Path]:
        """Publish the current weights, and feed them to ``checksums``.

        Returns:
            By key the directory that each engine has to load: its sidecar's copy where that could be patched in time,
            else the full version.
        """
        paths: dict[str, Path] = {}
        fed = False
        if self._settings.mode == "delta" and self._delta.version is not None:
            self._write_delta(version, checksums)
            paths, fed = self._patched(receivers, version), True
        full = self._directory / "full" / version
        if len(paths) < len(receivers):
            self._write_full(full, [] if fed else checksums)
        return {receiver.key: paths.get(receiver.key, full) for receiver in receivers}

    def _write_full(self, final: Path, checksums: list[EngineChecksums]) -> None:
        """A full version directory, unless it is there already: an engine that joins late loads the same."""
        new = broadcast_json(not final.exists(), self._gatherer.device)
        temporary = self._begin(final, new)

        def write(number: int, bucket: Bucket) -> None:
            if new:
                write_bucket(temporary, dist.get_rank(), number, bucket)
            if self._settings.mode == "delta":
                self._delta.remember(number, bucket)
            add_bucket(checksums, bucket)

        use_in_turn(self._gatherer.buckets(), write)
        dist.barrier()
        if new and self._leads:
            finish_version(temporary, final, self._gatherer.plan, self._model)
            remove_old(final.parent, final)
        self._announce(final.name)

    def _write_delta(self, version: str, checksums: list[EngineChecksums]) -> None:
        """What has changed since the last version; nothing where this one is published already."""
        base, final = self._delta.version, self._directory / "deltas" / version
        new = base != version
        temporary = self._begin(final, new)
        size = DeltaSize()

        def write(number: int, bucket: Bucket) -> None:
            nonlocal size
            if new:
                size += self._delta.write(temporary, dist.get_rank(), number, bucket)
            add_bucket(checksums, bucket)

        use_in_turn(self._gatherer.buckets(), write)
        dist.barrier()
        if not new:
            return
        if self._leads:
            publish_delta(temporary, final, base)
        sizes = all_gather_json(list(vars(size).values()), self._gatherer.device)
        size = self.delta_size = sum((DeltaSize(*part) for part in sizes), DeltaSize())
        log.info(
            "delta %s: %.3f %% of the elements changed, %.2f MB for %.2f MB of weights",
            version, 100 * size.changed / size.elements, size.nbytes / 1e6, size.full_nbytes / 1e6,
        )  # fmt: skip
        self._announce(version)

    def _begin(self, final: Path, new: bool) -> Path:
        """Where to write what will be called ``final``; made where that is ``new``."""
        temporary = final.with_name(final.name + ".tmp")
        if new and self._leads:
            temporary.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        return temporary

    def _announce(self, version: str) -> None:
        if self._settings.mode == "delta":
            self._delta.version = version
            if self._leads:
                write_json(self._directory / "latest.json", {"version": version})
        dist.barrier()

    def _patched(self, receivers: list[Receiver], version: str) -> dict[str, Path]:
        """By key the copies that their sidecars have brought to ``version`` in time."""
        paths: dict[str, str] = {}
        if self._leads:
            waiting = {receiver.key: receiver.id for receiver in receivers}
            deadline = time.monotonic() + self._settings.timeout
            while waiting and time.monotonic() < deadline:
                for key, engine in list(waiting.items()):
                    report = read_json(self._directory / "engines" / f"{engine}.json")
                    if report.get("asked") == version:
                        waiting.pop(key)
                        if report["version"] == version:
                            paths[key] = report["path"]
                        else:
                            log.warning("engine %s gets a full version: %s", engine, report["error"])
                time.sleep(_POLL_SECONDS)
            for engine in waiting.values():
                log.warning("engine %s gets a full version: its sidecar has not patched its copy in time", engine)
        agreed: dict[str, str] = broadcast_json(paths, self._gatherer.device)
        return {key: Path(path) for key, path in agreed.items()}
