"""The index of the buffer: one SQLite file, held exclusively, in which a finished transaction is on the disk."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_SCHEMA_VERSION = 2
_SCHEMA = """
CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE counters(name TEXT PRIMARY KEY, value INTEGER NOT NULL);
CREATE TABLE trainers(incarnation INTEGER PRIMARY KEY, policy_version INTEGER NOT NULL, pushed TEXT);
CREATE TABLE visits(
    id INTEGER PRIMARY KEY AUTOINCREMENT,  -- never reused: leases of a void evaluation are still out
    kind TEXT NOT NULL, epoch INTEGER NOT NULL, task_id TEXT NOT NULL,
    state TEXT NOT NULL,               -- ready, leased, done, aside
    attempt INTEGER NOT NULL, worker TEXT, request TEXT, reason TEXT,
    UNIQUE(kind, epoch, task_id));
CREATE INDEX visits_by_state ON visits(kind, state);
CREATE INDEX visits_by_request ON visits(request);
CREATE TABLE trajectories(
    serial INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, visit INTEGER NOT NULL,
    state TEXT NOT NULL,               -- stored, assigned, eval, dropped, failed, collected
    stage INTEGER, step INTEGER,       -- of its batch or its evaluation
    segment INTEGER NOT NULL, offset INTEGER NOT NULL,
    num_tokens INTEGER NOT NULL, num_action_tokens INTEGER NOT NULL, versions TEXT NOT NULL, reason TEXT);
CREATE INDEX trajectories_by_state ON trajectories(state, stage, step);
CREATE INDEX trajectories_by_visit ON trajectories(visit);
CREATE TABLE batches(
    stage INTEGER, step INTEGER, batch_size INTEGER NOT NULL, policy_version INTEGER NOT NULL,
    PRIMARY KEY(stage, step));
CREATE TABLE evaluations(
    id INTEGER PRIMARY KEY AUTOINCREMENT, stage INTEGER NOT NULL, step INTEGER NOT NULL,
    version TEXT NOT NULL, num_prompts INTEGER NOT NULL, UNIQUE(stage, step));
CREATE TABLE drops(
    serial INTEGER PRIMARY KEY AUTOINCREMENT, counter TEXT NOT NULL, trajectory TEXT NOT NULL, kind TEXT NOT NULL,
    task_id TEXT NOT NULL, epoch INTEGER NOT NULL, reason TEXT NOT NULL, at REAL NOT NULL);
CREATE TABLE engines(
    id TEXT PRIMARY KEY, url TEXT NOT NULL, tp INTEGER NOT NULL, state TEXT NOT NULL, version TEXT,
    pushing INTEGER NOT NULL);         -- incarnation that marked it dirty since it registered, else 0
"""


class StoreError(RuntimeError):
    """A refusal: an HTTP status and a sentence."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Database:
    """Thin access to the index. One thread at a time. Raises StoreError(503) if another process owns the file."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, timeout=2.0, isolation_level=None, check_same_thread=False)
        self._connection.row_factory = sqlite3.Row
        self._counted: Counter[str] = Counter()  # in the open transaction
        try:
            # Exclusive before WAL: the lock is then held for the life of the process, and no shared-memory file,
            # which a network file system could not share, is used.
            self._connection.execute("PRAGMA locking_mode=EXCLUSIVE")
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=FULL")
            self._connection.execute("BEGIN EXCLUSIVE")
            self._create(path)
            self._connection.execute("COMMIT")
        except sqlite3.DatabaseError as error:
            self._connection.close()
            if error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
                raise StoreError(500, f"{path} is damaged ({error}); choose a new run directory") from error
            if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise
            raise StoreError(
                503, f"{path} is in use by another buffer process; stop that one, or choose another run directory"
            ) from error

    def _create(self, path: Path) -> None:
        version = self._connection.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            for statement in _SCHEMA.split(";"):
                self._connection.execute(statement)
            self._connection.execute(f"PRAGMA user_version={_SCHEMA_VERSION}")
        elif version != _SCHEMA_VERSION:
            raise StoreError(
                500, f"{path} has format {version}, this program writes {_SCHEMA_VERSION}; choose a new run directory"
            )

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing, on the disk when it ends. Inside another one it is part of that."""
        if self._connection.in_transaction:
            yield
            return
        self._connection.execute("BEGIN IMMEDIATE")
        self._counted.clear()
        try:
            yield
            for name, amount in self._counted.items():
                self.run(
                    "INSERT INTO counters VALUES(?, ?) ON CONFLICT(name) DO UPDATE SET value=value+excluded.value",
                    name,
                    amount,
                )
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:  # some errors (disk full) roll back by themselves
                self._connection.execute("ROLLBACK")
            raise

    def run(self, sql: str, *values: Any) -> sqlite3.Cursor:
        return self._connection.execute(sql, values)

    def rows(self, sql: str, *values: Any) -> list[sqlite3.Row]:
        return self._connection.execute(sql, values).fetchall()

    def row(self, sql: str, *values: Any) -> sqlite3.Row | None:
        return self._connection.execute(sql, values).fetchone()

    def scalar(self, sql: str, *values: Any) -> Any:
        row = self.row(sql, *values)
        return None if row is None else row[0]

    def get(self, key: str, default: Any = None) -> Any:
        value = self.scalar("SELECT value FROM meta WHERE key=?", key)
        return default if value is None else json.loads(value)

    def set(self, key: str, value: Any) -> None:
        self.run("INSERT OR REPLACE INTO meta VALUES(?, ?)", key, json.dumps(value))

    def count(self, name: str) -> None:
        """Inside a transaction, which writes it at its end: those of many trajectories are one statement."""
        self._counted[name] += 1

    def counters(self) -> dict[str, int]:
        return {row["name"]: row["value"] for row in self.rows("SELECT * FROM counters")}

    def close(self) -> None:
        self._connection.close()
