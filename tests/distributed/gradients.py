"""One SAO step on given trajectories: its metrics and the gradient of every parameter of policy and critic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_sao.data.trajectory import Support, Trajectory
from megatron_sao.models.backend import Backend
from megatron_sao.trainer.loop import Stage, sao_step
from megatron_sao.trainer.main import Run
from megatron_sao.trainer.metrics import Stopwatch
from megatron_sao.trainer.trainable import Trainable
from megatron_sao.weights.export import HFExporter
from tests.distributed.offline import offline_config, random_trajectory, write_batches
from tests.tiny_models import VOCAB_SIZE
from tests.trajectories import make_trajectory

Result = tuple[dict[str, float], dict[str, torch.Tensor]]


def mixed_batch() -> list[Trajectory]:
    """Six trajectories of very different lengths, one of them with a non-finite behaviour log-probability."""
    rng = np.random.default_rng(3)
    batch = [random_trajectory(rng, f"t{i}", length) for i, length in enumerate([3, 50, 17, 29, 8, 41])]
    broken = batch[1].logprobs.copy()
    broken[np.flatnonzero(batch[1].loss_mask)[:2]] = [-np.inf, np.nan]
    return [batch[0], replace(batch[1], logprobs=broken), *batch[2:]]


def lopsided_batch() -> list[Trajectory]:
    """One trajectory with actions and a longer one without: with two ranks, one of them has nothing to learn."""
    trajectory = mixed_batch()[3]
    return [trajectory, without_actions("prompt-only", 40)]


def grouped_batch() -> list[Trajectory]:
    """Two groups of three, and a support of all but one token for every action token."""
    batch = []
    for index, trajectory in enumerate(mixed_batch()):
        actions = trajectory.token_ids[trajectory.loss_mask == 1].tolist()
        support = [[id for id in range(VOCAB_SIZE) if id != (token + 1) % VOCAB_SIZE] for token in actions]
        batch.append(replace(trajectory, group=f"g{index // 3}", support=Support.of(support)))
    return batch


def truncated_batch() -> list[Trajectory]:
    """The mixed batch, every second episode cut off."""
    return [replace(trajectory, truncated=index % 2 == 1) for index, trajectory in enumerate(mixed_batch())]


def without_actions(name: str, length: int) -> Trajectory:
    zeros = np.zeros(length, np.float32)
    return make_trajectory(
        id=name, token_ids=np.arange(length, dtype=np.int32) % 20, loss_mask=zeros.astype(np.uint8), logprobs=zeros,
        rewards=zeros, versions=[], turns=[("prompt", 0, length)],
    )  # fmt: skip


def one_step(
    model: Path,
    trajectories: list[Trajectory],
    run_dir: Path,
    backend: Backend,
    /,
    change: Callable[[Stage], None] = lambda stage: None,
    **sections: dict,
) -> Result:
    """``change`` may alter the stage before its step. The weights stay (nearly) where they are: the learning rate is
    negligible, so both critic updates see the same ones."""
    tiny = {"lr": 1e-20, "clip_grad": 1e9}
    rl = {"steps": 1, "policy_optimizer": tiny, "critic_optimizer": tiny}
    batches = write_batches(run_dir / f"batches-{dist.get_rank()}")  # unused, but what makes the run an offline one
    config = offline_config(model, rl=rl | sections.pop("rl", {}), **sections)
    run = Run(config, run_dir, batches, backend)
    stage = run._rl_stage(0)
    change(stage)
    metrics = sao_step(stage, 0, trajectories, Stopwatch())
    gradients = exported_gradients(stage, "policy", stage.policy.trainable)
    if stage.critic is not None:
        gradients |= exported_gradients(stage, "critic", stage.critic.trainable)
    return metrics, gradients


@torch.no_grad()
def exported_gradients(stage: Stage, head: str, trainable: Trainable) -> dict[str, torch.Tensor]:
    """Full gradients under Hugging Face names, on rank 0, whatever the layout: exported in the weights' place."""
    parameters = [parameter for chunk in trainable.chunks for parameter in chunk.parameters()]
    weights = [parameter.clone() for parameter in parameters]
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.copy_(parameter.main_grad)
        else:
            parameter.fill_(float("nan"))
    exporter = HFExporter(trainable.chunks, stage.model, trainable.config, head)
    gradients = {
        f"{head}/{name}": tensor.clone() for name, tensor in exporter.tensors() if "e_score_correction_bias" not in name
    }
    for parameter, weight in zip(parameters, weights, strict=True):
        parameter.copy_(weight)
    if head == "critic":
        gradients |= {f"critic/value_head.{name}": g for name, g in _value_head_gradient(trainable).items()}
    return {name: gradient for name, gradient in gradients.items() if not gradient.isnan().any()}


def _value_head_gradient(trainable: Trainable) -> dict[str, torch.Tensor]:
    """From the last pipeline stage, where it is the same on every rank."""
    hidden = trainable.config.hidden_size
    gradient = torch.zeros(hidden + 1)
    last = trainable.chunks[-1]
    if last.post_process:
        gradient = torch.cat([last.output_layer.weight.main_grad[0], last.output_layer.bias.main_grad])
    dist.broadcast(
        gradient,
        parallel_state.get_pipeline_model_parallel_last_rank(),
        group=parallel_state.get_pipeline_model_parallel_group(),
    )
    return {"weight": gradient[:hidden], "bias": gradient[hidden:]}


def assert_same(actual: Result, expected: Result, tolerance: float = 1e-6) -> None:
    """Every metric, and every parameter's gradient relative to its norm."""
    assert actual[0].keys() == expected[0].keys()
    for name, value in expected[0].items():
        assert abs(actual[0][name] - value) <= tolerance * abs(value) + 1e-12, (name, actual[0][name], value)
    assert actual[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        difference = float((actual[1][name] - gradient).double().norm() / gradient.double().norm().clamp_min(1e-12))
        assert difference <= tolerance, (name, difference)
