"""What a step computes does not depend on how its batch is laid out, nor on anything off the loss mask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_sao.config import ConfigError
from megatron_sao.data.trajectory import Support, Trajectory
from megatron_sao.models import hf
from megatron_sao.models.backend import Backend
from megatron_sao.trainer.loop import Stage
from megatron_sao.trainer.trainable import Trainable
from tests.distributed.gradients import Result, assert_same, mixed_batch, one_step, trainables, without_actions
from tests.distributed.offline import random_trajectory
from tests.tiny_models import VOCAB_SIZE

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


def without_load(result: Result) -> Result:
    """For a batch with further prompts: experts are loaded by tokens that nothing is learned from, too."""
    metrics, gradients = result
    return {name: value for name, value in metrics.items() if not name.startswith("moe/")}, gradients


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


@pytest.fixture(scope="module")
def expected_in_float64(world: Backend, glm4_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return one_float64_step(glm4_moe, mixed_batch(), tmp_path_factory.mktemp("expected"), world)


def one_float64_step(
    model: Path,
    batch: list[Trajectory],
    run_dir: Path,
    world: Backend,
    change: Callable = lambda stage: None,
    **sections: dict,
) -> Result:
    """:func:`one_step` of models in float64, which no config offers. Megatron's optimizers refuse such gradients: none
    steps, and the norm is taken here."""

    def in_float64(**settings: Any) -> TransformerConfig:
        double = {"params_dtype": torch.float64, "pipeline_dtype": torch.float64, "moe_router_dtype": "fp64"}
        return TransformerConfig(**settings | double)

    def norm_only(trainable: Trainable) -> Callable[[], tuple[bool, float, None]]:
        parameters = [p for chunk in trainable.chunks for p in chunk.parameters() if p.requires_grad]
        return lambda: (True, float(sum(p.main_grad.square().sum() for p in parameters)) ** 0.5, None)

    def prepare(stage: Stage) -> None:
        for trainable in trainables(stage).values():
            trainable.optimizer.step = norm_only(trainable)
        change(stage)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf, "TransformerConfig", in_float64)
        result = one_step(model, batch, run_dir, world, prepare, **sections)
    assert all(gradient.dtype == torch.float64 for gradient in result[1].values())
    return result


ARRANGEMENTS: dict[str, tuple[Callable, Callable, dict]] = {  # the batch's, the stage's, and the config's
    "split": (list, lambda stage: None, {"parallel": {"max_tokens_per_microbatch": 51}}),
    "another order": (lambda batch: batch[::-1], lambda stage: None, {}),
    "padded": (list, pad_to_16, {}),
    "split, padded, in another order and with prompts": (
        lambda batch: [without_actions("one-token", 1), *batch[::-1], without_actions("prompt-only", 12)],
        pad_to_16,
        {"parallel": {"max_tokens_per_microbatch": 60}},
    ),
}


@pytest.mark.parametrize(("arrange", "change", "sections"), ARRANGEMENTS.values(), ids=ARRANGEMENTS)
def test_in_float64_to_twelve_digits(
    arrange: Callable,
    change: Callable,
    sections: dict,
    world: Backend,
    glm4_moe: Path,
    expected_in_float64: Result,
    tmp_path: Path,
) -> None:
    result = one_float64_step(glm4_moe, arrange(mixed_batch()), tmp_path, world, change, **sections)
    assert_same(without_load(result), without_load(expected_in_float64), tolerance=1e-12)


@pytest.mark.parametrize("denominator", ["accepted_tokens", "trajectories"])
def test_splitting_under_every_denominator(
    denominator: str, world: Backend, glm4_moe: Path, expected: Result, tmp_path: Path
) -> None:
    algorithm = {"eps_low": 0.8, "eps_high": 3.0, "loss_denominator": denominator, "kl_coef": 0.1, "entropy_coef": 0.01}
    whole = one_step(glm4_moe, mixed_batch(), tmp_path / "whole", world, algorithm=algorithm)
    parallel = {"max_tokens_per_microbatch": 51}
    split = one_step(glm4_moe, mixed_batch(), tmp_path / "split", world, algorithm=algorithm, parallel=parallel)
    assert_same(split, whole, tolerance=2e-6)  # a sum of three losses
    plain = one_step(
        glm4_moe, mixed_batch(), tmp_path / "plain", world,
        algorithm={"eps_low": 0.8, "eps_high": 3.0, "loss_denominator": denominator},
    )  # fmt: skip
    tokens = expected[0]["train/action_tokens"]
    count = 6 if denominator == "trajectories" else tokens * expected[0]["dis/accepted_fraction"]
    assert plain[0]["train/policy_loss"] == pytest.approx(expected[0]["train/policy_loss"] * tokens / count, rel=1e-6)
    mean_kl = plain[0]["train/kl"] * plain[0]["dis/accepted_fraction"]
    added = (0.1 * mean_kl - 0.01 * plain[0]["train/entropy"]) * tokens / count
    assert whole[0]["train/policy_loss"] == pytest.approx(plain[0]["train/policy_loss"] + added, rel=1e-5)


def test_the_order_of_trajectories(world: Backend, glm4_moe: Path, expected: Result, tmp_path: Path) -> None:
    # the gradient of the keys' bias nearly cancels (a constant on all keys moves no softmax): 1.1e-6 on some CPUs
    assert_same(one_step(glm4_moe, mixed_batch()[::-1], tmp_path, world), expected, tolerance=2e-6)


def test_padding(world: Backend, glm4_moe: Path, expected: Result, tmp_path: Path) -> None:
    assert_same(one_step(glm4_moe, mixed_batch(), tmp_path, world, pad_to_16), expected)


@pytest.mark.parametrize("junk", [1e3, float("nan"), float("inf")])
def test_junk_off_the_loss_mask(junk: float, world: Backend, glm4_moe: Path, expected: Result, tmp_path: Path) -> None:
    batch = [with_junk(trajectory, junk) for trajectory in mixed_batch()]
    assert_same(one_step(glm4_moe, batch, tmp_path, world), expected, tolerance=0)


def test_trajectories_without_action_tokens(world: Backend, glm4_moe: Path, expected: Result, tmp_path: Path) -> None:
    batch = [without_actions("one-token", 1), *mixed_batch(), without_actions("prompt-only", 12)]
    assert_same(without_load(one_step(glm4_moe, batch, tmp_path, world)), without_load(expected))


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
    assert_same(without_load(halves), without_load(alone))


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


def with_support(trajectory: Trajectory, choose: Callable[[int], list[int]]) -> Trajectory:
    actions = trajectory.token_ids[trajectory.loss_mask == 1]
    return replace(trajectory, support=Support.of([choose(int(token)) for token in actions]))


TOP_K = {"environment": "unused:Unused", "sampling": {"top_k": VOCAB_SIZE}}


def test_a_support_of_the_whole_vocabulary_changes_nothing(
    world: Backend, glm4_moe: Path, expected: Result, tmp_path: Path
) -> None:
    batch = [with_support(t, lambda token: list(range(VOCAB_SIZE))[::-1]) for t in mixed_batch()]
    batch.append(without_actions("prompt-only", 5))
    result = one_step(glm4_moe, batch, tmp_path, world, rollout=TOP_K)
    # another formula, so another rounding
    assert_same(without_load(result), without_load(expected), tolerance=1e-5)


def test_log_probabilities_are_taken_over_the_support_that_the_engine_reported(
    world: Backend, glm4_moe: Path, tmp_path: Path
) -> None:
    """Over a support of one token its log-probability is 0, whatever the model says; of two, they sum to one."""
    lonely = [replace(with_support(t, lambda token: [token]), logprobs=t.logprobs * 0) for t in mixed_batch()]
    metrics, gradients = one_step(glm4_moe, lonely, tmp_path / "one", world, rollout=TOP_K)
    assert metrics["dis/rho_mean"] == metrics["dis/rho_max"] == 1
    assert metrics["train/entropy"] == 0
    assert not any(gradient.any() for name, gradient in gradients.items() if name.startswith("policy/"))

    totals = []
    for mine in (0, 1):
        trajectory = with_support(mixed_batch()[3], lambda token: [token, (token + 1) % VOCAB_SIZE])
        first = int(np.flatnonzero(trajectory.loss_mask)[0])
        mask = (np.arange(trajectory.num_tokens) == first).astype(np.uint8)
        tokens = trajectory.token_ids.copy()
        pair = [int(tokens[first]), (int(tokens[first]) + 1) % VOCAB_SIZE]
        tokens[first] = pair[mine]
        one = replace(
            trajectory, token_ids=tokens, loss_mask=mask, logprobs=mask * np.float32(0), rewards=mask * np.float32(1),
            support=Support.of([pair]),
        )  # fmt: skip
        metrics, _ = one_step(glm4_moe, [one], tmp_path / f"two-{mine}", world, rollout=TOP_K)
        totals.append(metrics["dis/rho_mean"])  # = probability, since the behaviour log-probability is 0
    assert sum(totals) == pytest.approx(1, abs=1e-6)
    assert min(totals) > 1e-4


@pytest.mark.parametrize("top_k", [-1, 4])
def test_trajectories_with_and_without_a_support_are_not_confused(
    top_k: int, world: Backend, glm4_moe: Path, tmp_path: Path
) -> None:
    batch = mixed_batch() if top_k == 4 else [with_support(t, lambda token: [token]) for t in mixed_batch()]
    rollout = {"environment": "unused:Unused", "sampling": {"top_k": top_k}}
    with pytest.raises(ConfigError, match=rf"recorded support, but rollout\.sampling\.top_k = {top_k}"):
        one_step(glm4_moe, batch, tmp_path, world, rollout=rollout)


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


def test_explained_variance_is_that_of_the_action_tokens_and_survives_large_returns(
    world: Backend, glm4_moe: Path, tmp_path: Path
) -> None:
    stages: list[Stage] = []
    one_step(glm4_moe, mixed_batch(), tmp_path, world, stages.append)
    critic, batch = stages[0].critic, stages[0].microbatches(mixed_batch())
    generator = torch.Generator().manual_seed(0)
    for shift in (0.0, 1e6):
        for micro in batch:
            noise = torch.randn(micro.num_tokens, generator=generator, dtype=torch.float64)
            micro.returns = shift + torch.randn(micro.num_tokens, generator=generator, dtype=torch.float64)
            micro.values = micro.returns + 0.5 * noise
        returns = torch.cat([m.returns[m.loss_mask] for m in batch])
        errors = returns - torch.cat([m.values[m.loss_mask] for m in batch])
        expected = float(1 - errors.var(correction=0) / returns.var(correction=0))
        assert critic.explained_variance(batch)["train/explained_variance"] == pytest.approx(expected, rel=1e-6)
    for micro in batch:
        micro.returns = torch.full_like(micro.returns, 0.1)
    assert critic.explained_variance(batch)["train/explained_variance"] == 0
