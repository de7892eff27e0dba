"""The list of what was not trained on, and why. Counted for ever, listed for the newest ``KEPT``."""

from __future__ import annotations

import time
from typing import Any

from megatron_sao.buffer.database import Database

KEPT = 10_000
# Each is a counter of the buffer as well; the list and the counters are written in one transaction.
DROP_COUNTERS = (
    "dropped_stale",
    "dropped_incomplete_group",
    "trajectories_failed",
    "trajectories_late",
    "eval_trajectories_void",
)


class Drops:
    """Writes are called inside a transaction."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def add(self, counter: str, trajectory: str, kind: str, task_id: str, epoch: int, reason: str) -> None:
        """Count and list one trajectory. ``counter`` is one of DROP_COUNTERS."""
        self._db.count(counter)
        added = self._db.run(
            "INSERT INTO drops(counter, trajectory, kind, task_id, epoch, reason, at) VALUES(?, ?, ?, ?, ?, ?, ?)",
            counter,
            trajectory,
            kind,
            task_id,
            epoch,
            reason,
            time.time(),
        )
        self._db.run("DELETE FROM drops WHERE serial<=?", added.lastrowid - KEPT)

    def list(self, after: int, limit: int) -> list[dict[str, Any]]:
        """Up to ``limit`` entries in the order they were dropped, from behind the serial ``after``."""
        rows = self._db.rows("SELECT * FROM drops WHERE serial>? ORDER BY serial LIMIT ?", after, limit)
        return [dict(row) for row in rows]
