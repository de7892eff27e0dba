"""The bytes that ``megatron-sao plan`` foretells are those that a real run allocates."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron_sao.config import ModelConfig, OptimizerConfig, ParallelConfig
from megatron_sao.models.backend import Backend
from megatron_sao.models.build import build_policy
from megatron_sao.models.dsa import Indexer
from megatron_sao.models.hf import read_hf_model, transformer_config
from megatron_sao.plan.activations import Layer, Tokens, activations
from megatron_sao.plan.simulate import LayerKind, SimulatedModel
from megatron_sao.trainer.policy import Policy
from megatron_sao.trainer.trainable import Trainable, forward_kwargs
from tests import tiny_models
from tests.distributed.offline import offline_config
from tests.distributed.parity import packed
from tests.distributed.walk_plan_memory import CASES

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def measured_and_planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], Any]:
    """By case: bytes on each of two ranks after a step, and what one plan per case says of both."""
    directory = tmp_path_factory.mktemp("memory")
    model = tiny_models.write_glm4_moe(directory / "model")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    module = "tests.distributed.walk_plan_memory"
    for command in ([*torchrun, module, "step"], [sys.executable, "-m", module, "plan"]):
        done = subprocess.run(
            [*command, str(model), str(directory)], capture_output=True, text=True, timeout=280, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((directory / f"measured-{rank}.json").read_text()) for rank in range(2)]
    return ranks, json.loads((directory / "planned.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_weights_gradients_and_optimizer_have_the_bytes_that_a_step_leaves(
    case: str, measured_and_planned: tuple[list[Any], Any]
) -> None:
    measured, planned = measured_and_planned
    for rank in range(2):
        for name in ("policy", "critic"):
            for part in ("weights", "gradients", "optimizer"):
                actual = measured[rank][case][name][part]
                assert planned[case][rank][name][part] == pytest.approx(actual, rel=0.02), (rank, name, part)


def test_models_that_wait_in_turn_take_the_host_memory_foretold_and_train_bit_identically(
    measured_and_planned: tuple[list[Any], Any],
) -> None:
    measured, planned = measured_and_planned
    kept, in_turn = "DP2 bfloat16 distributed", "DP2 bfloat16 distributed, in turn"
    for rank in range(2):
        waiting = sum(measured[rank][in_turn][name]["waiting"] for name in ("policy", "critic"))
        assert planned[in_turn][rank]["host"] - planned[kept][rank]["host"] == pytest.approx(waiting, rel=0.02)
        assert measured[rank][in_turn]["metrics"] == measured[rank][kept]["metrics"]
        for name in ("policy", "critic"):
            assert measured[rank][in_turn][name]["digest"] == measured[rank][kept][name]["digest"]


class FusedNorm(torch.autograd.Function):
    """Keeps what CUDA's fused kernel keeps; torch composes the norm of other operations on a CPU."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rstd = (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, rstd, weight)
        return (x.float() * rstd * weight).to(x.dtype)


ARCHITECTURES: dict[str, Callable[[Path], Path]] = {
    "glm4_moe": tiny_models.write_glm4_moe,
    "llama": tiny_models.write_llama,
    "qwen3": tiny_models.write_qwen3,
    "qwen3_moe": tiny_models.write_qwen3_moe,
    # heads of one width: for others a CPU's attention has no kernel, and keeps a matrix of all pairs
    "deepseek_v3": lambda path: tiny_models.write_deepseek_v3(path, v_head_dim=16),
    "glm_moe_dsa": tiny_models.write_glm_moe_dsa,
}


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_activations_are_what_autograd_keeps(
    architecture: str, recompute: str, world: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = read_hf_model(ARCHITECTURES[architecture](tmp_path / "model"))
    settings = ModelConfig(path=model.path, recompute=recompute)
    megatron = transformer_config(model, settings, ParallelConfig())
    chunks = build_policy(model, megatron, "native")
    trainable = Trainable(chunks, megatron, OptimizerConfig(), 1, ParallelConfig())
    policy = Policy(trainable, model.vocab_size, temperature=1.0)
    batch = packed([torch.arange(64) % model.vocab_size, torch.arange(40) % model.vocab_size], 1, world.device)
    batch.loss_mask[:] = True
    monkeypatch.setattr(torch.nn.RMSNorm, "forward", lambda self, x: FusedNorm.apply(x, self.weight, self.eps))
    kept = kept_bytes(trainable, lambda: policy._forward(trainable.modules[0], batch, 1.0))
    layer = Layer(model, megatron, Tokens(batch.num_tokens, batch.num_tokens, batch.num_tokens))
    kinds = [LayerKind(isinstance(module.mlp, MoELayer), indexer=False) for module in chunks[0].decoder.layers]
    layers = (
        layer.entrance * len(kinds)
        if recompute == "full"
        else sum(layer.kept(kind, recompute == "selective") for kind in kinds)
    )
    assert layers + layer.last_stage == pytest.approx(kept, rel=0.07)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("frequency", [1, 2])
def test_choices_of_sparse_attention_have_the_bytes_foretold(
    frequency: int, recompute: str, world: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept where layers share them or are not recomputed; else each is gone when its layer has run."""
    config = offline_config(
        tiny_models.write_glm_moe_dsa(tmp_path / "model", index_topk_freq=frequency),
        model={"path": str(tmp_path / "model"), "recompute": recompute},
        rollout={"environment": "unused:Unused", "max_tokens": 64},
        parallel={"max_tokens_per_microbatch": 64},
    )
    model = read_hf_model(config.model.path)
    megatron = transformer_config(model, config.model, config.parallel)
    chunks = build_policy(model, megatron, "native")
    chosen: list[weakref.ref[torch.Tensor]] = []
    choose = Indexer._choose

    def noted(self: Indexer, *inputs: torch.Tensor) -> torch.Tensor:
        choice = choose(self, *inputs)
        chosen.append(weakref.ref(choice))
        return choice

    monkeypatch.setattr(Indexer, "_choose", noted)
    batch = packed([torch.arange(64) % model.vocab_size], 1, world.device)
    output = chunks[0].train()(**forward_kwargs(batch))
    alive = sum(choice.nbytes for reference in chosen if (choice := reference()) is not None)
    indexers = 4 if frequency == 1 else 3
    layers = [LayerKind(moe=layer > 0, indexer=layer < indexers) for layer in range(4)]
    stage = SimulatedModel([("output_layer.weight", (1, 1))], Counter(), layers, last=True)
    working = Layer(model, megatron, Tokens.at_most(config)).choosing
    assert activations(config, model, megatron, 0, stage).selections - working == max(alive, 64 * 5 * 4)
    assert alive == (0 if recompute == "full" and frequency == 1 else 64 * 5 * 4 * indexers)
    output.sum().backward()
    assert len(chosen) == (8 if recompute == "full" and frequency == 1 else indexers)


def kept_bytes(trainable: Trainable, forward: Callable[[], torch.Tensor]) -> int:
    """Bytes of the distinct storages that ``forward`` leaves for its backward pass, the weights' aside."""
    weights = {p.untyped_storage().data_ptr() for chunk in trainable.chunks for p in chunk.parameters()}
    kept: dict[int, torch.Tensor] = {}  # the tensors too, so that no storage is used again

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward()
    return sum(tensor.untyped_storage().nbytes() for address, tensor in kept.items() if address not in weights)
