"""The policy uses the experts that a trajectory records, and counts the tokens of each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter

from megatron_sao.models.backend import Backend
from megatron_sao.trainer.loop import Stage
from tests.distributed.gradients import Result, assert_same, mixed_batch, one_step, routed_batch

pytestmark = pytest.mark.distributed

REPLAY = {"algorithm": {"eps_low": 0.8, "eps_high": 3.0, "routing_replay": True}}


@pytest.fixture(scope="module")
def free(world: Backend, glm4_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, np.ndarray]:
    """A step without replay, and the experts that the policy chose in it: uint8 [tokens, MoE layers, top_k]."""
    maps: list[torch.Tensor] = []

    def watch(stage: Stage) -> None:
        for module in stage.policy.trainable.chunks[0].modules():
            if isinstance(module, TopKRouter):
                module.register_forward_hook(lambda _module, _inputs, output: maps.append(output[1]))

    result = one_step(glm4_moe, mixed_batch(), tmp_path_factory.mktemp("free"), world, watch)
    assert len(maps) == 3, "one micro-batch, three MoE layers"
    chosen = torch.stack([routing.nonzero()[:, 1].view(-1, 2) for routing in maps], dim=1)
    return result, chosen.numpy().astype(np.uint8)


def test_replaying_the_policys_own_choice_changes_neither_metrics_nor_gradients(
    free: tuple[Result, np.ndarray], world: Backend, glm4_moe: Path, tmp_path: Path
) -> None:
    result, chosen = free
    batch, start = [], 0
    for trajectory in mixed_batch():
        own = chosen[start : start + trajectory.num_tokens - 1, :, ::-1]  # in the other order: a set is what counts
        batch.append(replace(trajectory, routed_experts=own.copy()))
        start += trajectory.num_tokens
    assert_same(one_step(glm4_moe, batch, tmp_path, world, **REPLAY), result)


def test_other_experts_change_the_policy_and_not_the_critic_and_the_router_keeps_its_gradient(
    free: tuple[Result, np.ndarray], world: Backend, glm4_moe: Path, tmp_path: Path
) -> None:
    (free_metrics, free_gradients), _ = free
    metrics, gradients = one_step(glm4_moe, routed_batch(), tmp_path, world, **REPLAY)
    assert metrics["dis/rho_mean"] != pytest.approx(free_metrics["dis/rho_mean"], rel=1e-3)
    for name, gradient in gradients.items():
        if name.startswith("critic/"):
            assert torch.equal(gradient, free_gradients[name]), name
        else:
            assert gradient.isfinite().all() and gradient.any(), name
    assert "policy/model.layers.3.mlp.gate.weight" in gradients

    ignored = one_step(glm4_moe, routed_batch(), tmp_path / "off", world)
    assert_same(ignored, free[0], tolerance=0)


@pytest.mark.parametrize("reverse", [False, True])
def test_replay_does_not_depend_on_packing(reverse: bool, world: Backend, glm4_moe: Path, tmp_path: Path) -> None:
    def pad_to_16(stage: Stage) -> None:
        stage.world = replace(stage.world, sequence_multiple=16)

    whole = one_step(glm4_moe, routed_batch(), tmp_path / "whole", world, **REPLAY)
    batch = routed_batch()[::-1] if reverse else routed_batch()
    parallel = {"max_tokens_per_microbatch": 51}
    split = one_step(glm4_moe, batch, tmp_path / "split", world, pad_to_16, parallel=parallel, **REPLAY)
    assert_same(split, whole)


def test_expert_load_is_that_of_the_tokens_and_starts_anew_each_step(
    world: Backend, glm4_moe: Path, tmp_path: Path
) -> None:
    """Three tokens go to experts 0 and 1, 1 and 2, 2 and 3; in the last MoE layer the first goes to 1 and 2 instead.
    An even share of four experts is 1.5 tokens; padding counts nowhere."""
    short = mixed_batch()[0]
    routing = np.tile(np.array([[0, 1], [1, 2], [2, 3]], np.uint8)[:, None], (1, 3, 1))
    routing[0, 2] = [1, 2]

    def pad_and_step_before(stage: Stage) -> None:
        stage.world = replace(stage.world, sequence_multiple=16)
        stage.policy.sft_step(stage.microbatches(mixed_batch()))

    batch = [replace(short, routed_experts=routing)]
    metrics, _ = one_step(glm4_moe, batch, tmp_path, world, pad_and_step_before, **REPLAY)
    assert metrics["moe/load_max"] == 3 / 1.5
    assert metrics["moe/load_min"] == 0
    routing[0, 2] = [0, 1]
    metrics, _ = one_step(glm4_moe, batch, tmp_path / "even", world, pad_and_step_before, **REPLAY)
    assert metrics["moe/load_max"] == pytest.approx(2 / 1.5)
    assert metrics["moe/load_min"] == pytest.approx(1 / 1.5)
