"""Models in bfloat16: what stays in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer.moe.router import TopKRouter

from megatron_sao.models.backend import Backend
from megatron_sao.trainer.loop import Stage, sao_step
from megatron_sao.trainer.main import Run
from megatron_sao.trainer.metrics import Stopwatch
from tests.distributed.gradients import mixed_batch
from tests.distributed.offline import offline_config, write_batches

pytestmark = pytest.mark.distributed

LR = 1e-6


def stage(model: Path, run_dir: Path, world: Backend, distributed: bool, offload: bool = False) -> Stage:
    config = offline_config(
        model,
        model={"path": str(model), "dtype": "bfloat16"},
        rl={"steps": 2, "policy_optimizer": {"lr": LR}, "critic_optimizer": {"lr": LR}},
        parallel={"distributed_optimizer": distributed, "offload_optimizer": offload},
    )
    return Run(config, run_dir, write_batches(run_dir / "batches"), world)._rl_stage(0)


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
def test_steps_too_small_for_bfloat16_add_up_in_float32_main_weights(
    distributed: bool, world: Backend, glm4_moe: Path, tmp_path: Path
) -> None:
    run = stage(glm4_moe, tmp_path, world, distributed)
    parameters = dict(run.policy.trainable.chunks[0].named_parameters())
    start = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    moved: list[dict[str, torch.Tensor]] = []
    for step in range(2):
        sao_step(run, step, mixed_batch(), Stopwatch())
        moved.append({n: p.main_param.view_as(p) - start[n].float() for n, p in parameters.items()})
    for name, parameter in parameters.items():
        assert parameter.dtype == torch.bfloat16 and parameter.main_grad.dtype == torch.float32, name
        assert parameter.main_param.dtype == torch.float32, name
        assert torch.equal(parameter, parameter.main_param.view_as(parameter).bfloat16()), name
        coarse = start[name].abs() > 4 * LR * 2**8  # one unit in the last place is more than twice the steps' sum
        assert coarse.float().mean() > 0.9, name
        assert torch.equal(parameter[coarse], start[name][coarse]), name
        first, second = (float(m[name].abs().mean()) for m in moved)
        assert 0.3 * LR < first < 1.1 * LR, (name, first)
        assert second > 1.5 * first, (name, first, second)


def test_router_logits_log_probabilities_and_values_are_float32(
    world: Backend, glm4_moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits: list[torch.Tensor] = []
    original = TopKRouter.gating

    def gating(self: TopKRouter, hidden: torch.Tensor) -> torch.Tensor:
        assert hidden.dtype == torch.bfloat16
        logits.append(original(self, hidden))
        return logits[-1]

    monkeypatch.setattr(TopKRouter, "gating", gating)
    run = stage(glm4_moe, tmp_path, world, distributed=False)
    batch = run.microbatches(mixed_batch())
    assert all(logprobs.dtype == torch.float32 for logprobs in run.policy.logprobs(batch, temperature=1.0))
    run.critic.fill_values(batch)
    assert all(micro.values.dtype == torch.float32 for micro in batch)
    assert len(logits) == 2 * 3 * len(batch)  # policy and critic have three MoE layers each
    for router_logits in logits:
        assert router_logits.dtype == torch.float32
        assert not torch.equal(router_logits, router_logits.bfloat16().float()), "computed in bfloat16"


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
def test_nothing_but_the_optimizers_step_touches_a_state_that_is_offloaded(
    distributed: bool, world: Backend, glm4_moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron moves what lies on a GPU; here what is away is set to NaN instead."""
    away: dict[torch.Tensor, torch.Tensor] = {}

    def tensors(optimizer: MegatronOptimizer) -> list[torch.Tensor]:
        states = [value for state in optimizer.optimizer.state.values() for value in state.values()]
        return [p for group in optimizer.optimizer.param_groups for p in group["params"]] + states

    def offload(optimizer: MegatronOptimizer) -> None:
        for tensor in tensors(optimizer):
            away[tensor] = tensor.data
            tensor.data = torch.full_like(tensor, float("nan"))

    def restore(optimizer: MegatronOptimizer) -> None:
        for tensor in tensors(optimizer):
            if tensor in away:
                tensor.data = away.pop(tensor)

    monkeypatch.setattr(MegatronOptimizer, "offload_to_cpu", offload)
    monkeypatch.setattr(MegatronOptimizer, "restore_from_cpu", restore)
    stages = [stage(glm4_moe, tmp_path / str(o), world, distributed, o) for o in (False, True)]
    for step in range(2):
        kept, offloaded = (sao_step(s, step, mixed_batch(), Stopwatch()) for s in stages)
        assert kept == offloaded
    assert away
    pairs = zip(*(s.policy.trainable.chunks[0].parameters() for s in stages), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
