"""Sparse attention: which keys an indexer chooses, and that nothing trains it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from megatron_sao.config import ModelConfig, ParallelConfig
from megatron_sao.models import attention
from megatron_sao.models.attention import AttentionToChosen
from megatron_sao.models.backend import Backend
from megatron_sao.models.dsa import Indexer, SparseSDPA
from megatron_sao.models.hf import read_hf_model, transformer_config
from megatron_sao.trainer.loop import Stage, sao_step
from megatron_sao.trainer.main import Run
from megatron_sao.trainer.metrics import Stopwatch
from megatron_sao.trainer.trainable import Trainable
from megatron_sao.weights.load import HFTensors
from tests.distributed.gradients import assert_same, mixed_batch, one_step, trainables
from tests.distributed.offline import offline_config, write_batches
from tests.distributed.parity import build
from tests.tiny_models import write_glm_moe_dsa

pytestmark = pytest.mark.distributed

WEIGHTS_PROJ = "self_attention.core_attention.indexer.linear_weights_proj.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With heads of 16 dimensions, whose root is exact: equal scores are then equal bit for bit."""
    return write_glm_moe_dsa(tmp_path_factory.mktemp("models") / "glm_moe_dsa", index_head_dim=16)


@pytest.fixture(scope="module")
def indexer(world: Backend, model: Path) -> Indexer:
    config = transformer_config(read_hf_model(model), ModelConfig(path=model), ParallelConfig())
    return Indexer(config, ProcessGroupCollection.use_mpu_process_groups())


def stage(path: Path, run_dir: Path, world: Backend, /, **sections: dict) -> Stage:
    return Run(offline_config(path, **sections), run_dir, write_batches(run_dir / "batches"), world)._rl_stage(0)


def indexer_parameters(trainable: Trainable) -> dict[str, torch.nn.Parameter]:
    found = {n: p for chunk in trainable.chunks for n, p in chunk.named_parameters() if ".indexer." in n}
    assert len(found) == 5 * 3  # layers 1, 2 and 4 have one
    return found


@pytest.fixture
def blocks_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "QUERIES", 4)


