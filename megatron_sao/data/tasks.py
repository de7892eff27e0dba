"""Tasks: one JSON object per line with ``prompt``, ``label``, optional ``id`` and free fields."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_sao.config import ConfigError
from megatron_sao.data.trajectory import TEXT_LIMITS

MAX_DEPTH = 100  # of lists and objects within each other: pydantic, which writes a lease, ends at about 250


class TaskError(ConfigError):
    """A task file that cannot be used; the message names file and line."""


@dataclass(frozen=True)
class Task:
    id: str
    prompt: str | list[dict[str, Any]]  # text, or chat messages
    label: Any
    extra: dict[str, Any]  # every other field of the line


def load_tasks(path: str | Path) -> list[Task]:
    """All tasks of a JSONL file, in file order; blank lines are skipped.

    A task without ``id`` gets a hash of its content, so an id does not depend on the line it stands on. A worker gets
    every task as it is here.

    Raises:
        TaskError: unreadable or empty file, malformed line, two tasks with one id.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise TaskError(f"cannot read the tasks in {path}: {error}") from error
    tasks: list[Task] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        task = _parse(line, f"{path}:{number}")
        if task.id in seen:
            raise TaskError(
                f"{path}:{number}: the id {task.id!r} is also on line {seen[task.id]}; "
                "give each task its own id, or remove the repeated line"
            )
        seen[task.id] = number
        tasks.append(task)
    if not tasks:
        raise TaskError(f"{path} holds no task; write one JSON object per line")
    return tasks


def epoch_order(num_tasks: int, seed: int, epoch: int) -> np.ndarray:
    """The order of one epoch: int64 [num_tasks], a permutation that depends on (seed, epoch) alone."""
    return np.random.default_rng([seed % 2**63, epoch]).permutation(num_tasks)


def _parse(line: bytes, where: str) -> Task:
    try:
        record = json.loads(line)
        # Few lines have so many brackets, and only those are walked.
        too_deep = line.count(b"[") + line.count(b"{") > MAX_DEPTH and _depth(record) > MAX_DEPTH
    except ValueError as error:
        raise TaskError(f"{where}: not valid JSON in UTF-8: {error}") from None
    except RecursionError:
        too_deep = True
    if too_deep:
        raise TaskError(
            f"{where}: more than {MAX_DEPTH} lists and objects lie within each other; flatten them, or write what they "
            "hold as text"
        )
    if not isinstance(record, dict):
        raise TaskError(f"{where}: expected a JSON object, found {type(record).__name__}")
    content = _content(record, where)
    prompt = record.pop("prompt", None)
    messages = isinstance(prompt, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in prompt
    )
    if not prompt or not (isinstance(prompt, str) or messages):
        raise TaskError(f"{where}: 'prompt' must be text or a list of chat messages with a 'role', found {prompt!r}")
    task_id = record.pop("id", None)
    if task_id is None:
        task_id = hashlib.sha256(content).hexdigest()[:16]
    elif isinstance(task_id, bool) or not isinstance(task_id, (str, int)) or task_id == "":
        raise TaskError(f"{where}: 'id' must be text or an integer, found {task_id!r}")
    task_id = str(task_id)
    if len(task_id) > TEXT_LIMITS["task_id"]:
        raise TaskError(
            f"{where}: 'id' has {len(task_id)} characters, and the limit is {TEXT_LIMITS['task_id']}; shorten it, or "
            "leave it out"
        )
    return Task(id=task_id, prompt=prompt, label=record.pop("label", None), extra=record)


def _content(record: dict[str, Any], where: str) -> bytes:
    """The record as JSON, whatever the order of its keys. Raises TaskError for what Python's JSON takes and a lease
    cannot hold."""
    try:
        return json.dumps(record, sort_keys=True, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise TaskError(
            f"{where}: holds {half!r}, one half of a character without the other; write both, or remove it"
        ) from None
    except ValueError:
        raise TaskError(
            f"{where}: holds NaN, an infinity or a number too large for a float, which a worker would get as null; "
            "write null, or text"
        ) from None


def _depth(value: Any) -> int:
    """How many lists and objects lie within each other. Raises RecursionError."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list):
        return 0
    return 1 + max(map(_depth, value), default=0)
