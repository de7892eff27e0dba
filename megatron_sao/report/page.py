"""``megatron-sao report``: one HTML file with everything in it, from metrics.jsonl and samples.jsonl.

The page's data is JSON inside it; ``page.js`` draws. What is drawn is said here, chart by chart; a metric that no chart
names is drawn by itself at the end, so that none is left out.
"""

from __future__ import annotations

import html
import json
import math
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from megatron_sao.config import ConfigError
from megatron_sao.report.run_files import RunFiles
from megatron_sao.report.text import TokenText

MAX_POINTS = 600  # of a curve; a longer one is averaged
MAX_COLUMNS = 160  # of a heat map
MAX_SAMPLES = 400
_HERE = Path(__file__).parent
_EVENT_KEYS = {"time", "stage", "step"}
_OF_EVALUATIONS = ("eval/", "mismatch/", "time/eval", "time/mismatch")  # drawn as points, never smoothed
_OF_A_STEP = {"time/step", "idle_fraction"}  # evaluations have them too


class Chart(NamedTuple):
    """``kind``: line, log (line on a logarithmic axis), area (stacked) or heat. A name that ends with ``*`` stands for
    all that begin like it."""

    title: str
    names: tuple[str, ...]
    kind: str = "line"


SECTIONS: dict[str, tuple[Chart, ...]] = {
    "Reward and success": (
        Chart("Success rate, trained and held-out", ("train/success_rate", "eval/success_rate")),
        Chart("Reward per trajectory", ("train/reward_mean", "eval/reward_mean")),
    ),
    "Importance ratios and DIS": (
        Chart("Share of action tokens that DIS rejects", (
            "dis/below_fraction", "dis/above_fraction", "dis/nonfinite_fraction",
        )),
        Chart("Histogram of the importance ratio over time", ("dis/rho_bin_*",), "heat"),
        Chart("Accepted share and effective sample share", ("dis/accepted_fraction", "dis/effective_sample_fraction")),
        Chart("Importance ratio, mean and largest", ("dis/rho_mean", "dis/rho_max"), "log"),
        Chart("PPO's ratio", ("ppo/clip_fraction", "ppo/nonfinite_fraction", "ppo/ratio_mean")),
    ),
    "Staleness": (
        Chart("Versions between policy and oldest token", ("staleness/mean", "staleness/max", "version/spans_max")),
        Chart("Trajectories by staleness", ("staleness/count_*",), "area"),
        Chart("Share of trajectories over several versions", ("version/spanning_fraction",)),
        Chart("Lost trajectories since the run began", (
            "buffer/dropped_stale", "buffer/dropped_incomplete_group", "buffer/trajectories_failed",
            "buffer/leases_expired",
        )),
        Chart("Share of trajectories dropped as stale since the run began", ("buffer/dropped_stale_fraction",)),
    ),
    "Log-prob mismatch": (
        Chart("Trainer against engine, same weights", (
            "lag/own_abs_logprob_diff", "mismatch/mean_abs_logprob_diff", "mismatch/max_abs_logprob_diff",
        ), "log"),
        Chart("Older tokens: how far the policy has moved", ("lag/older_abs_logprob_diff",), "log"),
    ),
    "Critic": (
        Chart("Explained variance", ("train/explained_variance",)),
        Chart("Value loss", ("train/value_loss",), "log"),
    ),
    "Optimisation": (
        Chart("Gradient norms", ("train/policy_grad_norm", "train/critic_grad_norm"), "log"),
        Chart("Entropy and KL to the rollout policy", ("train/entropy", "train/kl")),
        Chart("Policy loss", ("train/policy_loss",)),
        Chart("Learning rates", ("train/policy_lr", "train/critic_lr")),
        Chart("Supervised loss", ("train/sft_loss",), "log"),
        Chart("Expert load against an even share", ("moe/load_max", "moe/load_min")),
    ),
    "Lengths and turns": (
        Chart("Tokens per trajectory", ("train/length_mean",)),
        Chart("Turns per trajectory", ("train/turns_mean", "eval/turns_mean")),
        Chart("Share ended by a limit", ("train/truncated_fraction",)),
    ),
    "Throughput": (
        Chart("Seconds of a step by phase", (
            "time/wait", "time/values", "time/critic", "time/policy", "time/push",
        ), "area"),
        Chart("Seconds of an evaluation", ("time/eval", "time/mismatch")),
        Chart("Tokens per second", ("tokens_per_second",)),
        Chart("Share of the step spent waiting for data", ("idle_fraction",)),
        Chart("Batch: tokens and action tokens", ("train/tokens", "train/action_tokens")),
    ),
}  # fmt: skip


def main(run_dir: Path, out: Path | None) -> int:
    """Write the report to ``out``, by default ``<run_dir>/report.html``. Returns the exit code.

    Raises:
        ConfigError: no run, no metrics yet, or files of another version; or ``out`` cannot be written.
    """
    out, text = out or run_dir / "report.html", render(RunFiles(run_dir))
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written: {error.strerror}; name a file in a directory") from error
    print(f"wrote {out} ({out.stat().st_size / 1e6:.1f} MB); open it in a browser")
    return 0


def render(files: RunFiles) -> str:
    """The whole page."""
    data = json.dumps(payload(files), separators=(",", ":"), allow_nan=False)
    page = (_HERE / "page.html").read_text()
    for mark, text in (
        ("TITLE", html.escape(files.name)),
        ("STYLE", (_HERE / "page.css").read_text()),
        ("SCRIPT", (_HERE / "page.js").read_text()),
        ("DATA", data.replace("<", "\\u003c")),  # nothing in it can end the script element
    ):
        page = page.replace(f"<!--{mark}-->", text)
    return page