@pytest.mark.parametrize("block", [4, 512])
@pytest.mark.parametrize("first", [0, 11])
def test_the_best_keys_before_a_query_are_chosen_and_of_equal_ones_the_earlier(
    indexer: Indexer, first: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small integers make many scores equal; ``first``: queries of a context-parallel rank, which see more keys."""
    monkeypatch.setattr(attention, "QUERIES", block)
    generator = torch.Generator().manual_seed(first)
    n, heads, dim, top_k = 9, indexer.heads, indexer.dim, indexer.top_k
    queries, keys, weights = (
        torch.randint(-1, 2, shape, generator=generator).float()
        for shape in ((n, heads, dim), (first + n, dim), (n, heads))
    )
    chosen = indexer._choose(queries, keys, weights)
    assert (chosen.dtype, chosen.shape) == (torch.int32, (n, top_k))
    for row in range(n):
        scores = [
            sum(float(weights[row, h]) * max(0.0, float(queries[row, h] @ key)) for h in range(heads))
            for key in keys[: first + row + 1]
        ]
        best = sorted(range(len(scores)), key=lambda position: (-scores[position], position))[:top_k]
        filled = sorted(best) + [0] * (top_k - len(best))
        assert chosen[row].tolist() == filled


def qkv_and_chosen(n: int, m: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Of two heads; every query, the last of which sees all keys, has chosen itself and some before it."""
    generator = torch.Generator().manual_seed(0)
    shapes = (n, 2, 6), (m, 2, 6), (m, 2, 10)
    tensors = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    own = torch.arange(m - n, m)[:, None]
    before = (torch.rand(n, 3, generator=generator) * (own + 1)).int()
    return tensors, torch.cat([own.int(), before], dim=1)


@pytest.mark.usefixtures("blocks_of_four")
@pytest.mark.parametrize("m", [10, 23])
def test_attention_to_chosen_keys_and_its_gradient_are_those_of_softmax_over_them(m: int) -> None:
    (query, key, value), chosen = qkv_and_chosen(10, m)
    scores = torch.einsum("qhd,khd->hqk", query, key) * 0.3
    seen = torch.zeros(10, m, dtype=torch.bool)
    for row, keys in enumerate(chosen.tolist()):
        seen[row, keys] = True
    expected = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value)
    actual = AttentionToChosen.apply(query, key, value, chosen, 0.3)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    gradients = [torch.autograd.grad(output, (query, key, value), direction) for output in (actual, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operation has returned."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.usefixtures("blocks_of_four")
def test_no_tensor_of_all_queries_and_keys_ever_exists(indexer: Indexer) -> None:
    n = 240
    (query, key, value), chosen = qkv_and_chosen(n, n)
    inputs = torch.randn(n, indexer.heads, indexer.dim), torch.randn(n, indexer.dim), torch.randn(n, indexer.heads)
    with Largest() as choice:
        indexer._choose(*inputs)
    with Largest() as work:
        AttentionToChosen.apply(query, key, value, chosen, None).sum().backward()
    assert query.grad.any() and 4 * n <= choice.elements
    assert max(choice.elements, work.elements) <= n * n / 10


def test_a_sequence_no_longer_than_the_choice_is_left_to_causal_attention(indexer: Indexer) -> None:
    queries, keys, weights = (torch.zeros(5, *shape) for shape in ((indexer.heads, indexer.dim), (indexer.dim,), (8,)))
    assert indexer.top_k == 5
    assert indexer._choose(queries, keys, weights) is None


def test_norms_of_the_latents_and_of_the_indexers_keys_have_the_epsilon_of_transformers(
    world: Backend, model: Path
) -> None:
    """Which tiny models are too coarse to tell, since their variances are large."""
    _, _, chunks = build(model, ParallelConfig())
    ours = chunks[0].decoder.layers[0].self_attention
    theirs = AutoModelForCausalLM.from_pretrained(model).model.layers[0].self_attn
    assert ours.config.layernorm_epsilon == 1e-5
    assert ours.q_layernorm.eps == theirs.q_a_layernorm.variance_epsilon
    assert ours.kv_layernorm.eps == theirs.kv_a_layernorm.variance_epsilon
    assert ours.core_attention.indexer.k_norm.eps == theirs.indexer.k_norm.eps


def test_no_indexer_has_gradient_optimizer_state_or_step_even_where_the_whole_critic_trains(
    world: Backend, model: Path, tmp_path: Path
) -> None:
    sgd = {"name": "sgd", "lr": 1e-2}
    run = stage(
        model, tmp_path, world, algorithm={"critic_trainable": [".*"]},
        rl={"steps": 1, "policy_optimizer": sgd | {"weight_decay": 0.1}, "critic_optimizer": sgd},
    )  # fmt: skip
    start = {name: tensor.clone() for name, tensor in indexer_parameters(run.policy.trainable).items()}
    sao_step(run, 0, mixed_batch(), Stopwatch())
    for trainable in trainables(run).values():
        optimized = {id(p) for group in trainable.optimizer.param_groups for p in group["params"]}
        for name, parameter in indexer_parameters(trainable).items():
            assert not parameter.requires_grad and not hasattr(parameter, "main_grad"), name
            assert id(parameter) not in optimized, name
            assert torch.equal(parameter, start[name]), name
        assert all(p.requires_grad for n, p in trainable.chunks[0].named_parameters() if ".indexer." not in n)


def test_in_bfloat16_the_weights_of_the_indexers_heads_stay_float32_bit_for_bit(
    world: Backend, model: Path, tmp_path: Path
) -> None:
    run = stage(model, tmp_path, world, model={"path": str(model), "dtype": "bfloat16"})
    source = HFTensors(model)
    for trainable in trainables(run).values():
        for name, parameter in indexer_parameters(trainable).items():
            assert parameter.dtype == (torch.float32 if name.endswith(WEIGHTS_PROJ) else torch.bfloat16), name
        first = trainable.chunks[0].decoder.layers[0].self_attention.core_attention.indexer.linear_weights_proj
        assert torch.equal(first.weight, source["model.layers.0.self_attn.indexer.weights_proj.weight"])
        first.bfloat16()
        assert torch.equal(first.weight, source["model.layers.0.self_attn.indexer.weights_proj.weight"])
        assert first(torch.ones(2, 48, dtype=torch.bfloat16))[0].dtype == torch.float32
    assert 0 < sao_step(run, 0, mixed_batch(), Stopwatch())["train/policy_grad_norm"] < 100


def test_a_layer_that_shares_has_no_indexer_and_its_choice_is_made_once(
    world: Backend, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stage(model, tmp_path, world, model={"path": str(model), "recompute": "full"})
    cores: list[SparseSDPA] = [
        layer.self_attention.core_attention for layer in run.policy.trainable.chunks[0].decoder.layers
    ]
    assert [core.indexer is None for core in cores] == [False, False, True, False]
    calls: list[Indexer] = []
    original = Indexer.forward
    monkeypatch.setattr(Indexer, "forward", lambda self, *inputs: (calls.append(self), original(self, *inputs))[1])
    sao_step(run, 0, mixed_batch(), Stopwatch())  # one micro-batch, of which every layer runs twice
    for core in cores:
        assert calls.count(core.indexer) == (core.indexer is not None)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_a_step_with_recomputed_layers_is_the_same_bit_for_bit(
    recompute: str, world: Backend, model: Path, tmp_path: Path
) -> None:
    kept = one_step(model, mixed_batch(), tmp_path / "kept", world)
    sections = {"model": {"path": str(model), "recompute": recompute}}
    assert_same(one_step(model, mixed_batch(), tmp_path / "recomputed", world, **sections), kept, tolerance=0)
