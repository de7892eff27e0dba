"""``megatron-sao inspect``: what a run's buffer holds, in words, and exported as recorded batches."""

from __future__ import annotations

import itertools
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megatron_sao.buffer.archive import Archive
from megatron_sao.buffer.client import BufferClient, BufferError
from megatron_sao.buffer.database import StoreError
from megatron_sao.config import ConfigError
from megatron_sao.data.batches import STAGES, write_batch
from megatron_sao.data.trajectory import Trajectory
from megatron_sao.report.run_files import RunFiles
from megatron_sao.report.text import TokenText

NEWEST = 20  # trajectories in the overview


def main(run_dir: Path, trajectory: str | None, batch: str | None, export: Path | None) -> int:
    """Print one trajectory, one batch, or an overview; or export every batch. Returns the exit code.

    Args:
        trajectory: id.
        batch: STAGE-STEP, e.g. ``rl-12``.
        export: directory for ``megatron-sao train --batches``.

    Raises:
        ConfigError: no such run, trajectory or batch.
    """
    files = RunFiles(run_dir)
    archive: Archive | BufferClient | None = None
    try:
        archive = files.buffer() or Archive.open(run_dir / "buffer")
        if export is not None:
            lines = export_batches(archive, export, files)
        elif trajectory is not None:
            lines = describe_trajectory(archive.trajectory(trajectory), _text(files))
        elif batch is not None:
            lines = describe_batch(archive, *_parse_batch(batch))
        else:
            lines = describe_archive(archive)
        for line in lines:
            print(line)
    except (StoreError, BufferError) as error:
        raise ConfigError(str(error)) from error
    finally:
        if archive is not None:
            archive.close()
    return 0


def describe_archive(archive: Archive | BufferClient) -> Iterator[str]:
    """How much there is of what, and the newest trajectories."""
    rows = archive.index()
    counts = Counter((row["kind"], row["state"]) for row in rows)
    yield f"{len(rows)} trajectories: " + (
        ", ".join(f"{n} {kind} {state}" for (kind, state), n in counts.items()) or "–"
    )
    batches = archive.recorded_batches()
    yield f"{len(batches)} batches: {_ranges(batches)}"
    if rows:
        yield from _table(rows[-NEWEST:])
    reasons = Counter(row["reason"] for row in rows if row["reason"])
    for reason, count in reasons.most_common(5):
        yield f"{count} × {reason}"


def describe_batch(archive: Archive | BufferClient, stage: str, step: int) -> Iterator[str]:
    """The members of a batch, and its averages."""
    recorded = archive.recorded_batches()
    ids = next((entry["ids"] for entry in recorded if (entry["stage"], entry["step"]) == (stage, step)), None)
    if ids is None:
        raise ConfigError(f"--batch {stage}-{step} is not held; the buffer has {_ranges(recorded)}")
    trajectories = [archive.trajectory(id) for id in ids]
    rewards = [t.total_reward for t in trajectories]
    yield (
        f"batch {stage}-{step}: {len(ids)} trajectories, {sum(t.num_tokens for t in trajectories)} tokens, "
        f"{sum(t.num_action_tokens for t in trajectories)} of them actions; mean reward {np.mean(rewards):.4g}"
    )
    members = {row["id"]: row for row in archive.index()}
    yield from _table([members[id] for id in ids], {t.id: f"{t.total_reward:.4g}" for t in trajectories})


