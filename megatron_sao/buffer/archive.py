"""Reading what a buffer's directory holds, in a running buffer and, between two, without one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_sao.buffer.database import Database, StoreError
from megatron_sao.buffer.segments import SegmentCorrupt, Segments
from megatron_sao.data.batches import STAGES
from megatron_sao.data.trajectory import Trajectory


class Archive:
    """Reads; changes nothing. Raises StoreError for what is not there."""

    def __init__(self, db: Database, segments: Segments) -> None:
        self._db, self._segments = db, segments

    @classmethod
    def open(cls, directory: Path) -> Archive:
        """Of a directory that no buffer serves; none can start on it before :meth:`close`."""
        if not (directory / "index.sqlite").is_file():
            raise StoreError(404, f"{directory} holds no index.sqlite, so no buffer wrote there; name a run")
        return cls(Database(directory / "index.sqlite"), Segments(directory / "segments"))

    def close(self) -> None:
        self._segments.close()
        self._db.close()

    def index(self) -> list[dict[str, Any]]:
        """Everything still held, oldest first: id, task_id, epoch, kind, state, stage, step (of its batch or its
        evaluation, else None), num_tokens, num_action_tokens, versions, reason (why it was dropped or failed)."""
        rows = self._db.rows(
            "SELECT trajectories.id, task_id, epoch, kind, trajectories.state, stage, step, num_tokens, "
            "num_action_tokens, versions, trajectories.reason FROM trajectories JOIN visits ON visits.id=visit "
            "WHERE trajectories.state!='collected' ORDER BY serial"
        )
        return [
            dict(row)
            | {
                "stage": None if row["stage"] is None else STAGES[row["stage"]],
                "versions": json.loads(row["versions"]),
            }
            for row in rows
        ]

    def recorded_batches(self) -> list[dict[str, Any]]:
        """stage, step and the ids of every batch that has not been collected, in the order of training."""
        return [
            {"stage": STAGES[stage], "step": step, "ids": [entry["id"] for entry in self.members(stage, step)]}
            for stage, step in self._db.rows("SELECT stage, step FROM batches ORDER BY stage, step")
        ]

    def members(self, stage: int, step: int) -> list[dict[str, Any]]:
        """id, num_tokens and num_action_tokens of a batch: groups as they became complete, each in member order.

        Args:
            stage: its index in STAGES.
        """
        rows = self._db.rows(
            "SELECT trajectories.id, num_tokens, num_action_tokens FROM trajectories JOIN visits ON visits.id=visit "
            "WHERE trajectories.state='assigned' AND stage=? AND step=? "
            "ORDER BY max(serial) OVER (PARTITION BY task_id, epoch / ?), epoch",
            stage,
            step,
            self._db.get("group_size", 1),
        )
        return [dict(row) for row in rows]

    def read(self, id: str) -> bytes:
        """The encoded trajectory."""
        row = self._db.row("SELECT state, segment, offset FROM trajectories WHERE id=?", id)
        if row is None:
            raise StoreError(404, f"there is no trajectory {id!r}")
        if row["state"] == "collected":
            raise StoreError(410, f"trajectory {id!r} was collected after a commit; start from a later checkpoint")
        try:
            return self._segments.read(row["segment"], row["offset"])
        except SegmentCorrupt as error:
            raise StoreError(500, str(error)) from error

    def trajectory(self, id: str) -> Trajectory:
        return Trajectory.decode(self.read(id))
