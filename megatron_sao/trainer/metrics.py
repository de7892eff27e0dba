"""metrics.jsonl and TensorBoard: one event per line, full float precision, append-only."""

from __future__ import annotations

import json
import time
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter


class MetricsWriter:
    """Writes on rank 0; on other ranks give ``run_dir=None`` and every call does nothing.

    A resumed run appends: for a repeated (stage, step) the later line wins.
    """

    def __init__(self, run_dir: Path | None) -> None:
        self._file = None
        if run_dir is not None:
            run_dir.mkdir(parents=True, exist_ok=True)
            self._file = (run_dir / "metrics.jsonl").open("a", buffering=1)
            self._board = SummaryWriter(str(run_dir / "tensorboard"))

    def write(self, stage: str, step: int, metrics: dict[str, float | int | str]) -> None:
        if self._file is None:
            return
        self._file.write(json.dumps({"time": time.time(), "stage": stage, "step": step} | metrics) + "\n")
        for name, value in metrics.items():
            if not isinstance(value, str):
                self._board.add_scalar(f"{stage}/{name}", value, step)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._board.close()


class Stopwatch:
    """Seconds per phase of a step, under the names ``time/<phase>``."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Attribute the time since the last lap to ``phase``."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now

    @property
    def total(self) -> float:
        return time.perf_counter() - self._start

    def metrics(self) -> dict[str, float]:
        total = self.total
        phases = {f"time/{phase}": seconds for phase, seconds in self.seconds.items()}
        return phases | {"time/step": total, "idle_fraction": self.seconds.get("wait", 0.0) / total}
