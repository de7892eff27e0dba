"""Sampling groups: ``rl.group_size`` rollouts of one prompt, compared with each other, so trained on together or not.

Member m of a group of G in pass e over the tasks is the visit (task, epoch e·G + m): (task, epoch) stays the name of
one visit, and no further column is needed. With G = 1 every visit is a group of its own, and nothing here shows.
"""

from __future__ import annotations

from sqlite3 import Row

from megatron_sao.buffer.database import Database
from megatron_sao.buffer.drops import Drops


class Groups:
    """Reads and drops groups. Whatever writes is called inside a transaction.

    Args:
        size: G, ``rl.group_size``.
    """

    def __init__(self, db: Database, drops: Drops, size: int) -> None:
        self._db = db
        self._drops = drops
        self.size = size

    def label(self, kind: str, task_id: str, epoch: int) -> str | None:
        """``Trajectory.group`` of a visit; None where there are no groups."""
        return f"{task_id}/{epoch // self.size}" if kind == "train" and self.size > 1 else None

    def oldest_complete(self, num_trajectories: int) -> list[int]:
        """Serials of up to ``num_trajectories`` stored trajectories, a multiple of G: the groups that have had all
        their members for longest."""
        rows = self._db.rows(
            "WITH stored AS ("
            "SELECT serial, count(*) OVER members AS present, max(serial) OVER members AS completed "
            "FROM trajectories JOIN visits ON visits.id=visit WHERE trajectories.state='stored' "
            "WINDOW members AS (PARTITION BY task_id, epoch / ?)) "
            "SELECT serial FROM stored WHERE present=? ORDER BY completed LIMIT ?",
            self.size,
            self.size,
            num_trajectories,
        )
        return [row["serial"] for row in rows]

    def drop_siblings(self, lost: Row, reason: str) -> None:
        """The visit ``lost`` will never bring a trajectory to train on, so nothing of the rest of its group is of
        use: trajectories that are in are dropped, and episodes that still run find their visits set aside."""
        label = self.label(lost["kind"], lost["task_id"], lost["epoch"])
        if label is None:
            return
        first = lost["epoch"] - lost["epoch"] % self.size
        reason = f"group {label} is incomplete for good, member {lost['epoch'] - first} is lost: {reason}"
        for epoch in range(first, first + self.size):
            if epoch == lost["epoch"]:
                continue
            visit = self._db.scalar(
                "SELECT id FROM visits WHERE kind='train' AND epoch=? AND task_id=?", epoch, lost["task_id"]
            )
            self._db.run("UPDATE visits SET state='aside', reason=? WHERE id=? AND state!='aside'", reason, visit)
            for stored in self._db.rows("SELECT id FROM trajectories WHERE visit=? AND state='stored'", visit):
                self._db.run("UPDATE trajectories SET state='dropped', reason=? WHERE id=?", reason, stored["id"])
                self._drops.add("dropped_incomplete_group", stored["id"], "train", lost["task_id"], epoch, reason)
