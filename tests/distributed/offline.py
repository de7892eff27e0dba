"""Training runs on recorded batches of random trajectories: no buffer, no engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_sao.config import RunConfig, parse_config
from megatron_sao.data.batches import write_batch
from megatron_sao.data.trajectory import Trajectory
from tests.tiny_models import VOCAB_SIZE
from tests.trajectories import make_trajectory

VALUE_STEPS, RL_STEPS, BATCH = 2, 4, 6


def random_trajectory(rng: np.random.Generator, name: str, length: int, **changes: Any) -> Trajectory:
    """Actions and observations in random turns, with behaviour log-probabilities near a uniform policy's."""
    mask = (rng.random(length) < 0.6).astype(np.uint8)
    mask[:2], mask[-1] = 0, 1
    rewards = np.zeros(length, np.float32)
    rewards[-1] = rng.integers(0, 2)
    return make_trajectory(
        id=name,
        token_ids=rng.integers(0, VOCAB_SIZE, length).astype(np.int32),
        loss_mask=mask,
        logprobs=((np.log(1 / VOCAB_SIZE) + rng.normal(0, 0.3, length)) * mask).astype(np.float32),
        rewards=rewards,
        versions=[("1.0", 0, length)],
        turns=[("prompt", 0, 2), ("action", 2, length)],
        **changes,
    )


def write_batches(directory: Path) -> Path:
    """Value and RL batches whose trajectories differ widely in length."""
    rng = np.random.default_rng(0)
    for stage, steps in (("value", VALUE_STEPS), ("rl", RL_STEPS)):
        for step in range(steps):
            lengths = [3, *rng.integers(4, 60, BATCH - 1)]
            batch = [random_trajectory(rng, f"{stage}-{step}-{i}", int(n)) for i, n in enumerate(lengths)]
            write_batch(directory, stage, step, batch)
    return directory


def offline_config(model: Path, /, **sections: Any) -> RunConfig:
    optimizer = {"lr": 1e-3, "warmup_steps": 1}
    raw = {
        "name": "offline",
        "model": {"path": str(model)},
        "data": {"train": "unused.jsonl"},
        "rollout": {"environment": "unused:Unused"},
        "algorithm": {"eps_low": 0.8, "eps_high": 3.0},
        "value": {"steps": VALUE_STEPS, "batch_size": BATCH, "optimizer": optimizer},
        "rl": {
            "steps": RL_STEPS, "batch_size": BATCH, "policy_optimizer": optimizer, "critic_optimizer": optimizer,
        },
        "checkpoint": {"save_interval": 2},
    }  # fmt: skip
    return parse_config(raw | sections)


def read_metrics(run_dir: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Metrics by (stage, step), without wall-clock fields; the later line wins."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    timed = ("time", "tokens_per_second", "idle_fraction")
    return {(e["stage"], e["step"]): {k: v for k, v in e.items() if not k.startswith(timed)} for e in lines}


def saved_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The weights of both models and the moments of both optimizers."""
    reader = dcp.FileSystemReader(checkpoint)
    entries = reader.read_metadata().state_dict_metadata.items()
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def assert_same_checkpoint(one: Path, other: Path, vocab_size: int | None = None) -> None:
    """Bit for bit, but for the rows beyond ``vocab_size`` that only a tensor-parallel layout has."""
    theirs, ours = saved_tensors(other), saved_tensors(one)
    assert theirs.keys() == ours.keys()
    assert {key.split(".")[0] for key in ours} == {"policy", "critic", "optimizer"}
    different = []
    for key, tensor in theirs.items():
        rows = vocab_size if "word_embeddings" in key or "output_layer" in key else None
        if not torch.equal(tensor[:rows], ours[key][:rows]):
            different.append(key)
    assert not different, different
