"""``megatron-sao status``: where a run stands, from its files and its buffer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_sao.buffer.client import BufferClient, BufferError, BufferUnavailable
from megatron_sao.launch.local import is_complete, is_owned
from megatron_sao.launch.progress import Metrics, clock
from megatron_sao.report.run_files import RunFiles

_LINE = "{:12}{}"
_DROPPED = (
    "dropped_stale",
    "dropped_incomplete_group",
    "trajectories_failed",
    "train_visits_set_aside",
    "leases_expired",
)
_FIGURES = {
    "learning": {
        "train/success_rate": "success",
        "train/reward_mean": "reward",
        "train/sft_loss": "loss",
        "train/explained_variance": "explained variance",
        "train/entropy": "entropy",
    },
    "off policy": {
        "dis/accepted_fraction": "accepted",
        "lag/own_abs_logprob_diff": "engine mismatch",
        "lag/older_abs_logprob_diff": "policy moved",
    },
    "staleness": {"staleness/mean": "mean", "staleness/max": "max"},
}
_SHARES = 6  # parts of the step that are named


def main(run_dir: Path, watch: float | None) -> int:
    """Print the status once, or again and again every ``watch`` seconds until interrupted. Returns the exit code."""
    files = RunFiles(run_dir)
    files.events()  # raises ConfigError for what `metrics` would not understand
    metrics = Metrics(run_dir / "metrics.jsonl", files.steps)
    try:
        while True:
            text = "\n".join(status_lines(files, metrics))
            print(text if watch is None else f"\x1b[H\x1b[J{text}", flush=True)
            if watch is None:
                return 0
            time.sleep(watch)
    except KeyboardInterrupt:
        return 0


def status_lines(files: RunFiles, metrics: Metrics) -> Iterator[str]:
    """The status, line by line. ``metrics`` reads the run's metrics.jsonl and may have read some of it before."""
    metrics.read()
    buffer = files.buffer()
    yield _LINE.format("run", f"{files.name} in {files.path}")
    yield _LINE.format("state", _state(files, metrics, buffer))
    yield from _training(metrics)
    if buffer is not None:
        try:
            yield from _buffer(buffer)
        except (BufferError, BufferUnavailable) as error:
            yield _LINE.format("buffer", str(error))
        buffer.close()
    names, latest = files.checkpoints()
    yield _LINE.format(
        "checkpoints", f"{' '.join(names) or 'none yet'}" + (f"; resumes from {latest}" if latest else "")
    )
    errors = files.last_errors()
    yield _LINE.format("last errors", "none in the logs" if not errors else "")
    for error in errors:
        yield f"  {error:.300}"


def _state(files: RunFiles, metrics: Metrics, buffer: BufferClient | None) -> str:
    if buffer is not None:
        state = f"running, buffer at {buffer.url}"
    elif files.config and is_complete(files.config, files.path):
        state = f"complete, its policy is in {files.path / 'hf'}"
    else:
        state = "no buffer answers: "
        state += "its launcher starts or ends it" if is_owned(files.path) else "stopped, or a trainer alone"
    return state + (f"; last event {clock(time.time() - metrics.last_time)} ago" if metrics.last_time else "")


def _training(metrics: Metrics) -> Iterator[str]:
    if metrics.stage is None:
        yield _LINE.format("step", "no step is done yet")
        return
    eta = metrics.eta()
    total = metrics.totals.get(metrics.stage, "?")
    left = f", {clock(eta)} left at this pace" if eta else ""
    yield _LINE.format("step", f"{metrics.stage} {metrics.step} of {total}{left}")
    if metrics.pace is not None:
        rates = [f"{metrics.pace:.3g} s per step", *_figures(metrics.latest, {"tokens_per_second": "tokens/s"})]
        yield _LINE.format("rate", ", ".join(rates))
    if shares := metrics.time_shares():
        yield _LINE.format("time", ", ".join(f"{name} {share:.0%}" for name, share in shares[:_SHARES]))
    for title, names in _FIGURES.items():
        if figures := _figures(metrics.latest, names):
            yield _LINE.format(title, ", ".join(figures))
    if metrics.evals:
        last = list(metrics.evals.items())[-5:]
        yield _LINE.format("held-out", ", ".join(f"{rate:.3f} at {stage} {step}" for (stage, step), rate in last))


def _figures(latest: dict[str, float], names: dict[str, str]) -> list[str]:
    return [f"{label} {latest[name]:,.4g}" for name, label in names.items() if name in latest]


def _buffer(buffer: BufferClient) -> Iterator[str]:
    stats: dict[str, Any] = buffer.stats()
    for engine in buffer.engines():
        described = (
            f"{engine.state}, weights {engine.version or 'none yet'}, heartbeat {engine.heartbeat_age:.0f} s ago"
        )
        yield _LINE.format("engine", f"{engine.id} at {engine.url}: {described}")
    if not any(stats[f"engines_{state}"] for state in ("clean", "dirty", "down")):
        yield _LINE.format("engine", "none has registered")
    yield _LINE.format(
        "queue",
        f"{stats['trajectories_stored']} trajectories wait for training, {stats['visits_leased']} episodes are played, "
        f"{stats['outstanding']} of {stats['outstanding_limit']} outstanding, {stats['stored_bytes'] / 1e6:.1f} MB",
    )
    lost = [f"{name} {stats[name]}" for name in _DROPPED if stats[name]]
    yield _LINE.format("lost", ", ".join(lost) or "nothing")
