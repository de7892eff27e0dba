"""Reading what a run wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def steps_done(run_dir: Path) -> list[int]:
    return sorted({e["step"] for e in read_events(run_dir) if e["stage"] == "rl" and "train/policy_loss" in e})


def evaluations(run_dir: Path) -> dict[int, dict[str, Any]]:
    return {e["step"]: e for e in read_events(run_dir) if "eval/success_rate" in e}
