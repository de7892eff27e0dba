"""Policy and critic that wait in host memory while the other one works."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_sao.models.backend import Backend
from megatron_sao.trainer.loop import sao_step
from megatron_sao.trainer.main import Run
from megatron_sao.trainer.metrics import Stopwatch
from megatron_sao.trainer.trainable import Trainable
from megatron_sao.weights.load import HFTensors
from tests.distributed.gradients import mixed_batch
from tests.distributed.offline import RL_STEPS, assert_same_checkpoint, offline_config, read_metrics

pytestmark = pytest.mark.distributed


def config(model: Path, offload: bool, dtype: str, distributed: bool, **sections: Any) -> Any:
    parallel = {
        "distributed_optimizer": distributed,
        "offload_optimizer": offload and dtype == "bfloat16",
        "offload_idle_model": offload,
    }
    return offline_config(model, model={"path": str(model), "dtype": dtype}, parallel=parallel, **sections)


@pytest.mark.parametrize(("dtype", "distributed"), [("bfloat16", True), ("float32", False)])
def test_a_run_is_bit_identical_whether_or_not_the_idle_model_waits_on_the_host(
    dtype: str, distributed: bool, world: Backend, glm4_moe: Path, batches: Path, tmp_path: Path
) -> None:
    """Checkpoints, a resumption, the ratio to the pushed weights and the exported model included."""
    algorithm = {"policy_loss": "ppo_clip", "pi_old": "latest_pushed", "eps_low": 0.2, "eps_high": 0.3}
    for offload in (False, True):
        run_dir = tmp_path / str(offload)
        settings = config(glm4_moe, offload, dtype, distributed, algorithm=algorithm)
        Run(settings, run_dir, batches, world).run()
        if offload:
            shutil.rmtree(run_dir / "hf")
            (run_dir / "checkpoints" / "latest").write_text("rl-2\n")
            Run(settings, run_dir, batches, world).run()
    kept, offloaded = tmp_path / "False", tmp_path / "True"
    assert read_metrics(offloaded) == read_metrics(kept)
    assert_same_checkpoint(*(run / "checkpoints" / f"rl-{RL_STEPS}" for run in (offloaded, kept)))
    ours, theirs = HFTensors(offloaded / "hf"), HFTensors(kept / "hf")
    assert ours.names() == theirs.names()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs.names())


def held(trainable: Trainable) -> tuple[int, int]:
    """Bytes of its weights, the frozen ones too, and of its gradient buffers."""
    weights = {p.untyped_storage() for chunk in trainable._chunks for p in chunk.parameters()}
    buffers = [b for module in trainable._modules for b in (*module.buffers, *module.expert_parallel_buffers)]
    gradients = (buffer.grad_data.untyped_storage().nbytes() for buffer in buffers)
    return sum(storage.nbytes() for storage in weights), sum(gradients)


def test_while_one_model_works_the_other_holds_nothing(
    world: Backend, glm4_moe: Path, batches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Run(config(glm4_moe, True, "bfloat16", True), tmp_path, batches, world)._rl_stage(0)
    models = {"policy": stage.policy.trainable, "critic": stage.critic.trainable}
    seen: list[tuple[str, bool, set[str], set[str]]] = []
    run = Trainable._run

    def looked_at(self: Trainable, *args: Any, forward_only: bool) -> Any:
        bytes_of = {name: held(trainable) for name, trainable in models.items()}
        (at_work,) = (name for name, trainable in models.items() if trainable is self)
        with_weights, with_gradients = ({n for n, sizes in bytes_of.items() if sizes[i] > 0} for i in (0, 1))
        seen.append((at_work, forward_only, with_weights, with_gradients))
        return run(self, *args, forward_only=forward_only)

    monkeypatch.setattr(Trainable, "_run", looked_at)
    sao_step(stage, 0, mixed_batch(), Stopwatch())
    assert seen == [
        ("critic", True, {"critic"}, set()),
        *[("critic", False, {"critic"}, {"critic"})] * stage.config.algorithm.critic_updates,
        ("policy", False, {"policy"}, {"policy"}),
    ]
    assert {held(trainable) for trainable in models.values()} == {(0, 0)}


def test_weights_that_are_away_cannot_be_read_unnoticed(
    world: Backend, glm4_moe: Path, batches: Path, tmp_path: Path
) -> None:
    stage = Run(config(glm4_moe, True, "bfloat16", True), tmp_path, batches, world)._rl_stage(0)
    for read in (
        lambda: stage.policy.trainable.chunks,
        lambda: stage.critic.trainable.modules,
        lambda: next(stage.exporter.tensors()),
    ):
        with pytest.raises(RuntimeError, match="wait in host memory"):
            read()
    with stage.policy.trainable.resident():
        name, tensor = next(stage.exporter.tensors())
    assert torch.equal(tensor, HFTensors(glm4_moe)[name].bfloat16())
