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
    its sidecar says so. Only a clean engine gets requests, and one that was down or sick comes back dirty: pushes pass
    it by from the moment that it is listed so, and from then on it is dirty on the disk.

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
        engine = self._known(id)
        if sick is not None and id not in self._sick:
            log.warning("engine %s is sick: %s", id, sick)
        if self._ailment(id) is not None:
            self._passed_by(engine)
        if sick is None:
            self._sick.discard(id)
        else:
            self._sick.add(id)
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
        if self._ailment(id) is not None or engine["pushing"] != incarnation:
            raise StoreError(
                409,
                f"engine {id!r} was not marked dirty before this push, or has registered anew, been sick or been down "
                "since: mark it dirty and push again",
            )
        with self._db.transaction():
            self._db.run("UPDATE engines SET state='clean', version=?, pushing=0 WHERE id=?", version, id)
            self._db.run("UPDATE trainers SET pushed=? WHERE incarnation=?", version, incarnation)

    def all_dirty(self) -> None:
        self._db.run("UPDATE engines SET state='dirty', version=NULL, pushing=0")

    def list(self) -> list[dict[str, Any]]:
        engines = []
        for row in self._db.rows("SELECT * FROM engines ORDER BY id"):
            ailment = self._ailment(row["id"])
            if ailment is not None:
                self._passed_by(row)
            state, version = (row["state"], row["version"]) if ailment is None else (ailment, None)
            listed = {"state": state, "version": version, "heartbeat_age": self._age(row["id"])}
            engines.append({name: row[name] for name in ("id", "url", "tp")} | listed)
        return engines

    def clean_versions(self) -> set[str]:
        return {engine["version"] for engine in self.list() if engine["state"] == "clean"}

    def _known(self, id: str) -> Any:
        engine = self._db.row("SELECT * FROM engines WHERE id=?", id)
        if engine is None:
            raise StoreError(404, f"no engine {id!r} is registered; register it first")
        return engine

    def _ailment(self, id: str) -> str | None:
        return "down" if self._age(id) > HEARTBEAT_LIMIT else "sick" if id in self._sick else None

    def _passed_by(self, engine: Any) -> None:
        """Pushes pass it by, so what it holds will be old. It is written once."""
        if engine["state"] == "clean" or engine["pushing"]:
            with self._db.transaction():
                self._db.run("UPDATE engines SET state='dirty', version=NULL, pushing=0 WHERE id=?", engine["id"])

    def _age(self, id: str) -> float:
        return self._clock() - self._heard[id]
