"""Logs: one line per event, with the time, the level, who says it and where in the run; never a secret."""

from __future__ import annotations

import logging
import os

SECRETS = ("MEGATRON_SAO_TOKEN", "WANDB_API_KEY")  # environment variables whose values no log line contains
_NOISY = ("megatron", "httpx")

_position = ""


def start_logging(who: str, level: int = logging.INFO) -> None:
    """Send this process's log to stderr.

    Args:
        who: e.g. ``rank 0`` or ``worker-1``; it is in every line.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter(who))
    logging.basicConfig(level=level, handlers=[handler])
    for noisy in _NOISY:
        logging.getLogger(noisy).setLevel(logging.WARNING)


def at_step(stage: str, step: int) -> None:
    """Name the training step in every following line of this process."""
    global _position
    _position = f" {stage}-{step}"


class Seldom(logging.Filter):
    """Of what would be logged again and again, one record in ``seconds``."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds
        self._next = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.created < self._next:
            return False
        self._next = record.created + self._seconds
        return True


class LineFormatter(logging.Formatter):
    """``2026-01-02 03:04:05,678 WARNING rank 0 rl-12: message``; a line break inside becomes ``\\n``."""

    def __init__(self, who: str) -> None:
        super().__init__("%(message)s")
        self._who = who

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)  # with the traceback, if there is one
        for name in SECRETS:
            if secret := os.environ.get(name):
                text = text.replace(secret, f"<{name}>")
        text = text.replace("\n", "\\n")
        return f"{self.formatTime(record)} {record.levelname} {self._who}{_position}: {text}"
