"""Table and plots of the study's runs, finished or not:

    python tools/study/report.py [TASK ...] [--only METHOD ...] [--name NAME] [--out DIR] [--docs DIR]

Prints the table as Markdown, for docs/study.md, and writes docs/study-NAME.png and, so that the curves outlive the run
directories, docs/study-NAME.json. NAME is the task's unless given.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
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
SMOOTHING = 20  # steps that a plotted training curve is averaged over
CURVE_STEPS = 25  # the same of a recorded one

Events = list[dict[str, Any]]


def read_runs(out: Path, task: str) -> dict[str, dict[int, Events]]:
    """The events of every run that has begun, by method and seed."""
    runs: dict[str, dict[int, Events]] = defaultdict(dict)
    for path in sorted((out / task).glob("*/metrics.jsonl")):
        latest = {}  # a resumed run repeats steps; the later line wins
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):  # the last line of a run that is being written
                event = json.loads(line)
                if event["stage"] == "rl":
                    latest[event["step"], "eval/success_rate" in event] = event
        method, _, seed = path.parent.name.rpartition("-")
        runs[method][int(seed)] = [latest[key] for key in sorted(latest)]
    return {method: dict(sorted(seeds.items())) for method, seeds in runs.items()}


def series(events: Events, metric: str, smoothing: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of a metric, wherever it was logged; each value the mean of the last ``smoothing``."""
    if metric == "masked":
        metric = "ppo/clip_fraction" if any("ppo/clip_fraction" in event for event in events) else "rejected"
    points = []
    for event in events:
        value = 1 - event.get("dis/accepted_fraction", np.nan) if metric == "rejected" else event.get(metric, np.nan)
        if not np.isnan(value):
            points.append((event["step"], value))
    steps, values = (np.array(column) for column in zip(*points, strict=True)) if points else (np.array([]),) * 2
    if len(values) > smoothing > 1:
        values = np.convolve(values, np.ones(smoothing) / smoothing, mode="valid")
        steps = steps[smoothing - 1 :]
    return steps, values


def table(runs: dict[str, dict[int, Events]]) -> str:
    """One row per run: collapse shows in the minimum over the evaluations after the first hundred steps."""
    rows = ["| method | seed | steps | start | best | minimum after step 100 | last | largest entropy | masked |"]
    rows.append("|---|---|---|---|---|---|---|---|---|")
    for method, seeds in runs.items():
        for seed, events in seeds.items():
            steps, success = series(events, "eval/success_rate")
            entropy, masked = series(events, "train/entropy")[1], series(events, "masked")[1]
            if not len(steps) or not len(entropy):
                continue
            late = success[steps > 100]
            low = f"{late.min():.3f}" if len(late) else "–"
            rows.append(
                f"| {method} | {seed} | {int(steps[-1])} | {success[0]:.3f} | {success.max():.3f} | {low} "
                f"| {success[-1]:.3f} | {entropy.max():.3f} | {masked.mean():.4f} |"
            )
    return "\n".join(rows)


def curves(runs: dict[str, dict[int, Events]]) -> dict[str, dict[str, Any]]:
    """What is plotted, by run and panel: steps and values; a training curve as its means over CURVE_STEPS steps."""
    record: dict[str, dict[str, Any]] = {}
    for method, seeds in runs.items():
        for seed, events in seeds.items():
            panels = record[f"{method}-{seed}"] = {}
            for title, metric in PANELS.items():
                steps, values = series(events, metric)
                if metric != "eval/success_rate":
                    windows = np.arange(CURVE_STEPS, len(values) + 1, CURVE_STEPS)
                    values = np.array([values[end - CURVE_STEPS : end].mean() for end in windows])
                    steps = steps[windows - 1] if len(windows) else steps[:0]
                panels[title] = {"steps": steps.tolist(), "values": [float(f"{value:.4g}") for value in values]}
    return record


def plot(runs: dict[str, dict[int, Events]], path: Path) -> None:
    figure, axes = plt.subplots(2, 3, figsize=(15, 8))
    for axis, (title, metric) in zip(axes.flat, PANELS.items(), strict=True):
        for number, (method, seeds) in enumerate(runs.items()):
            for index, events in enumerate(seeds.values()):
                label = method if index == 0 else None
                smoothing = 1 if metric == "eval/success_rate" else SMOOTHING
                axis.plot(
                    *series(events, metric, smoothing), color=f"C{number % 10}", label=label, linewidth=1, alpha=0.8
                )
        axis.set_title(title)
        axis.set_xlabel("policy step")
        if "gradient" in title:
            axis.set_yscale("log")
    axes[0, 0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/study"))
    parser.add_argument("--docs", type=Path, default=Path("docs"))
    parser.add_argument("--only", nargs="*", help="methods, in this order; default: all")
    parser.add_argument("--name", help="of the plot and the record; default: the task's")
    parser.add_argument("tasks", nargs="*")
    options = parser.parse_args()
    tasks = options.tasks or sorted(p.name for p in options.out.iterdir() if p.is_dir() and p.name != "cold_start")
    if options.name and len(tasks) != 1:
        parser.error(f"--name {options.name} is for one task, but there are {len(tasks)}: name the task")
    for task in tasks:
        runs = read_runs(options.out, task)
        if options.only:
            runs = {method: runs[method] for method in options.only if method in runs}
        name = options.name or task
        print(f"\n### {name}\n\n{table(runs)}")
        plot(runs, options.docs / f"study-{name}.png")
        record = {run: json.dumps(panels) for run, panels in curves(runs).items()}
        lines = ",\n".join(f"{json.dumps(run)}: {panels}" for run, panels in record.items())
        (options.docs / f"study-{name}.json").write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
