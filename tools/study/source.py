"""Batches for the study: episodes played in process, under weights that are a fixed number of versions old.

The lag is exact: the batch of step n is sampled under version max(n - lag, 0). Everything is a function of the config's
seed, stage and step, so a run that was cut off goes on exactly; the versions still needed lie as files in the run
directory.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from megatron_sao.config import RunConfig
from megatron_sao.data.tasks import epoch_order, load_tasks
from megatron_sao.data.trajectory import Trajectory
from megatron_sao.models.backend import Backend
from megatron_sao.rollout.worker import Player
from megatron_sao.trainer.loop import Stage
from megatron_sao.trainer.main import Run
from megatron_sao.weights.export import HFExporter
from tools.study.engine import InProcessEngine

EVAL_SEED = 1_000_000_007


class LaggedSource:
    """A BatchSource.

    Args:
        exporter: the policy being trained.
        directory: where the versions still needed are kept.
        lag: how many policy steps late weights reach the sampler; 0 is on-policy.
    """

    def __init__(self, config: RunConfig, exporter: HFExporter, directory: Path, lag: int) -> None:
        self._config, self._exporter, self._directory, self._lag = config, exporter, directory, lag
        self._engine = InProcessEngine(config.model.path)
        self._player = Player(config, self._engine, AutoTokenizer.from_pretrained(config.model.path))
        self._tasks, self._eval_tasks = load_tasks(config.data.train), load_tasks(config.data.eval)
        self._directory.mkdir(parents=True, exist_ok=True)

    @property
    def version(self) -> str:
        return self._engine.version

    def batch(self, stage: str, step: int, size: int, policy_version: int) -> list[Trajectory]:
        self._keep(policy_version)
        self._serve(max(policy_version - self._lag, 0))
        group_size = self._config.rl.group_size
        plays = []
        for position in range(step * size, (step + 1) * size):
            round_, place = divmod(position // group_size, len(self._tasks))
            order = epoch_order(len(self._tasks), self._config.seed + (stage == "value"), round_)
            task = self._tasks[order[place]]
            group = f"{task.id}/{round_}" if group_size > 1 else None
            epoch = round_ * group_size + position % group_size
            plays.append(partial(self._player.play, task, "train", epoch, 1, group))
        return self._play(plays, _seed(self._config.seed, stage == "value", step))

    def evaluate(self, stage: str, step: int, num_prompts: int) -> list[Trajectory]:
        self._keep(step)
        self._serve(step)
        plays = [partial(self._player.play, task, "eval", 0, 1, None) for task in self._eval_tasks[:num_prompts]]
        return self._play(plays, _seed(EVAL_SEED, step))

    def commit(self, stage: str, step: int) -> None:
        """Forget the versions that no batch from ``step`` on is sampled under."""
        oldest = step - self._lag if stage == "rl" else 0
        for path in self._directory.glob("*.safetensors"):
            if int(path.stem) < oldest:
                path.unlink()

    def counters(self) -> dict[str, int]:
        return {}

    def _play(self, plays: list[Callable[[], Coroutine[Any, Any, Trajectory]]], seed: int) -> list[Trajectory]:
        trajectories = self._engine.play(plays, seed)
        for trajectory in trajectories:
            if trajectory.failure is not None:  # the study's environments have nothing that can fail
                raise RuntimeError(f"task {trajectory.task_id}: the environment failed: {trajectory.failure}")
        return trajectories

    def _keep(self, policy_version: int) -> None:
        path = self._directory / f"{policy_version}.safetensors"
        weights = {name: tensor.detach().clone().contiguous() for name, tensor in self._exporter.tensors()}
        save_file(weights, path.with_suffix(".partial"))
        path.with_suffix(".partial").rename(path)

    def _serve(self, policy_version: int) -> None:
        weights = load_file(self._directory / f"{policy_version}.safetensors")
        self._engine.load_weights(weights, version=f"1.{policy_version}")


def _seed(*key: int) -> int:
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1)


class InProcessRun(Run):
    """The trainer's own run, with a LaggedSource where a live run has buffer and engines."""

    def __init__(self, config: RunConfig, run_dir: Path, lag: int, backend: Backend) -> None:
        self._lag = lag
        super().__init__(config, run_dir, None, backend)

    def _connect(self) -> None:
        """There is no buffer to talk to."""

    def _attach_source(self, stage: Stage, policy_version: int) -> None:
        stage.source = LaggedSource(self.config, stage.exporter, self.run_dir / "versions", self._lag)
