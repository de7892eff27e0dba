"""Recorded batches: a directory from which the trainer runs without any other process.

DIR/manifest.json             {"schema": 1, "batches": [{"stage", "step", "trajectories": [id, ...]}, ...]}
DIR/<stage>/<step>/<n>.msgpack    the trajectories of one batch, in order, in the wire format
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from megatron_sao.config import ConfigError
from megatron_sao.data.trajectory import Trajectory, TrajectoryError

STAGES = ("sft", "value", "rl")  # in the order of a run
_SCHEMA = 1


class BatchesError(ConfigError):
    """Recorded batches that cannot be read; the message names the file and the remedy."""


class RecordedBatches:
    """Read access to a directory written by :func:`write_batch`. Raises BatchesError."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        if not (self.directory / "manifest.json").is_file():
            raise BatchesError(
                f"{self.directory} holds no manifest.json; name a directory of batches exported from a run"
            )
        self._batches = _read_manifest(self.directory)

    def steps(self, stage: str) -> list[int]:
        """The recorded steps of a stage, ascending."""
        return sorted(step for recorded, step in self._batches if recorded == stage)

    def stages(self) -> list[str]:
        """The recorded stages, in the order of a run."""
        return [stage for stage in STAGES if self.steps(stage)]

    def batch(self, stage: str, step: int) -> list[Trajectory]:
        """The trajectories of one step, in the order in which they were trained on."""
        ids = self._batches.get((stage, step))
        if ids is None:
            raise BatchesError(
                f"{self.directory} has no batch for stage {stage!r}, step {step}; recorded: {self.steps(stage)}"
            )
        folder = self.directory / stage / str(step)
        return [_read(folder / f"{index}.msgpack", id) for index, id in enumerate(ids)]


def write_batch(directory: str | Path, stage: str, step: int, trajectories: list[Trajectory]) -> None:
    """Add one batch, or replace it. The manifest changes last and atomically."""
    directory = Path(directory)
    if stage not in STAGES:
        raise BatchesError(f"stage {stage!r} is none of {', '.join(STAGES)}")
    folder = directory / stage / str(step)
    folder.mkdir(parents=True, exist_ok=True)
    for index, trajectory in enumerate(trajectories):
        (folder / f"{index}.msgpack").write_bytes(trajectory.encode())
    batches = _read_manifest(directory) if (directory / "manifest.json").exists() else {}
    batches[stage, step] = [trajectory.id for trajectory in trajectories]
    ordered = sorted(batches.items(), key=lambda item: (STAGES.index(item[0][0]), item[0][1]))
    records = [{"stage": stage, "step": step, "trajectories": ids} for (stage, step), ids in ordered]
    temporary = directory / "manifest.json.tmp"
    temporary.write_text(json.dumps({"schema": _SCHEMA, "batches": records}, indent=1) + "\n")
    os.replace(temporary, directory / "manifest.json")


def _read_manifest(directory: Path) -> dict[tuple[str, int], list[str]]:
    path = directory / "manifest.json"
    try:
        manifest = json.loads(path.read_text())
        if manifest["schema"] != _SCHEMA:
            raise BatchesError(f"{path} has schema {manifest['schema']!r}; this reader knows {_SCHEMA}")
        return {(entry["stage"], entry["step"]): list(entry["trajectories"]) for entry in manifest["batches"]}
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise BatchesError(f"{path} is not a manifest of batches ({error!r}); export the batches again") from error


def _read(path: Path, id: str) -> Trajectory:
    try:
        trajectory = Trajectory.decode(path.read_bytes())
    except (OSError, TrajectoryError) as error:
        raise BatchesError(f"{path} is not a readable trajectory ({error}); export the batches again") from error
    if trajectory.id != id:
        raise BatchesError(
            f"{path} holds the trajectory {trajectory.id!r}, but the manifest names {id!r}; export the batches again"
        )
    return trajectory
