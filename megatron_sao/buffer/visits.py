"""Visits, (task, epoch) pairs: who plays which now, at which attempt, and how far rollouts may run ahead.

Life of a visit: ready → leased → done (a trajectory was accepted), or back to ready when the lease expires, is
released or ends in a failure of the environment's own; after ``max_attempts`` leases it is set aside, with the rest
of its sampling group. The visits of an evaluation have the evaluation's number as their epoch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import takewhile
from sqlite3 import Row
from typing import Any

import numpy as np

from megatron_sao.buffer.database import Database, StoreError
from megatron_sao.buffer.drops import Drops
from megatron_sao.buffer.engines import Engines
from megatron_sao.buffer.fairness import Demand, fair_share
from megatron_sao.buffer.groups import Groups
from megatron_sao.config import RunConfig
from megatron_sao.data.tasks import Task, epoch_order

log = logging.getLogger(__name__)

ASIDE_KEPT = 10_000  # visits set aside that stay listed


class Visits:
    """One thread at a time. Deadlines live in memory: a restart of the buffer gives every lease its full time anew,
    which is never less than what the downtime took from it, and a renewal costs no fsync."""

    def __init__(
        self,
        db: Database,
        engines: Engines,
        drops: Drops,
        config: RunConfig,
        tasks: list[Task],
        eval_tasks: list[Task],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._db = db
        self._engines = engines
        self._config = config
        self._tasks = tasks
        self._eval_tasks = eval_tasks
        self._by_id = {"train": {task.id: task for task in tasks}, "eval": {task.id: task for task in eval_tasks}}
        self._clock = clock
        self.groups = Groups(db, drops, config.rl.group_size)
        self._demand = Demand(clock)
        self._order = (-1, epoch_order(0, 0, 0))
        self._places: tuple[int, dict[str, int]] = (-1, {})
        leased = db.rows("SELECT id FROM visits WHERE state='leased'")
        self._deadlines = {row["id"]: clock() + config.buffer.lease_seconds for row in leased}

    def lease(self, worker_id: str, max_leases: int, request_id: str) -> list[dict[str, Any]] | None:
        """Grant up to ``max_leases`` visits, evaluations first; the same ones if the request is repeated. None:
        nothing to play now, or others that wait hold fewer."""
        self.expire()
        repeated = self._db.rows("SELECT * FROM visits WHERE request=? AND state='leased'", request_id)
        versions = self._engines.clean_versions()
        if repeated or not versions or self._db.scalar("SELECT count(*) FROM trainers") == 0:
            return [self._as_lease(visit) for visit in repeated] or None
        wanted = self._demand.ask(worker_id, max_leases)
        with self._db.transaction():
            evaluations = self._ready_evaluations(versions, sum(wanted.values()))
            share = self._share(worker_id, len(evaluations), wanted)
            granted = evaluations[:share]
            granted += self._train_visits(share - len(granted))
            for visit_id in granted:
                self._db.run(
                    "UPDATE visits SET state='leased', attempt=attempt+1, worker=?, request=?, reason=NULL WHERE id=?",
                    worker_id,
                    request_id,
                    visit_id,
                )
        if granted:
            self._demand.served(worker_id)
        for visit_id in granted:
            self._extend(visit_id)
        return [self._as_lease(self._by_number(visit_id)) for visit_id in granted] or None

    def renew(self, visit_id: int, attempt: int) -> float:
        self.expire()
        visit = self._by_number(visit_id)
        if visit["state"] != "leased" or visit["attempt"] != attempt:
            raise StoreError(
                409,
                f"visit {visit_id} is {visit['state']} at attempt {visit['attempt']}: the lease of attempt "
                f"{attempt} is over; stop its episode",
            )
        self._extend(visit_id)
        return self._config.buffer.lease_seconds

    def release(self, visit_id: int, attempt: int, reason: str) -> None:
        """Give a lease back unplayed. A lease that is over is left alone."""
        visit = self._by_number(visit_id)
        if visit["state"] == "leased" and visit["attempt"] == attempt:
            with self._db.transaction():
                self.give_back(visit, reason)
                self._db.count("leases_released")

    def expire(self) -> None:
        """Give back every lease whose time is up."""
        now = self._clock()
        late = list(takewhile(lambda visit_id: self._deadlines[visit_id] < now, self._deadlines))
        if not late:
            return
        with self._db.transaction():
            for visit_id in late:
                visit = self._db.row("SELECT * FROM visits WHERE id=? AND state='leased'", visit_id)
                if visit is not None:
                    self.give_back(visit, "lease expired")
                    self._db.count("leases_expired")
        for visit_id in late:
            del self._deadlines[visit_id]

    def entered(self, epoch: int, task_id: str) -> bool:
        """Whether the train visit (task, epoch) has ever been in play. Its row may be gone since."""
        if task_id not in self._by_id["train"]:
            return False
        number, position = self._db.get("cursor", [0, 0])
        if epoch // self.groups.size != number:
            return epoch // self.groups.size < number
        return self._epoch_places(number)[task_id] < position

    def aside(self, after: int, limit: int) -> list[dict[str, Any]]:
        """Visits given up, poison tasks among them, in the order of their ids from behind ``after``."""
        rows = self._db.rows(
            "SELECT id, kind, task_id, epoch, attempt, reason FROM visits WHERE state='aside' AND id>? "
            "ORDER BY id LIMIT ?",
            after,
            limit,
        )
        return [dict(row) for row in rows]

    def collect(self) -> None:
        """Inside a transaction: forget the visits whose trajectories are gone, and all but the newest set aside."""
        self._db.run(
            "DELETE FROM visits WHERE kind='train' AND state='done' "
            "AND NOT EXISTS (SELECT 1 FROM trajectories WHERE visit=visits.id)"
        )
        self._db.run(
            "DELETE FROM visits WHERE state='aside' AND kind='train' AND id NOT IN "
            "(SELECT id FROM visits WHERE state='aside' AND kind='train' ORDER BY id DESC LIMIT ?) "
            "AND NOT EXISTS (SELECT 1 FROM trajectories WHERE visit=visits.id)",
            ASIDE_KEPT,
        )

    def find(self, kind: str, epoch: int, task_id: str) -> Row | None:
        return self._db.row("SELECT * FROM visits WHERE kind=? AND epoch=? AND task_id=?", kind, epoch, task_id)

    def give_back(self, visit: Row, reason: str) -> None:
        """Inside a transaction: the leased visit is ready for another attempt, or set aside after the last one."""
        last = visit["attempt"] >= self._config.buffer.max_attempts
        self._db.run(
            "UPDATE visits SET state=?, reason=? WHERE id=?", "aside" if last else "ready", reason, visit["id"]
        )
        if last:
            self._db.count(f"{visit['kind']}_visits_set_aside")
            log.warning("%s task %s is set aside: %s", visit["kind"], visit["task_id"], reason)
            self.groups.drop_siblings(visit, f"set aside after {visit['attempt']} attempts, the last one: {reason}")

    def done(self, visit: Row) -> None:
        """Inside a transaction: the visit has its trajectory."""
        self._db.run("UPDATE visits SET state='done' WHERE id=?", visit["id"])

    def limit(self) -> int:
        """How many trajectories may be outstanding: more could not be trained on within ``max_staleness``."""
        value = self._config.value
        batch_size = value.batch_size if value.steps else self._config.rl.batch_size
        requested = self._db.get("requested")  # [stage, step, batch_size], written by Store.batch
        return (self._config.rl.max_staleness + 1) * (requested[2] if requested else batch_size)

    def outstanding(self) -> int:
        """Leased, stored and not in a batch, and in the batches from the one being trained on."""
        leased = self._db.scalar("SELECT count(*) FROM visits WHERE kind='train' AND state='leased'")
        stored = self._db.scalar("SELECT count(*) FROM trajectories WHERE state='stored'")
        requested = self._db.get("requested", [0, 0, 0])
        return (
            leased
            + stored
            + self._db.scalar(
                "SELECT coalesce(sum(batch_size), 0) FROM batches WHERE (stage, step) >= (?, ?)", *requested[:2]
            )
        )

    def start_evaluation(self, stage: int, step: int, version: str, num_prompts: int) -> None:
        """Make the visits of an evaluation. Caller is inside a transaction and has cancelled any older one."""
        if not 1 <= num_prompts <= len(self._eval_tasks):
            raise StoreError(
                422,
                f"num_prompts={num_prompts}, but data.eval holds {len(self._eval_tasks)} tasks; "
                "lower eval.prompts or name a longer file",
            )
        number = self._db.run(
            "INSERT INTO evaluations(stage, step, version, num_prompts) VALUES(?, ?, ?, ?)",
            stage,
            step,
            version,
            num_prompts,
        ).lastrowid
        for task in self._eval_tasks[:num_prompts]:
            self._db.run(
                "INSERT INTO visits(kind, epoch, task_id, state, attempt) VALUES('eval', ?, ?, 'ready', 0)",
                number,
                task.id,
            )

    def forget_evaluation(self, number: int) -> None:
        """Inside a transaction: nobody waits for this evaluation any more."""
        self._db.run("DELETE FROM visits WHERE kind='eval' AND epoch=?", number)
        self._db.run("DELETE FROM evaluations WHERE id=?", number)

    def _ready_evaluations(self, versions: set[str], limit: int) -> list[int]:
        """Visits of evaluations that some engine could play now."""
        return [
            visit["id"]
            for version in sorted(versions)
            for visit in self._db.rows(
                "SELECT visits.id FROM visits JOIN evaluations ON evaluations.id=epoch AND version=? "
                "WHERE kind='eval' AND state='ready' ORDER BY visits.id LIMIT ?",
                version,
                limit,
            )
        ]

    def _extend(self, visit_id: int) -> None:
        """The lease runs from now. All run equally long, so that the deadlines stay in order: most calls look at the
        first alone."""
        self._deadlines.pop(visit_id, None)
        self._deadlines[visit_id] = self._clock() + self._config.buffer.lease_seconds

    def _share(self, worker_id: str, evaluations: int, wanted: dict[str, int]) -> int:
        """How many visits may go to this worker, so that none waits while others hold more."""
        if len(wanted) == 1:
            return wanted[worker_id]
        available = evaluations + max(self._room(), self._ready() if self.groups.size > 1 else 0)
        rows = self._db.rows("SELECT worker, count(*) AS n FROM visits WHERE state='leased' GROUP BY worker")
        return fair_share(worker_id, available, wanted, {row["worker"]: row["n"] for row in rows})

    def _room(self) -> int:
        return max(0, self.limit() - self.outstanding())

    def _ready(self) -> int:
        return self._db.scalar("SELECT count(*) FROM visits WHERE kind='train' AND state='ready'")

    def _train_visits(self, wanted: int) -> list[int]:
        """Inside a transaction: up to ``wanted`` visits to lease, those that came back first.

        Why groups cannot starve each other: a group enters whole and leaves whole, to a batch or dropped, and
        ``limit`` is a multiple of its size. So visits leased, stored and ready together stay within ``limit``, and
        there is always room for a ready one: sooner or later no member is missing, and either the open groups fill
        a batch or there is room for more of them. Only a resume with a smaller batch_size or max_staleness could
        leave ready visits no room in front of a buffer full of groups that wait for them. Hence a member of a
        group asks for none.
        """
        room = min(wanted, self._room())
        for _ in range(self._ready(), room, self.groups.size):
            self._enter_next_task()
        rows = self._db.rows(
            "SELECT id FROM visits WHERE kind='train' AND state='ready' ORDER BY id LIMIT ?",
            room if self.groups.size == 1 else wanted,
        )
        return [row["id"] for row in rows]

    def _enter_next_task(self) -> None:
        """Make the visits of the next task's group, ready."""
        number, position = self._db.get("cursor", [0, 0])  # pass over the tasks, place in it
        if position == len(self._tasks):
            number, position = number + 1, 0
        task = self._tasks[self._epoch_order(number)[position]]
        self._db.set("cursor", [number, position + 1])
        for member in range(self.groups.size):
            self._db.run(
                "INSERT INTO visits(kind, epoch, task_id, state, attempt) VALUES('train', ?, ?, 'ready', 0)",
                number * self.groups.size + member,
                task.id,
            )

    def _epoch_order(self, number: int) -> np.ndarray:
        if self._order[0] != number:
            self._order = (number, epoch_order(len(self._tasks), self._config.seed, number))
        return self._order[1]

    def _epoch_places(self, number: int) -> dict[str, int]:
        """Place of each task, by its id, in the order of an epoch."""
        if self._places[0] != number:
            order = self._epoch_order(number).tolist()
            self._places = (number, {self._tasks[index].id: place for place, index in enumerate(order)})
        return self._places[1]

    def _by_number(self, visit_id: int) -> Row:
        visit = self._db.row("SELECT * FROM visits WHERE id=?", visit_id)
        if visit is None:
            raise StoreError(409, f"there is no visit {visit_id} (any more); stop its episode")
        return visit

    def _as_lease(self, visit: Row) -> dict[str, Any]:
        version = None
        if visit["kind"] == "eval":
            version = self._db.scalar("SELECT version FROM evaluations WHERE id=?", visit["epoch"])
        return {
            "visit_id": str(visit["id"]),
            "kind": visit["kind"],
            "task": asdict(self._by_id[visit["kind"]][visit["task_id"]]),
            "epoch": visit["epoch"],
            "attempt": visit["attempt"],
            "expires_in": max(0.0, self._deadlines[visit["id"]] - self._clock()),
            "version": version,
            "group": self.groups.label(visit["kind"], visit["task_id"], visit["epoch"]),
        }
