"""The registry of SGLang servers: which exist, and which hold exactly the weights they claim."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from megatron_sao.buffer.database import Database, StoreError

log = logging.getLogger(__name__)

HEARTBEAT_LIMIT = 15.0  # seconds without a heartbeat after which an engine is "down"


class Engines:
    """States: dirty on registration; the trainer marks dirty, pushes, marks clean; down without heartbeats; sick while
    its sidecar says so. Only a clean engine gets requests, and one that was down or sick comes back dirty.

    Heartbeats are kept in memory: after a restart of the buffer every engine counts as just heard, and well.
    """

    def __init__(self, db: Database, clock: Callable[[], float] = time.monotonic) -> None:
        self._db = db
        self._clock = clock
        self._heard = {row["id"]: clock() for row in db.rows("SELECT id FROM engines")}
        self._sick: set[str] = set()

    def register(self, id: str, url: str, tp: int) -> None:
        """A new or restarted server: its weights are unknown, even if a push to its predecessor is under way."""
        with self._db.transaction():
            self._db.run("INSERT OR REPLACE INTO engines VALUES(?, ?, ?, 'dirty', NULL, 0)", id, url, tp)
        self._heard[id] = self._clock()
        self._sick.discard(id)

    def heartbeat(self, id: str, sick: str | None = None) -> dict[str, Any]:
        """``sick``: why the sidecar thinks that its server cannot serve, else None. Returns the engine as listed."""
        self._known(id)
        if sick is not None and id not in self._sick:
            log.warning("engine %s is sick: %s", id, sick)
            self._sick.add(id)
        if self._age(id) > HEARTBEAT_LIMIT or (sick is None and id in self._sick):
            self._sick.discard(id)
            # Pushes have passed it by while it was away, so what it holds may be old.
            with self._db.transaction():
                self._db.run("UPDATE engines SET state='dirty', version=NULL, pushing=0 WHERE id=?", id)
        self._heard[id] = self._clock()
        return next(engine for engine in self.list() if engine["id"] == id)

    def mark(self, id: str, state: str, version: str | None, incarnation: int) -> None:
        """Caller has checked the incarnation."""
        engine = self._known(id)
        if state == "dirty":
            with self._db.transaction():
                self._db.run("UPDATE engines SET state='dirty', version=NULL, pushing=? WHERE id=?", incarnation, id)
            return
        if engine["state"] == "clean" and engine["version"] == version:
            return  # a repeated request
        if engine["pushing"] != incarnation:
            raise StoreError(
                409,
                f"engine {id!r} was not marked dirty before this push, or has registered anew since: "
                "mark it dirty and push again",
            )
        with self._db.transaction():
            self._db.run("UPDATE engines SET state='clean', version=?, pushing=0 WHERE id=?", version, id)
            self._db.run("UPDATE trainers SET pushed=? WHERE incarnation=?", version, incarnation)

    def all_dirty(self) -> None:
        self._db.run("UPDATE engines SET state='dirty', version=NULL, pushing=0")

    def list(self) -> list[dict[str, Any]]:
        engines = []
        for row in self._db.rows("SELECT id, url, tp, state, version FROM engines ORDER BY id"):
            age = self._age(row["id"])
            state = "down" if age > HEARTBEAT_LIMIT else "sick" if row["id"] in self._sick else row["state"]
            engines.append(dict(row) | {"heartbeat_age": age, "state": state})
        return engines

    def clean_versions(self) -> set[str]:
        return {engine["version"] for engine in self.list() if engine["state"] == "clean"}

    def _known(self, id: str) -> Any:
        engine = self._db.row("SELECT * FROM engines WHERE id=?", id)
        if engine is None:
            raise StoreError(404, f"no engine {id!r} is registered; register it first")
        return engine

    def _age(self, id: str) -> float:
        return self._clock() - self._heard[id]