def payload(files: RunFiles) -> dict[str, Any]:
    """What the page shows: ``run`` (facts), ``sections`` of charts with their curves, and ``samples``."""
    curves = _curves(files.events())
    if not curves:
        raise ConfigError(f"{files.path} holds no metrics yet; `megatron-sao status` says how far the run is")
    text = TokenText(files.config.model.path if files.config else None)
    algorithm = files.config.algorithm if files.config else None
    return {
        "run": {"name": files.name, "facts": list(_facts(files, curves))},
        "sections": [
            {"title": f"{title} · {stage}" if stage != "rl" else title, "charts": charts}
            for stage in ("rl", "value", "sft")
            for title, charts in _sections(stage, curves)
        ],
        "band": [1 - algorithm.eps_low, 1 + algorithm.eps_high] if algorithm else None,
        "samples": [_sample(sample, text) for sample in files.samples()[:MAX_SAMPLES]],
    }


Curve = list[tuple[int, float | None]]  # (step, value or None where it is not finite)
Curves = dict[tuple[str, str], Curve]  # by (stage, name)


def _curves(events: Iterable[dict[str, Any]]) -> Curves:
    curves: Curves = {}
    for event in events:
        not_drawn = _EVENT_KEYS | (_OF_A_STEP if "eval/prompts" in event else set())
        for name, value in event.items():
            if name not in not_drawn and isinstance(value, (int, float)):
                finite = value if math.isfinite(value) else None
                curves.setdefault((event["stage"], name), []).append((event["step"], finite))
    return curves


def _sections(stage: str, curves: Curves) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The charts of a stage for which there is data, then whatever none of them has drawn."""
    names = [name for of, name in curves if of == stage]
    drawn = set()
    for title, charts in SECTIONS.items():
        filled = []
        for chart in charts:
            members = [name for wanted in chart.names for name in _matching(wanted, names)]
            drawn.update(members)
            if members:
                filled.append(_chart(stage, chart, members, curves))
        if filled:
            yield title, filled
    if rest := sorted(set(names) - drawn - {"time/step", "progress/steps"}):
        yield "Everything else", [_chart(stage, Chart(name, (name,)), [name], curves) for name in rest]


def _matching(wanted: str, names: list[str]) -> list[str]:
    if not wanted.endswith("*"):
        return [wanted] if wanted in names else []
    found = [name for name in names if name.startswith(wanted[:-1])]
    return sorted(found, key=lambda name: float(name.removeprefix(wanted[:-1])))


def _chart(stage: str, chart: Chart, members: list[str], curves: Curves) -> dict[str, Any]:
    if chart.kind in ("area", "heat"):  # all members over the same steps; one that is absent in a step is 0 there
        steps = sorted({step for name in members for step, _ in curves[stage, name]})
        series = []
        for name in members:
            known = dict(curves[stage, name])
            series.append((name, [(step, known.get(step, 0.0)) for step in steps]))
    else:
        series = [(name, curves[stage, name]) for name in members]
    points = MAX_COLUMNS if chart.kind == "heat" else MAX_POINTS
    return {
        "title": chart.title,
        "kind": chart.kind,
        "series": [_series(name, curve, points) for name, curve in series],
    }


def _series(name: str, curve: Curve, points: int) -> dict[str, Any]:
    steps, values = _thinned(curve, points)
    return {"name": name, "x": steps, "y": values, "eval": name.startswith(_OF_EVALUATIONS)}


def _thinned(curve: Curve, points: int) -> tuple[list[int], list[float | None]]:
    """Steps and values with five digits, averaged over equal stretches where there are more than ``points``."""
    width = -(-len(curve) // points)
    stretches = [curve[i : i + width] for i in range(0, len(curve), width)]
    steps = [stretch[len(stretch) // 2][0] for stretch in stretches]
    return steps, [_mean([value for _, value in stretch]) for stretch in stretches]


def _mean(values: list[float | None]) -> float | None:
    finite = [value for value in values if value is not None]
    return float(f"{sum(finite) / len(finite):.5g}") if finite else None


def _facts(files: RunFiles, curves: Curves) -> Iterator[tuple[str, str]]:
    """What a reader wants first."""
    for stage, total in files.steps.items():
        if curve := curves.get((stage, "time/step")):
            yield f"{stage} steps", f"{curve[-1][0] + 1} of {total}"
    evaluations = [point for point in curves.get(("rl", "eval/success_rate"), []) if point[1] is not None]
    if evaluations:
        (first, start), (last, end) = evaluations[0], evaluations[-1]
        yield "held-out success", f"{start:.3f} at step {first}, {end:.3f} at step {last}"
        best = max(evaluations, key=lambda point: point[1])
        yield "best held-out", f"{best[1]:.3f} at step {best[0]}"
    if files.config:
        yield "model", str(files.config.model.path)
        yield "environment", files.config.rollout.environment
    names, _ = files.checkpoints()
    yield "checkpoints", ", ".join(names) or "none"
    yield "written", time.strftime("%Y-%m-%d %H:%M")


def _sample(sample: dict[str, Any], text: TokenText) -> dict[str, Any]:
    """A line of samples.jsonl with its tokens as text; per-action arrays stay as they are."""
    shown = {name: value for name, value in sample.items() if name not in ("tokens", "time")}
    return shown | {"pieces": text.pieces(sample["tokens"])}
