"""Live progress of a run, read from its metrics.jsonl: a refreshed block on a terminal, line by line elsewhere."""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from megatron_sao.config import RunConfig

LINE_SECONDS = 10.0  # between lines where there is no terminal
REFRESH_SECONDS = 0.5
WINDOW = 20  # steps that rates and shares are taken over


class Metrics:
    """What metrics.jsonl says so far. ``read`` may be called at any time, also while a line is being written."""

    def __init__(self, path: Path, totals: dict[str, int]) -> None:
        self.totals = totals  # stage -> steps
        self.stage: str | None = None
        self.step = 0
        self.latest: dict[str, float] = {}  # of the current stage
        self.last_time: float | None = None  # of the last event, seconds since the epoch
        self.evals: dict[tuple[str, int], float] = {}  # a later line for a step wins
        self.fallbacks: list[str] = []  # to an older checkpoint, since this object was made
        self._path = path
        self._offset = 0
        self._began = time.time()
        self._times: deque[float] = deque(maxlen=WINDOW + 1)  # seconds since the epoch of the stage's last steps
        self._shares: deque[dict[str, float]] = deque(maxlen=WINDOW)

    def read(self) -> bool:
        """Take in complete new lines; whether there were any."""
        if not self._path.is_file():
            return False
        with self._path.open("rb") as file:
            file.seek(self._offset)
            lines = file.read().split(b"\n")[:-1]
        for line in lines:
            self._offset += len(line) + 1
            try:
                event = json.loads(line)
            except ValueError:
                continue  # a line that a killed trainer did not finish
            self._take(event)
        return bool(lines)

    def _take(self, event: dict[str, Any]) -> None:
        if event["stage"] != self.stage:
            self.stage, self.latest = event["stage"], {}
            self._times.clear()
            self._shares.clear()
        trained = any(name.startswith("train/") for name in event)
        self.last_time = event["time"]
        self.step = event["step"] + trained  # steps done: training names the step it did, an evaluation the next one
        self.latest.update({name: value for name, value in event.items() if isinstance(value, (int, float))})
        if "eval/success_rate" in event:
            self.evals[event["stage"], event["step"]] = event["eval/success_rate"]
        if "checkpoint/fallback_reason" in event and event["time"] >= self._began:
            self.fallbacks.append(event["checkpoint/fallback_reason"])
        if trained:
            self._times.append(event["time"])
            parts = {name[5:]: event[name] for name in event if name.startswith("time/")}
            parts.pop("step", None)  # their sum
            self._shares.append(parts)

    @property
    def resuming(self) -> bool:
        """Whether all there is was written before this object was made."""
        return self.last_time is not None and self.last_time < self._began

    @property
    def pace(self) -> float | None:
        """Recent seconds per step (the median, so that a restart's gap does not count)."""
        times = list(self._times)
        return statistics.median(b - a for a, b in itertools.pairwise(times)) if len(times) > 1 else None

    def eta(self) -> float | None:
        """Seconds to the end of the stage at the recent pace."""
        pace = self.pace
        return None if pace is None else max(0, self.totals.get(self.stage, 0) - self.step) * pace

    def time_shares(self) -> list[tuple[str, float]]:
        """(part of the step, its share of the recent steps' time), largest first."""
        names = {name for shares in self._shares for name in shares}
        seconds = {name: sum(shares.get(name, 0.0) for shares in self._shares) for name in names}
        total = sum(seconds.values())
        return sorted(((name, value / total) for name, value in seconds.items() if total), key=lambda item: -item[1])

    def describe(self) -> str:
        """The state in one line."""
        if self.stage is None:
            return "starting"
        parts = [f"{self.stage} {self.step}/{self.totals.get(self.stage, '?')}"]
        for name, label, form in (
            ("train/success_rate", "success", ".3f"),
            ("train/reward_mean", "reward", ".3f"),
            ("train/sft_loss", "loss", ".4f"),
            ("staleness/max", "staleness", ".0f"),
            ("tokens_per_second", "tok/s", ",.0f"),
        ):
            if name in self.latest:
                parts.append(f"{label} {self.latest[name]:{form}}")
        if self.evals:
            (stage, step), rate = list(self.evals.items())[-1]
            parts.append(f"held-out {rate:.3f} at {stage} {step}")
        if shares := self.time_shares():
            parts.append("time " + " ".join(f"{name} {share:.0%}" for name, share in shares[:5]))
        if (eta := self.eta()) is not None:
            parts.append(f"ETA {clock(eta)}")
        return " | ".join(parts)


class Progress:
    """Shows :class:`Metrics`. Draws only when ``update`` is called: a drawing thread would be a second thread to fork
    beside (see ``launch.process.die_with_parent``)."""

    def __init__(self, config: RunConfig, run_dir: Path) -> None:
        totals = {"sft": config.sft.steps, "value": config.value.steps, "rl": config.rl.steps}
        self.metrics = Metrics(run_dir / "metrics.jsonl", totals)
        self._run_dir = run_dir
        self._began = time.monotonic()
        self._shown = -LINE_SECONDS
        console = Console()
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        if self._live:
            self._live.start()

    def update(self) -> None:
        """Read what is new and show it, at most every so often."""
        now = time.monotonic()
        if now - self._shown < (REFRESH_SECONDS if self._live else LINE_SECONDS):
            return
        self._shown = now
        self.metrics.read()
        while self.metrics.fallbacks:
            self.note(f"megatron-sao: {self.metrics.fallbacks.pop(0)}")
        before = "starting again; until now: " if self.metrics.resuming else ""
        line = f"[{clock(now - self._began)}] {before}{self.metrics.describe()}"
        if self._live:
            total = self.metrics.totals.get(self.metrics.stage, 0)
            bar = ProgressBar(total=max(total, 1), completed=self.metrics.step, width=60)
            self._live.update(Group(bar, Text(line)), refresh=True)
        else:
            print(line, flush=True)

    def note(self, message: str) -> None:
        """Show a message that stays."""
        if self._live and self._live.is_started:
            self._live.console.print(message, markup=False, highlight=False)
        else:
            print(message, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the terminal as it was; ``note`` and ``summary`` may still be used."""
        if self._live:
            self._live.stop()

    def summary(self, restarts: dict[str, int]) -> str:
        """What a finished run came to: its duration, restarts per process, and the held-out success over the steps."""
        self.metrics.read()
        again = ", ".join(f"{name} {count}" for name, count in restarts.items() if count) or "none"
        lines = [f"finished in {clock(time.monotonic() - self._began)}; restarts: {again}; see {self._run_dir}"]
        if self.metrics.evals:
            lines.append("held-out success:")
        for (stage, step), rate in self.metrics.evals.items():
            lines.append(f"  {stage:5} {step:6}  {rate:.3f}  {'#' * round(50 * rate)}")
        return "\n".join(lines)


def clock(seconds: float) -> str:
    """1:02:03, or 2:03 under an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
