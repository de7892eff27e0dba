"""A run directory as observers read it: its config, its metrics, its samples, its logs, and its buffer."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from megatron_sao.buffer.client import BufferClient
from megatron_sao.config import ConfigError, RunConfig, load_config
from megatron_sao.data.batches import STAGES

PROBE_SECONDS = 3.0  # that a buffer may take to say that it is there
# A request that a client gave up is none: SGLang calls it one whenever a worker stops.
_ERROR = re.compile(
    r"^(?!.*Request is disconnected from the client)"
    r".*\b(ERROR|CRITICAL|ALARM|[A-Za-z.]*(Error|Exception|Failed|Broken)\b:)"
)
_CHECKPOINT = re.compile(rf"({'|'.join(STAGES)})-\d+")
_LOG_TAIL = 200_000  # bytes of each log that are searched


class RunFiles:
    """Raises ConfigError where ``path`` holds no run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        saved = path / "config.yaml"
        if not saved.is_file() and not (path / "metrics.jsonl").is_file():
            raise ConfigError(f"{path} holds neither config.yaml nor metrics.jsonl; name the directory of a run")
        self.config: RunConfig | None = load_config(saved) if saved.is_file() else None  # a trainer alone writes none

    @property
    def name(self) -> str:
        return self.config.name if self.config else self.path.resolve().name

    @property
    def steps(self) -> dict[str, int]:
        """Stage -> its number of steps, as far as it is known."""
        return {stage: getattr(self.config, stage).steps for stage in STAGES} if self.config else {}

    def events(self) -> list[dict[str, Any]]:
        """metrics.jsonl in the order of training; of repeated (stage, step) the later line, training and evaluation
        apart.

        Raises:
            ConfigError: a line is no event of this version.
        """
        newest = {}
        for event in _json_lines(self.path / "metrics.jsonl", "stage"):
            # an evaluation of step n comes before training step n
            newest[STAGES.index(event["stage"]), event["step"], "eval/prompts" not in event] = event
        return [newest[key] for key in sorted(newest)]

    def samples(self) -> list[dict[str, Any]]:
        """samples.jsonl, newest step first; of repeated (step, id) the later line."""
        newest = {(sample["step"], sample["id"]): sample for sample in _json_lines(self.path / "samples.jsonl", "id")}
        return sorted(newest.values(), key=lambda sample: -sample["step"])

    def buffer(self) -> BufferClient | None:
        """A client of the run's buffer; None if none answers.

        Raises:
            ConfigError: one does, but its token is unknown here.
        """
        announced = self.path / "buffer.json"
        if not announced.is_file():
            return None
        try:
            url = json.loads(announced.read_text())["url"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{announced} names no buffer ({error!r}); remove it if none runs") from error
        try:
            alive = httpx.get(f"{url}/healthz", timeout=PROBE_SECONDS, trust_env=False).is_success
        except httpx.TransportError:
            return None
        token_file = self.path / "token"
        token = token_file.read_text() if token_file.is_file() else os.environ.get("MEGATRON_SAO_TOKEN")
        if token is None:
            raise ConfigError(
                f"the buffer at {url} serves this run, but {token_file} does not exist; set MEGATRON_SAO_TOKEN"
            )
        return BufferClient(url, token, timeout=30.0, give_up_after=0.0) if alive else None

    def checkpoints(self) -> tuple[list[str], str | None]:
        """Names of the complete ones, and the one that a resume starts from."""
        directory = self.path / "checkpoints"
        latest = directory / "latest"
        names = [meta.parent.name for meta in directory.glob("*/meta.json")]
        names = [name for name in names if _CHECKPOINT.fullmatch(name)]  # not what is still being written
        names.sort(key=lambda name: (STAGES.index(name.split("-")[0]), int(name.split("-")[1])))
        return names, latest.read_text().strip() if latest.is_file() else None

    def last_errors(self, count: int = 5) -> list[str]:
        """``<log>: <line>`` of the last lines that report an error, newest log last."""
        logs = sorted((self.path / "logs").glob("*.log"), key=lambda path: path.stat().st_mtime)
        return [f"{log.name}: {line.strip()}" for log in logs for line in _tail(log) if _ERROR.search(line)][-count:]


def _json_lines(path: Path, key: str) -> Iterator[dict[str, Any]]:
    """Objects with a step and ``key``."""
    if not path.is_file():
        return
    with path.open(errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # a line that a killed trainer did not finish, or is writing just now
            if (
                not isinstance(entry, dict)
                or not {"step", key} <= entry.keys()
                or entry.get("stage", "rl") not in STAGES
            ):
                raise ConfigError(f"{path}, line {number}, is of another version of this program: {line.strip():.100}")
            yield entry


def _tail(path: Path) -> list[str]:
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_TAIL))
        return file.read().decode(errors="replace").splitlines()
