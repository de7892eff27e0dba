"""samples.jsonl: a few trajectories with everything that the step knew of each token, for ``megatron-sao report``."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state

from megatron_sao.config import LoggingConfig
from megatron_sao.data.trajectory import Trajectory
from megatron_sao.trainer.microbatch import MicroBatch
from megatron_sao.trainer.rollout_metrics import success

MAX_TOKENS = 4096  # of a trajectory that are written
_PER_ACTION = ("rollout_logprobs", "logprobs", "advantages", "values", "rewards")


class SampleWriter:
    """Appends to ``<run_dir>/samples.jsonl``. For a repeated (step, id) the later line wins."""

    def __init__(self, run_dir: Path, config: LoggingConfig) -> None:
        self._path, self._every, self._count = run_dir / "samples.jsonl", config.samples_every, config.samples

    def write(self, step: int, batch: list[MicroBatch]) -> None:
        """Write a few trajectories of this RL step, if it is due. Collective over context-parallel ranks.

        All come from the first data-parallel rank, whose last pipeline stage has the numbers: nothing needs to be sent.

        Args:
            batch: this rank's share, after the policy's step.
        """
        if not self._every or step % self._every or parallel_state.get_data_parallel_rank() != 0:
            return
        places = [(micro, n) for micro in batch if micro.logprobs is not None for n in range(len(micro.trajectories))]
        chosen = places[:: max(1, len(places) // self._count)][: self._count]  # short and long ones: packs are sorted
        lines = [json.dumps({"time": time.time(), "step": step} | _record(*place)) for place in chosen]
        is_writer = parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_context_parallel_rank() == 0
        if lines and is_writer:
            with self._path.open("a") as file:
                file.write("\n".join(lines) + "\n")


def _record(micro: MicroBatch, index: int) -> dict[str, Any]:
    trajectory, (start, end) = micro.trajectories[index], micro.spans()[index]
    predicting = micro.gather(micro.loss_mask)[start : min(end, start + MAX_TOKENS - 1)]
    record = {"id": trajectory.id, "task_id": trajectory.task_id, "reward": trajectory.total_reward}
    record |= {"success": success(trajectory), "truncated": trajectory.truncated, "num_tokens": trajectory.num_tokens}
    record |= _tokens(trajectory)
    for name in _PER_ACTION:
        tensor = getattr(micro, name)
        if tensor is not None:  # values, where there is no critic
            whole = micro.gather(tensor)[start : start + len(predicting)]
            record[name] = _numbers(whole[predicting])
    return record


def _tokens(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "tokens": trajectory.token_ids[:MAX_TOKENS].tolist(),
        "mask": trajectory.loss_mask[:MAX_TOKENS].tolist(),
        "versions": trajectory.versions,
    }


def _numbers(values: torch.Tensor) -> list[float | None]:
    """With six digits; None for what JSON cannot say (a log-probability of -inf)."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]
