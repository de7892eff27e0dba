"""Whole training runs of one rank on recorded batches."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from megatron_sao.config import ConfigError
from megatron_sao.models.backend import Backend
from megatron_sao.trainer.checkpoint import CheckpointError
from megatron_sao.trainer.loop import run_rl
from megatron_sao.trainer.main import Run
from megatron_sao.trainer.stop import Stopped
from megatron_sao.weights.load import HFTensors
from tests.distributed.offline import RL_STEPS, VALUE_STEPS, offline_config, read_metrics

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def finished(world: Backend, glm4_moe: Path, batches: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of an uninterrupted run."""
    run_dir = tmp_path_factory.mktemp("finished")
    Run(offline_config(glm4_moe), run_dir, batches, world).run()
    return run_dir


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    source = HFTensors(run_dir / "hf")
    return {name: source[name] for name in source.names()}


def test_a_resumed_run_is_bit_identical_to_an_uninterrupted_one(
    world: Backend, glm4_moe: Path, batches: Path, finished: Path, tmp_path: Path
) -> None:
    Run(offline_config(glm4_moe), tmp_path, batches, world).run()
    shutil.rmtree(tmp_path / "checkpoints" / f"rl-{RL_STEPS}")
    (tmp_path / "checkpoints" / "latest").write_text("rl-2\n")
    shutil.rmtree(tmp_path / "hf")
    (tmp_path / "metrics.jsonl").unlink()
    Run(offline_config(glm4_moe), tmp_path, batches, world).run()
    expected, resumed = read_metrics(finished), read_metrics(tmp_path)
    assert set(resumed) == {("rl", 2), ("rl", 3)}
    assert all(resumed[key] == expected[key] for key in resumed)
    for name, tensor in weights(finished).items():
        assert torch.equal(tensor, weights(tmp_path)[name]), name


def test_a_run_that_a_signal_stops_after_every_step_ends_bit_identically(
    world: Backend, glm4_moe: Path, batches: Path, finished: Path, tmp_path: Path
) -> None:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)}
    stops = []
    try:
        while len(stops) < 2 * (VALUE_STEPS + RL_STEPS):
            run = Run(offline_config(glm4_moe), tmp_path, batches, world)
            run.stop.listen()
            os.kill(os.getpid(), signal.SIGUSR1)
            try:
                run.run()
            except Stopped as stopped:
                stops.append(str(stopped))
            else:
                break
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    stages = {"value": VALUE_STEPS, "rl": RL_STEPS}
    assert stops == [
        f"stopped by SIGUSR1; the same command resumes from {stage}-{step + 1}"
        for stage in stages
        for step in range(stages[stage])
    ]
    assert read_metrics(tmp_path) == read_metrics(finished)
    for name, tensor in weights(finished).items():
        assert torch.equal(tensor, weights(tmp_path)[name]), name


def test_the_loss_and_gradients_do_not_depend_on_the_split_into_micro_batches(
    world: Backend, glm4_moe: Path, batches: Path, finished: Path, tmp_path: Path
) -> None:
    config = offline_config(glm4_moe, parallel={"max_tokens_per_microbatch": 32})
    Run(config, tmp_path, batches, world).run()
    expected, split = read_metrics(finished), read_metrics(tmp_path)
    for key, metrics in expected.items():
        for name in ("train/policy_loss", "train/value_loss", "train/policy_grad_norm", "train/critic_grad_norm"):
            if name in metrics:
                assert split[key][name] == pytest.approx(metrics[name], rel=1e-4), (key, name)
    assert 0 < expected["rl", 0]["dis/accepted_fraction"] < 1, "the batch must exercise acceptance and rejection"


def test_rl_freezes_the_critics_attention_bit_for_bit_and_gives_it_no_optimizer_state(
    world: Backend, glm4_moe: Path, batches: Path, tmp_path: Path
) -> None:
    run = Run(offline_config(glm4_moe), tmp_path, batches, world)
    run._run_stage("value", 0, VALUE_STEPS)
    stage = run._rl_stage(0)
    (critic,) = stage.critic.trainable.chunks
    before = {name: parameter.clone() for name, parameter in critic.named_parameters()}
    run_rl(stage, 2, 0)
    changed = {name for name, parameter in critic.named_parameters() if not torch.equal(parameter, before[name])}
    trainable = {name for name in before if ".linear_fc" in name or name.startswith("output_layer.")}
    assert changed == trainable  # every expert sees tokens in two steps
    assert not any(word in name for name in changed for word in ("attention", "norm", "embedding", "router"))
    for name, parameter in critic.named_parameters():
        assert hasattr(parameter, "main_grad") == parameter.requires_grad == (name in trainable), name


def test_a_run_that_resets_its_optimizer_at_every_push_resumes_bit_identically(
    world: Backend, glm4_moe: Path, batches: Path, tmp_path: Path
) -> None:
    config = offline_config(glm4_moe, algorithm={"reset_policy_optimizer_on_sync": True})
    Run(config, tmp_path / "whole", batches, world).run()
    Run(config, tmp_path / "cut", batches, world).run()
    (tmp_path / "cut" / "checkpoints" / "latest").write_text("rl-2\n")
    Run(config, tmp_path / "cut", batches, world).run()
    for name, tensor in weights(tmp_path / "whole").items():
        assert torch.equal(tensor, weights(tmp_path / "cut")[name]), name


