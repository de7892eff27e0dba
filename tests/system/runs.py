"""Small runs of the demo, and reading what a run wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

STEPS = 6
EVAL_PROMPTS = 96


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def steps_done(run_dir: Path) -> list[int]:
    return sorted({e["step"] for e in read_events(run_dir) if e["stage"] == "rl" and "train/policy_loss" in e})


def evaluations(run_dir: Path) -> dict[int, dict[str, Any]]:
    return {e["step"]: e for e in read_events(run_dir) if "eval/success_rate" in e}


def write_config(directory: Path, tiny: Path, routing_replay: bool = False, keep: int = 2, **rl: Any) -> Path:
    """The demo's config, cut down to seconds: no cold start, a few small steps."""
    demo = Path(__file__).parents[2] / "model_configs" / "tiny_glm4_moe.yaml"
    config = yaml.safe_load(demo.read_text())
    config["model"]["path"] = str(tiny)
    config["data"] = {name: str(tiny / f"{name}.jsonl") for name in ("train", "eval", "sft")}
    config["sft"]["steps"] = 2
    config["value"] |= {"steps": 1, "batch_size": 16}
    config["algorithm"]["routing_replay"] = routing_replay
    config["rl"] |= {"steps": STEPS, "batch_size": 16} | rl
    config["eval"] |= {"prompts": EVAL_PROMPTS, "every": 3}
    config["checkpoint"] = {"save_interval": 2, "keep": keep}
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path
