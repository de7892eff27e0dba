"""Tasks: one JSON object per line with ``prompt``, ``label``, optional ``id`` and free fields."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_sao.config import ConfigError


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

    A task without ``id`` gets a hash of its content, so an id does not depend on the line it stands on.

    Raises:
        TaskError: unreadable or empty file, malformed line, two tasks with one id.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
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


def _parse(line: str, where: str) -> Task:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise TaskError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(record, dict):
        raise TaskError(f"{where}: expected a JSON object, found {type(record).__name__}")
    content = json.dumps(record, sort_keys=True, ensure_ascii=False)
    prompt = record.pop("prompt", None)
    messages = isinstance(prompt, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in prompt
    )
    if not prompt or not (isinstance(prompt, str) or messages):
        raise TaskError(f"{where}: 'prompt' must be text or a list of chat messages with a 'role', found {prompt!r}")
    task_id = record.pop("id", None)
    if task_id is None:
        task_id = hashlib.sha256(content.encode()).hexdigest()[:16]
    elif isinstance(task_id, bool) or not isinstance(task_id, (str, int)) or task_id == "":
        raise TaskError(f"{where}: 'id' must be text or an integer, found {task_id!r}")
    return Task(id=str(task_id), prompt=prompt, label=record.pop("label", None), extra=record)
