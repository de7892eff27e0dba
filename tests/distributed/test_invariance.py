"""What a step computes does not depend on how its batch is laid out, nor on anything off the loss mask."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_sao.config import ConfigError
from megatron_sao.data.trajectory import Trajectory
from megatron_sao.models.backend import Backend
from megatron_sao.trainer.loop import Stage
from tests.distributed.gradients import Result, assert_same, mixed_batch, one_step, without_actions
from tests.distributed.offline import random_trajectory

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def expected(world: Backend, glm4_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    result = one_step(glm4_moe, mixed_batch(), tmp_path_factory.mktemp("expected"), world)
    metrics, gradients = result
    assert 0.1 < metrics["dis/accepted_fraction"] < 0.9, "the batch must exercise acceptance and rejection"
    assert metrics["dis/nonfinite_fraction"] > 0
    assert all(gradient.any() for gradient in gradients.values())
    return result


def pad_to_16(stage: Stage) -> None:
    stage.world = replace(stage.world, sequence_multiple=16)


def with_junk(trajectory: Trajectory, junk: float) -> Trajectory:
    off = trajectory.loss_mask == 0
    return replace(
        trajectory,
        logprobs=np.where(off, np.float32(junk), trajectory.logprobs),
        rewards=np.where(off, np.float32(junk), trajectory.rewards),
    )


def test_splitting_into_micro_batches(world: Backend, glm4_moe: Path, expected: Result, tmp_path: Path) -> None:
    split = one_step(glm4_moe, mixed_batch(), tmp_path, world, parallel={"max_tokens_per_microbatch": 51})
    assert_same(split, expected)


def test_the_order_of_trajectories(world: Backend, glm4_moe: Path, expected: Result, tmp_path: Path) -> None:
    assert_same(one_step(glm4_moe, mixed_batch()[::-1], tmp_path, world), expected)


def test_padding(world: Backend, glm4_moe: Path, expected: Result, tmp_path: Path) -> None:
    assert_same(one_step(glm4_moe, mixed_batch(), tmp_path, world, pad_to_16), expected)


@pytest.mark.parametrize("junk", [1e3, float("nan"), float("inf")])
def test_junk_off_the_loss_mask(junk: float, world: Backend, glm4_moe: Path, expected: Result, tmp_path: Path) -> None:
    batch = [with_junk(trajectory, junk) for trajectory in mixed_batch()]
    assert_same(one_step(glm4_moe, batch, tmp_path, world), expected, tolerance=0)


def test_trajectories_without_action_tokens(world: Backend, glm4_moe: Path, expected: Result, tmp_path: Path) -> None:
    batch = [without_actions("one-token", 1), *mixed_batch(), without_actions("prompt-only", 12)]
    assert_same(one_step(glm4_moe, batch, tmp_path, world), expected)


def test_a_trajectory_of_300_turns_packs_like_any_other(world: Backend, glm4_moe: Path, tmp_path: Path) -> None:
    trajectory = random_trajectory(np.random.default_rng(0), "long", 900)
    mask = (np.arange(900) % 3 == 2).astype(np.uint8)
    logprobs = np.where(mask == 1, np.float32(-3.1), np.float32(0))
    trajectory = replace(trajectory, loss_mask=mask, logprobs=logprobs, rewards=mask * np.float32(0.01))
    alone = one_step(glm4_moe, [trajectory], tmp_path / "alone", world)
    halves = one_step(
        glm4_moe, [trajectory, without_actions("other", 30)], tmp_path / "two", world,
        parallel={"max_tokens_per_microbatch": 900},
    )  # fmt: skip
    assert alone[0]["train/action_tokens"] == 300
    assert_same(halves, alone)


def test_a_batch_whose_tokens_are_all_rejected_has_a_policy_gradient_of_exactly_zero(
    world: Backend, glm4_moe: Path, tmp_path: Path
) -> None:
    batch = [replace(t, logprobs=t.loss_mask * np.float32(-1e4)) for t in mixed_batch()]
    metrics, gradients = one_step(glm4_moe, batch, tmp_path, world)
    assert metrics["dis/accepted_fraction"] == 0
    assert not any(gradient.any() for name, gradient in gradients.items() if name.startswith("policy/"))
    assert any(gradient.any() for name, gradient in gradients.items() if name.startswith("critic/"))


@pytest.mark.parametrize("denominator", ["action_tokens", "accepted_tokens"])
def test_a_batch_with_nothing_to_count_takes_no_optimizer_step(
    denominator: str, world: Backend, glm4_moe: Path, tmp_path: Path
) -> None:
    batch = [without_actions("a", 5), without_actions("b", 9)]
    if denominator == "accepted_tokens":
        batch = [replace(t, logprobs=t.loss_mask * np.float32(-1e4)) for t in mixed_batch()]
    before: dict[str, torch.Tensor] = {}
    stages: list[Stage] = []

    def prime(stage: Stage) -> None:
        """Moments from a real step, so that a step with a zero gradient would move the weights."""
        stages.append(stage)
        for chunk in stage.policy.trainable.chunks:
            for parameter in chunk.parameters():
                parameter.main_grad.fill_(0.1)
        stage.policy.trainable.optimizer.step()
        before.update({n: p.clone() for n, p in stage.policy.trainable.chunks[0].named_parameters()})

    metrics, _ = one_step(
        glm4_moe, batch, tmp_path, world, prime, algorithm={"loss_denominator": denominator},
        rl={"policy_optimizer": {"lr": 1e-2}},
    )  # fmt: skip
    assert metrics["train/policy_steps_skipped"] == 1
    for name, parameter in stages[0].policy.trainable.chunks[0].named_parameters():
        assert torch.equal(parameter, before[name]), name


def test_trajectories_sampled_at_another_temperature_are_refused(
    world: Backend, glm4_moe: Path, tmp_path: Path
) -> None:
    batch = [replace(t, sampling={"temperature": 0.7}) for t in mixed_batch()]
    with pytest.raises(ConfigError, match=r"sampled at temperature 0\.7.*= 1\.0"):
        one_step(glm4_moe, batch, tmp_path, world)


def test_temperature_scales_the_policys_logits_and_never_the_values(
    world: Backend, glm4_moe: Path, expected: Result, tmp_path: Path
) -> None:
    batch = [replace(t, sampling={"temperature": 2.0}) for t in mixed_batch()]
    rollout = {"environment": "unused:Unused", "sampling": {"temperature": 2.0}}
    metrics, gradients = one_step(glm4_moe, batch, tmp_path, world, rollout=rollout)
    assert metrics["train/entropy"] > expected[0]["train/entropy"] + 0.1
    for name, gradient in expected[1].items():
        if name.startswith("critic/"):
            assert torch.equal(gradients[name], gradient), name