def describe_trajectory(trajectory: Trajectory, text: TokenText) -> Iterator[str]:
    """Everything about one trajectory, turn by turn."""
    t = trajectory
    yield f"trajectory  {t.id}, {t.kind}" + (f", group {t.group}" if t.group else "")
    yield f"task        {t.task_id}, epoch {t.epoch}, attempt {t.attempt}"
    ending = f"FAILED: {t.failure}" if t.failure else "ended by a limit" if t.truncated else "ended by itself"
    yield f"reward      {t.total_reward:.4g}, {ending}"
    yield f"tokens      {t.num_tokens}, {t.num_action_tokens} of them actions; sampling {t.sampling}"
    spans = [list(group) for _, group in itertools.groupby(t.versions, key=lambda span: span[0])]
    yield "weights     " + ", ".join(f"{span[0][0]} for tokens {span[0][1]}–{span[-1][2] - 1}" for span in spans)
    if t.metrics:
        yield "metrics     " + ", ".join(f"{name} {value:.4g}" for name, value in sorted(t.metrics.items()))
    for kind, start, end in t.turns:
        mask = t.loss_mask[start:end] == 1
        facts = [f"tokens {start}–{end - 1}"]
        if mask.any():
            facts.append(f"mean log-prob {t.logprobs[start:end][mask].mean():.4g}")
        if t.rewards[start:end].any():
            facts.append(f"reward {t.rewards[start:end].sum():.4g}")
        yield f"── {kind} ({', '.join(facts)})"
        yield text.text(t.token_ids[start:end].tolist())


def export_batches(archive: Archive | BufferClient, directory: Path, files: RunFiles) -> Iterator[str]:
    """Write every batch that is held, and say how to train on them."""
    recorded = archive.recorded_batches()
    if not recorded:
        raise ConfigError(f"--export-batches {directory}: the buffer of {files.path} holds no batch (yet, or any more)")
    for entry in recorded:
        write_batch(directory, entry["stage"], entry["step"], [archive.trajectory(id) for id in entry["ids"]])
    yield f"exported {_ranges(recorded)} to {directory}"
    start = starting_point(files.checkpoints()[0], recorded[0]["stage"], recorded[0]["step"])
    new = "NEW_RUN"
    if start is not None:
        yield f"to train on them from the checkpoint {start} on:"
        checkpoint = shlex.quote(str(files.path / "checkpoints" / start))
        yield f"  mkdir -p {new}/checkpoints && cp -r {checkpoint} {new}/checkpoints/"
        yield f"  echo {start} > {new}/checkpoints/latest"
    else:
        yield "to train on them from model.path on:"
    config, batches = shlex.quote(str(files.path / "config.yaml")), shlex.quote(str(directory))
    yield f"  megatron-sao train {config} --run-dir {new} --batches {batches}"


def starting_point(checkpoints: list[str], stage: str, step: int) -> str | None:
    """The newest checkpoint from which the batches from (stage, step) on can be trained on, else the oldest there is.

    Args:
        checkpoints: names, oldest first.
    """
    before = [name for name in checkpoints if _order(*_parse_batch(name)) <= _order(stage, step)]
    return before[-1] if before else next(iter(checkpoints), None)


def _order(stage: str, step: int) -> tuple[int, int]:
    return STAGES.index(stage), step


def _parse_batch(name: str) -> tuple[str, int]:
    stage, _, step = name.rpartition("-")
    if stage not in STAGES or not step.isdigit():
        raise ConfigError(f"{name!r} names no step; write it as STAGE-STEP, such as rl-12")
    return stage, int(step)


def _ranges(batches: list[dict[str, Any]]) -> str:
    parts = []
    for stage in STAGES:
        steps = [entry["step"] for entry in batches if entry["stage"] == stage]
        if steps:
            gaps = "" if len(steps) == max(steps) - min(steps) + 1 else f" ({len(steps)} of them)"
            parts.append(f"{stage} {min(steps)}–{max(steps)}{gaps}")
    return ", ".join(parts) or "no batch"


def _table(rows: list[dict[str, Any]], rewards: dict[str, str] | None = None) -> Iterator[str]:
    heads = ["id", "task", "epoch", "kind", "state", "step", "tokens", "actions", "weights"]
    cells = [
        [row["id"], row["task_id"], str(row["epoch"]), row["kind"], row["state"],
         f"{row['stage']}-{row['step']}" if row["stage"] else "", str(row["num_tokens"]),
         str(row["num_action_tokens"]), " ".join(row["versions"])]
        + ([rewards[row["id"]]] if rewards else [])
        for row in rows
    ]  # fmt: skip
    lines = [heads + (["reward"] if rewards else []), *cells]
    widths = [max(len(line[n]) for line in lines) for n in range(len(lines[0]))]
    for line in lines:
        yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()


def _text(files: RunFiles) -> TokenText:
    return TokenText(files.config.model.path if files.config else None)
