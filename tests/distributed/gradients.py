"""One SAO step on given trajectories: its metrics, and of every parameter of policy and critic the gradient and what
the step made of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_sao.data.trajectory import Support, Trajectory
from megatron_sao.models.backend import Backend
from megatron_sao.trainer.evaluation import evaluate
from megatron_sao.trainer.loop import Stage, sao_step
from megatron_sao.trainer.main import Run
from megatron_sao.trainer.metrics import Stopwatch
from megatron_sao.trainer.trainable import Trainable
from megatron_sao.weights.export import HFExporter
from megatron_sao.weights.load import HFTensors
from tests.distributed.offline import offline_config, random_trajectory, write_batches
from tests.tiny_models import VOCAB_SIZE
from tests.trajectories import make_trajectory

Step = Callable[[Stage, list[Trajectory]], dict[str, float]]
Result = tuple[dict[str, float], dict[str, torch.Tensor]]
TINY = {"lr": 1e-20, "clip_grad": 1e9}
SGD = {"name": "sgd", "lr": 1e-2, "clip_grad": 1e9}
# its step is as smooth a function of the gradient as SGD's: with a small eps the sign of noise would move weights
SMOOTH_ADAM = {"lr": 1e-1, "eps": 1.0, "clip_grad": 1e9}


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


def routed_batch() -> list[Trajectory]:
    """With two experts at random in each of the model's three MoE layers, for every token but the last."""
    rng = np.random.default_rng(4)
    pairs = np.array(list(permutations(range(4), 2)), np.uint8)
    return [replace(t, routed_experts=pairs[rng.integers(0, 12, (t.num_tokens - 1, 3))]) for t in mixed_batch()]


def truncated_batch() -> list[Trajectory]:
    """The mixed batch, every second episode cut off."""
    return [replace(trajectory, truncated=index % 2 == 1) for index, trajectory in enumerate(mixed_batch())]


def without_actions(name: str, length: int) -> Trajectory:
    zeros = np.zeros(length, np.float32)
    return make_trajectory(
        id=name, token_ids=np.arange(length, dtype=np.int32) % 20, loss_mask=zeros.astype(np.uint8), logprobs=zeros,
        rewards=zeros, versions=[], turns=[("prompt", 0, length)],
    )  # fmt: skip


def sao(stage: Stage, trajectories: list[Trajectory]) -> dict[str, float]:
    return sao_step(stage, 0, trajectories, Stopwatch())


def supervised(stage: Stage, trajectories: list[Trajectory]) -> dict[str, float]:
    """An evaluation of the trajectories whose log-probabilities are finite, and a supervised step on all."""
    played = [t for t in trajectories if np.isfinite(t.logprobs).all()]
    metrics = evaluate(played, stage.microbatches(played), stage.policy, "1.0", stage.config)
    return metrics | stage.policy.sft_step(stage.microbatches(trajectories))


def one_step(
    model: Path,
    trajectories: list[Trajectory],
    run_dir: Path,
    backend: Backend,
    /,
    change: Callable[[Stage], None] = lambda stage: None,
    optimizer: dict = TINY,
    step: Step = sao,
    **sections: dict,
) -> Result:
    """``change`` may alter the stage before its step. By default the weights stay (nearly) where they are: the learning
    rate is negligible, so both critic updates see the same ones."""
    rl = {"steps": 1, "policy_optimizer": optimizer, "critic_optimizer": optimizer}
    batches = write_batches(run_dir / f"batches-{dist.get_rank()}")  # unused, but what makes the run an offline one
    config = offline_config(model, rl=rl | sections.pop("rl", {}), **sections)
    run = Run(config, run_dir, batches, backend)
    stage = run._rl_stage(0)
    change(stage)
    metrics = step(stage, trajectories)
    gradients = {}
    for head, trainable in trainables(stage).items():
        gradients |= exported(stage, head, trainable, gradient_or_nan)
    return metrics, {name: gradient for name, gradient in gradients.items() if not gradient.isnan().any()}


def step_and_change(
    model: Path,
    trajectories: list[Trajectory],
    run_dir: Path,
    backend: Backend,
    optimizer: dict,
    step: Step = sao,
    /,
    **sections: dict,
) -> Result:
    """:func:`one_step` that also tells by how much it moved every weight; under Adam nothing but that, since with the
    distributed optimizer each rank has its share of the gradients alone."""
    stages: list[Stage] = []
    metrics, gradients = one_step(
        model, trajectories, run_dir, backend, change=stages.append, optimizer=optimizer, step=step, **sections
    )
    changes = weight_changes(stages[0], model)
    return metrics, changes if optimizer is SMOOTH_ADAM else gradients | changes


