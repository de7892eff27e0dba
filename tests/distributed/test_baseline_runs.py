"""The baselines through the trainer: each is configuration, each does what its name says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_sao.data.trajectory import Trajectory, TrajectoryError
from megatron_sao.models.backend import Backend
from megatron_sao.trainer.main import Run
from megatron_sao.weights.load import HFTensors
from tests.distributed.gradients import mixed_batch, one_step
from tests.distributed.offline import RL_STEPS, offline_config, read_metrics, write_batches

pytestmark = pytest.mark.distributed

PPO = {"policy_loss": "ppo_clip"}
FAST = {"lr": 1e-2}


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_batches(tmp_path_factory.mktemp("batches"))


def train(model: Path, run_dir: Path, batches: Path, world: Backend, rl: dict, algorithm: dict) -> list[dict]:
    """Every RL step on the recorded batches; the metrics of each."""
    rl = {"steps": RL_STEPS, "batch_size": 6, "policy_optimizer": FAST, "critic_optimizer": {"lr": 1e-3}} | rl
    config = offline_config(model, rl=rl, algorithm=algorithm, value={"steps": 0})
    Run(config, run_dir, batches, world).run()
    return [metrics for (stage, _), metrics in sorted(read_metrics(run_dir).items()) if stage == "rl"]


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    source = HFTensors(run_dir / "hf")
    return {name: source[name] for name in source.names()}


def grouped(rewards: list[float]) -> list[Trajectory]:
    """The mixed batch as two groups of three with these terminal rewards."""
    batch = []
    for index, (trajectory, reward) in enumerate(zip(mixed_batch(), rewards, strict=True)):
        paid = trajectory.rewards * 0
        paid[-1] = reward
        batch.append(replace(trajectory, rewards=paid, group=f"g{index // 3}"))
    return batch


def test_with_one_step_per_batch_a_recomputed_old_policy_never_clips(
    world: Backend, glm4_moe: Path, batches: Path, tmp_path: Path
) -> None:
    for metrics in train(glm4_moe, tmp_path, batches, world, {}, PPO):
        assert metrics["ppo/clip_fraction"] == 0
        assert metrics["ppo/ratio_mean"] == metrics["ppo/ratio_max"] == 1


def test_a_token_without_a_rollout_log_probability_still_has_a_ratio_to_the_trainers_own_policy(
    world: Backend, glm4_moe: Path, tmp_path: Path
) -> None:
    metrics, _ = one_step(glm4_moe, mixed_batch(), tmp_path, world, algorithm=PPO)
    assert metrics["dis/nonfinite_fraction"] > 0
    assert metrics["ppo/nonfinite_fraction"] == 0
    assert metrics["ppo/ratio_mean"] == metrics["ppo/ratio_max"] == 1


def test_with_two_mini_batches_the_clip_acts(world: Backend, glm4_moe: Path, batches: Path, tmp_path: Path) -> None:
    steps = train(glm4_moe, tmp_path, batches, world, {"minibatches": 2}, PPO)
    assert any(metrics["ppo/clip_fraction"] > 0.01 for metrics in steps)
    assert all(metrics["ppo/ratio_max"] > 1.01 for metrics in steps)


def test_the_latest_pushed_policy_is_the_current_one_right_after_a_push_and_older_between(
    world: Backend, glm4_moe: Path, batches: Path, tmp_path: Path
) -> None:
    rl = {"sync_interval": 2, "max_staleness": 2}
    steps = train(glm4_moe, tmp_path, batches, world, rl, PPO | {"pi_old": "latest_pushed"})
    distance = [abs(metrics["ppo/ratio_max"] - 1) for metrics in steps]
    assert distance[0] < 1e-5 and distance[2] < 1e-5
    assert distance[1] > 1e-2 and distance[3] > 1e-2


def test_a_rollout_old_policy_gives_the_importance_ratio_itself(
    world: Backend, glm4_moe: Path, batches: Path, tmp_path: Path
) -> None:
    for metrics in train(glm4_moe, tmp_path, batches, world, {}, PPO | {"pi_old": "rollout"}):
        assert metrics["ppo/ratio_mean"] == pytest.approx(metrics["dis/rho_mean"], rel=1e-6)
        assert metrics["ppo/clip_fraction"] > 0


@pytest.mark.parametrize(
    ("rl", "algorithm"),
    [
        ({"sync_interval": 2, "max_staleness": 2}, PPO | {"pi_old": "latest_pushed"}),
        ({"minibatches": 3}, {"advantage": "running_mean"}),
    ],
    ids=["latest_pushed", "running_mean"],
)
def test_a_resumed_baseline_is_bit_identical_to_an_uninterrupted_one(
    rl: dict, algorithm: dict, world: Backend, glm4_moe: Path, tmp_path: Path
) -> None:
    batches = write_batches(tmp_path / "batches")
    train(glm4_moe, tmp_path / "whole", batches, world, rl, algorithm)
    train(glm4_moe, tmp_path / "cut", batches, world, rl, algorithm)
    (tmp_path / "cut" / "checkpoints" / "latest").write_text("rl-2\n")
    (tmp_path / "cut" / "metrics.jsonl").unlink()
    resumed = train(glm4_moe, tmp_path / "cut", batches, world, rl, algorithm)
    assert len(resumed) == RL_STEPS - 2
    for name, tensor in weights(tmp_path / "whole").items():
        assert torch.equal(tensor, weights(tmp_path / "cut")[name]), name


def test_without_a_critic_none_is_built(world: Backend, glm4_moe: Path, tmp_path: Path) -> None:
    metrics, gradients = one_step(
        glm4_moe, grouped([1, 0, 0, 1, 1, 0]), tmp_path, world, algorithm={"advantage": "group"},
        rl={"group_size": 3, "batch_size": 6}, value={"steps": 0},
    )  # fmt: skip
    assert all(name.startswith("policy/") for name in gradients)
    assert not any(name.startswith("train/critic") or name.startswith("train/value") for name in metrics)


def test_groups_without_a_difference_give_no_gradient_and_others_do(
    world: Backend, glm4_moe: Path, tmp_path: Path
) -> None:
    sections = {
        "algorithm": {"advantage": "group"}, "rl": {"group_size": 3, "batch_size": 6}, "value": {"steps": 0},
    }  # fmt: skip
    equal = one_step(glm4_moe, grouped([1, 1, 1, 0, 0, 0]), tmp_path / "a", world, **sections)
    unequal = one_step(glm4_moe, grouped([1, 1, 1, 0, 0, 1]), tmp_path / "b", world, **sections)
    assert equal[0]["train/policy_grad_norm"] == 0
    assert unequal[0]["train/policy_grad_norm"] > 0


def test_trajectories_of_no_group_cannot_be_compared(world: Backend, glm4_moe: Path, tmp_path: Path) -> None:
    with pytest.raises(TrajectoryError, match=r"belongs to none.*rl\.group_size"):
        one_step(
            glm4_moe, mixed_batch(), tmp_path, world, algorithm={"advantage": "group"},
            rl={"group_size": 3, "batch_size": 6}, value={"steps": 0},
        )  # fmt: skip


def test_plain_gae_trains_values_on_observations_too(world: Backend, glm4_moe: Path, tmp_path: Path) -> None:
    skip = one_step(glm4_moe, mixed_batch(), tmp_path / "skip", world)
    plain = one_step(glm4_moe, mixed_batch(), tmp_path / "plain", world, algorithm={"gae": "all_tokens"})
    assert plain[0]["train/action_tokens"] == skip[0]["train/action_tokens"]
    assert plain[0]["train/policy_loss"] != skip[0]["train/policy_loss"]
    # gamma is 1, so every target is the terminal reward, and the critic's first values are close to its bias
    batch = mixed_batch()
    spans = [np.flatnonzero(t.loss_mask) for t in batch]
    errors = [(0.0 - t.total_reward) ** 2 / 2 for t in batch]
    counts = [span[-1] - span[0] + 1 for span in spans]
    expected = sum(e * n for e, n in zip(errors, counts, strict=True)) / sum(counts)
    assert plain[0]["train/value_loss"] == pytest.approx(expected, abs=0.02)
