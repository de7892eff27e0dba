"""metrics.jsonl and TensorBoard: one event per line, full float precision, append-only; and whoever else is told."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from megatron_sao.config import RunConfig
from megatron_sao.trainer.exporters import PrometheusEndpoint, WandbRun

log = logging.getLogger(__name__)

_IN_THE_LOG = (  # of each event, what there is
    "eval/success_rate", "train/success_rate", "train/reward_mean", "train/sft_loss", "train/value_loss",
    "dis/accepted_fraction", "staleness/max", "tokens_per_second", "time/step",
)  # fmt: skip


class MetricsWriter:
    """Writes on rank 0; on other ranks give ``run_dir=None`` and every call does nothing.

    A resumed run appends: for a repeated (stage, step) the later line wins.
    """

    def __init__(self, run_dir: Path | None, config: RunConfig) -> None:
        self._file = None
        if run_dir is None:
            return
        run_dir.mkdir(parents=True, exist_ok=True)
        self._exporters: list[PrometheusEndpoint | WandbRun] = []
        if config.logging.prometheus_port is not None:
            self._exporters.append(PrometheusEndpoint(config.name, config.logging))
            log.info("Prometheus metrics are at port %d, /metrics", self._exporters[-1].port)
        if config.logging.wandb_project is not None:
            self._exporters.append(WandbRun(config, run_dir))
        self._file = (run_dir / "metrics.jsonl").open("a", buffering=1)
        self._board = SummaryWriter(str(run_dir / "tensorboard"))

    def write(self, stage: str, step: int, metrics: dict[str, float | int | str]) -> None:
        if self._file is None:
            return
        self._file.write(json.dumps({"time": time.time(), "stage": stage, "step": step} | metrics) + "\n")
        numbers = {name: value for name, value in metrics.items() if not isinstance(value, str)}
        for name, value in numbers.items():
            self._board.add_scalar(f"{stage}/{name}", value, step)
        for exporter in self._exporters:
            exporter.write(stage, step, numbers)
        log.info(" ".join(f"{name}={metrics[name]:.4g}" for name in _IN_THE_LOG if name in metrics))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._board.close()
            for exporter in self._exporters:
                exporter.close()


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
