"""Trajectories and configs for tests of whatever stores or moves them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_sao.config import RunConfig, parse_config
from megatron_sao.data.trajectory import Trajectory


def make_trajectory(**changes: Any) -> Trajectory:
    """Two prompt tokens, two actions, one observation, one action; reward 1 at the end."""
    trajectory = Trajectory(
        id="t",
        run_id="test",
        task_id="a",
        epoch=0,
        attempt=1,
        kind="train",
        group=None,
        token_ids=np.array([1, 2, 3, 4, 5, 6], np.int32),
        loss_mask=np.array([0, 0, 1, 1, 0, 1], np.uint8),
        logprobs=np.array([0, 0, -0.5, -1.0, 0, -0.25], np.float32),
        rewards=np.array([0, 0, 0, 0, 0, 1], np.float32),
        versions=[("1.0", 2, 4), ("1.1", 5, 6)],
        turns=[("prompt", 0, 2), ("action", 2, 4), ("observation", 4, 5), ("action", 5, 6)],
        sampling={"temperature": 1.0},
        support=None,
        routed_experts=None,
        truncated=False,
        failure=None,
        metrics={"calls": 2.0},
        created_at=1.7e9,
    )
    return replace(trajectory, **changes)


def make_long_trajectory(tokens: int, seed: int = 0, **changes: Any) -> Trajectory:
    """Ten prompt tokens and one action, of ids below 7: 13 bytes for each token."""
    rng = np.random.default_rng(seed)
    mask = np.arange(tokens) >= 10
    long = {
        "token_ids": rng.integers(0, 7, tokens, dtype=np.int32),
        "loss_mask": mask.astype(np.uint8),
        "logprobs": np.where(mask, -rng.random(tokens), 0).astype(np.float32),
        "rewards": np.zeros(tokens, np.float32),
        "versions": [("1.0", 10, tokens)],
        "turns": [("prompt", 0, 10), ("action", 10, tokens)],
    }
    return make_trajectory(**long | changes)


def make_config(directory: Path, **sections: Any) -> RunConfig:
    raw = {
        "name": "test",
        "model": {"path": str(directory)},
        "data": {"train": str(directory / "train.jsonl"), "eval": str(directory / "eval.jsonl")},
        "rollout": {"environment": "package.module:Class", "max_tokens": 100},
        "rl": {"batch_size": 2, "max_staleness": 1},
    }
    return parse_config(raw | sections)
