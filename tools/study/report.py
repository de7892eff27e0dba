"""Table and plots of the study's finished runs: `python tools/study/report.py [--out runs/study] [--docs docs]`.

Prints the table as Markdown, for docs/study.md, and writes docs/study-TASK.svg.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np

PANELS = {
    "held-out success": "eval/success_rate",
    "entropy (nats per token)": "train/entropy",
    "policy gradient norm": "train/policy_grad_norm",
    "critic gradient norm": "train/critic_grad_norm",
    "rejected (DIS) or clipped (PPO) fraction": "masked",
    "explained variance of the critic": "train/explained_variance",
}
SMOOTHING = 20  # steps that a training curve is averaged over

Events = list[dict[str, Any]]


def read_runs(out: Path, task: str) -> dict[str, list[Events]]:
    """The events of every run that has begun, by method."""
    runs: dict[str, list[Events]] = defaultdict(list)
    for path in sorted((out / task).glob("*/metrics.jsonl")):
        latest = {}  # a resumed run repeats steps; the later line wins
        for line in path.read_text().splitlines():
            event = json.loads(line)
            if event["stage"] == "rl":
                latest[event["step"], "eval/success_rate" in event] = event
        runs[path.parent.name.rpartition("-")[0]].append([latest[key] for key in sorted(latest)])
    return runs


def series(events: Events, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of a metric, wherever it was logged."""
    if metric == "masked":
        metric = "ppo/clip_fraction" if any("ppo/clip_fraction" in event for event in events) else "rejected"
    points = []
    for event in events:
        value = 1 - event.get("dis/accepted_fraction", np.nan) if metric == "rejected" else event.get(metric, np.nan)
        if not np.isnan(value):
            points.append((event["step"], value))
    steps, values = (np.array(column) for column in zip(*points, strict=True)) if points else (np.array([]),) * 2
    if metric != "eval/success_rate" and len(values) > SMOOTHING:
        values = np.convolve(values, np.ones(SMOOTHING) / SMOOTHING, mode="valid")
        steps = steps[SMOOTHING - 1 :]
    return steps, values


def table(runs: dict[str, list[Events]]) -> str:
    """One row per run: collapse shows in the minimum over the evaluations after the first hundred steps."""
    rows = ["| method | seed | steps | start | best | minimum after step 100 | last | max entropy | masked |"]
    rows.append("|---|---|---|---|---|---|---|---|---|")
    for method, seeds in runs.items():
        for seed, events in enumerate(seeds):
            steps, success = series(events, "eval/success_rate")
            if not len(steps):
                continue
            late = success[steps >= 100]
            low = f"{late.min():.3f}" if len(late) else "–"
            entropy, masked = series(events, "train/entropy")[1], series(events, "masked")[1]
            rows.append(
                f"| {method} | {seed} | {int(steps[-1])} | {success[0]:.3f} | {success.max():.3f} | {low} "
                f"| {success[-1]:.3f} | {entropy.max():.3f} | {masked.mean():.4f} |"
            )
    return "\n".join(rows)


def plot(runs: dict[str, list[Events]], path: Path) -> None:
    figure, axes = plt.subplots(2, 3, figsize=(15, 8))
    for axis, (title, metric) in zip(axes.flat, PANELS.items(), strict=True):
        for number, (method, seeds) in enumerate(runs.items()):
            for seed, events in enumerate(seeds):
                label = method if seed == 0 else None
                axis.plot(*series(events, metric), color=f"C{number % 10}", label=label, linewidth=1, alpha=0.8)
        axis.set_title(title)
        axis.set_xlabel("policy step")
        if "gradient" in title:
            axis.set_yscale("log")
    axes[0, 0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/study"))
    parser.add_argument("--docs", type=Path, default=Path("docs"))
    parser.add_argument("tasks", nargs="*")
    options = parser.parse_args()
    tasks = options.tasks or sorted(p.name for p in options.out.iterdir() if p.is_dir() and p.name != "cold_start")
    for task in tasks:
        runs = read_runs(options.out, task)
        print(f"\n### {task}\n\n{table(runs)}")
        plot(runs, options.docs / f"study-{task}.svg")


if __name__ == "__main__":
    main()