def weight_changes(stage: Stage, model: Path) -> dict[str, torch.Tensor]:
    """How far every weight is from where it started: from ``model``, and the value head from (nearly) 0."""
    source = HFTensors(model)
    start = {f"{head}/{name}": source[name] for head in ("policy", "critic") for name in source.names()}
    return {
        f"change/{name}": weight - start.get(name, 0.0)
        for head, trainable in trainables(stage).items()
        for name, weight in exported(stage, head, trainable, lambda parameter: parameter).items()
    }


def trainables(stage: Stage) -> dict[str, Trainable]:
    critic = {} if stage.critic is None else {"critic": stage.critic.trainable}
    return {"policy": stage.policy.trainable} | critic


def gradient_or_nan(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.main_grad if parameter.requires_grad else torch.full_like(parameter, float("nan"))


@torch.no_grad()
def exported(
    stage: Stage, head: str, trainable: Trainable, of: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """``of`` every full parameter under Hugging Face names, on rank 0, whatever the layout: exported in its place."""
    parameters = [parameter for chunk in trainable.chunks for parameter in chunk.parameters()]
    weights = [parameter.clone() for parameter in parameters]
    for parameter in parameters:
        parameter.copy_(of(parameter))
    exporter = HFExporter(trainable.chunks, stage.model, trainable.config, head)
    tensors = {
        f"{head}/{name}": tensor.clone() for name, tensor in exporter.tensors() if "e_score_correction_bias" not in name
    }
    if head == "critic":
        tensors |= value_head(trainable)
    for parameter, weight in zip(parameters, weights, strict=True):
        parameter.copy_(weight)
    return tensors


@torch.no_grad()
def value_head(trainable: Trainable) -> dict[str, torch.Tensor]:
    """Its parameters, from the last pipeline stage, where they are the same on every rank."""
    hidden = trainable.config.hidden_size
    parameters = torch.zeros(hidden + 1)
    last = trainable.chunks[-1]
    if last.post_process:
        parameters = torch.cat([last.output_layer.weight[0], last.output_layer.bias])
    dist.broadcast(
        parameters,
        parallel_state.get_pipeline_model_parallel_last_rank(),
        group=parallel_state.get_pipeline_model_parallel_group(),
    )
    return {"critic/value_head.weight": parameters[:hidden], "critic/value_head.bias": parameters[hidden:]}


def rounding(model: Path) -> dict[str, float]:
    """By how much two changes of a weight may differ in norm, however small the change: its last bit can fall either
    way."""
    source = HFTensors(model)
    return {
        f"change/{head}/{name}": 2**-24 * float(source[name].norm())
        for head in ("policy", "critic")
        for name in source.names()
    }


def scale(metric: str, value: float) -> float:
    """What a metric's difference is relative to: its value; of one less a ratio, the ratio, which is what rounds."""
    return max(1.0, abs(value)) if metric == "train/explained_variance" else abs(value)


def assert_same(
    actual: Result, expected: Result, tolerance: float = 1e-6, rounding: Mapping[str, float] = MappingProxyType({})
) -> None:
    """Every metric, and every tensor relative to its norm plus its ``rounding``."""
    assert actual[0].keys() == expected[0].keys()
    for name, value in expected[0].items():
        assert abs(actual[0][name] - value) <= tolerance * scale(name, value) + 1e-12, (name, actual[0][name], value)
    assert actual[1].keys() == expected[1].keys()
    for name, tensor in expected[1].items():
        difference, norm = float((actual[1][name] - tensor).double().norm()), float(tensor.double().norm())
        assert difference <= tolerance * max(norm, 1e-12) + rounding.get(name, 0.0), (name, difference, norm)


def worst(actual: Result, expected: Result, rounding: Mapping[str, float]) -> float:
    """The largest relative difference of a metric or, beyond its ``rounding``, of a tensor."""
    differences = [abs(actual[0][name] - value) / scale(name, value) for name, value in expected[0].items() if value]
    for name, tensor in expected[1].items():
        difference = float((actual[1][name] - tensor).double().norm()) - rounding.get(name, 0.0)
        if difference > 0:
            differences.append(difference / max(float(tensor.double().norm()), 1e-12))
    return max(differences)