def test_a_reset_optimizer_takes_the_step_of_a_new_one(
    world: Backend, glm4_moe: Path, batches: Path, tmp_path: Path
) -> None:
    stage = Run(offline_config(glm4_moe), tmp_path, batches, world)._rl_stage(0)
    run_rl(stage, 2, 0)
    states = [s for o in stage.policy.trainable.optimizer.chained_optimizers for s in o.optimizer.state.values()]
    assert any(state["exp_avg"].any() for state in states)
    stage.policy.trainable.reset_optimizer()
    assert not any(value.any() for state in states for value in state.values())


def test_recorded_batches_that_begin_after_the_checkpoint_are_refused(
    world: Backend, glm4_moe: Path, batches: Path, tmp_path: Path
) -> None:
    shutil.copytree(batches, tmp_path / "batches")
    manifest = tmp_path / "batches" / "manifest.json"
    recorded = json.loads(manifest.read_text())
    recorded["batches"] = [b for b in recorded["batches"] if b["stage"] != "rl" or b["step"] > 1]
    manifest.write_text(json.dumps(recorded))
    with pytest.raises(ConfigError, match=r"no batch for stage 'rl', step 0.*recorded: \[2, 3\]"):
        Run(offline_config(glm4_moe), tmp_path, tmp_path / "batches", world).run()


def test_bfloat16_keeps_the_routers_expert_bias_in_float32(
    world: Backend, glm4_moe: Path, batches: Path, tmp_path: Path
) -> None:
    config = offline_config(glm4_moe)
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "bfloat16"})})
    Run(config, tmp_path, batches, world).run()
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(weights(tmp_path)[name], HFTensors(glm4_moe)[name])


def test_a_checkpoint_of_another_model_is_refused(world: Backend, llama: Path, batches: Path, finished: Path) -> None:
    with pytest.raises(CheckpointError, match=r"another config\.json"):
        Run(offline_config(llama), finished, batches, world)


def test_without_a_buffer_and_without_batches_the_trainer_says_what_is_missing(
    world: Backend, glm4_moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MEGATRON_SAO_BUFFER", raising=False)
    with pytest.raises(ConfigError, match=r"MEGATRON_SAO_BUFFER.*--batches"):
        Run(offline_config(glm4_moe), tmp_path, None, world)


def test_a_checkpoint_of_a_frozen_critic_is_refused_by_one_that_trains_more_and_the_other_way_round(
    world: Backend, glm4_moe: Path, batches: Path, tmp_path: Path
) -> None:
    frozen = offline_config(glm4_moe)
    full = offline_config(glm4_moe, algorithm={"critic_trainable": [".*"]})
    for first, second in ((frozen, full), (full, frozen)):
        run_dir = tmp_path / f"run-{first is frozen}"
        Run(first, run_dir, batches, world).run()
        (run_dir / "checkpoints" / "latest").write_text("rl-2\n")
        with pytest.raises(CheckpointError, match="rl-2"):
            Run(second, run_dir, batches, world).run()


def rolled_back(finished: Path, run_dir: Path) -> Path:
    """A copy of the finished run whose newest checkpoint is declared to be rl-2."""
    shutil.copytree(finished, run_dir)
    (run_dir / "checkpoints" / "latest").write_text("rl-2\n")
    return run_dir


@pytest.mark.parametrize(("keep", "left"), [(1, {"rl-3"}), (2, {"rl-2", "rl-3"})])
def test_saving_after_a_rollback_removes_the_abandoned_future_before_the_past(
    keep: int, left: set[str], world: Backend, glm4_moe: Path, batches: Path, finished: Path, tmp_path: Path
) -> None:
    run_dir = rolled_back(finished, tmp_path / "run")
    config = offline_config(glm4_moe, checkpoint={"save_interval": 2, "keep": keep})
    run = Run(config, run_dir, batches, world)
    run._rl_stage(2).save("rl", 3)
    assert {path.parent.name for path in (run_dir / "checkpoints").glob("*/meta.json")} == left
    assert str(run.checkpoints.newest) == (run_dir / "checkpoints" / "latest").read_text().strip() == "rl-3"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"policy_optimizer": {"lr": 2e-3, "warmup_steps": 1}}, r"rl\.policy_optimizer"),
        ({"critic_optimizer": {"lr": 1e-3, "warmup_steps": 2}}, r"rl\.critic_optimizer"),
        ({"steps": RL_STEPS + 1}, r"rl\.steps"),
    ],
    ids=["learning rate", "warm-up", "decay steps"],
)
def test_a_checkpoint_of_another_learning_rate_schedule_is_refused(
    changes: dict, field: str, world: Backend, glm4_moe: Path, batches: Path, finished: Path, tmp_path: Path
) -> None:
    run_dir = rolled_back(finished, tmp_path / "run")
    config = offline_config(glm4_moe, rl=offline_config(glm4_moe).rl.model_dump() | changes)
    with pytest.raises(CheckpointError, match=rf"rl-2 was made with other optimizer settings .*{field}"):
        Run(config, run_dir, batches, world)._rl_stage(2)
