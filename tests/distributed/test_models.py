"""Megatron's models against transformers, and weights in and out."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_sao.config import ParallelConfig
from megatron_sao.models.backend import Backend
from megatron_sao.models.build import build_critic, copy_backbone
from megatron_sao.trainer.trainable import forward_kwargs
from megatron_sao.weights.export import HFExporter
from megatron_sao.weights.load import HFTensors, WeightError
from tests.distributed.parity import (
    TOLERANCE,
    VARIANTS,
    build,
    difference,
    logits,
    packed,
    reference_logits,
    sequences,
)

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("variants")
    return {name: write(root / name, **changes) for name, (write, changes) in VARIANTS.items()}


@pytest.fixture(scope="module")
def expected(models: dict[str, Path]) -> dict[str, torch.Tensor]:
    return {name: reference_logits(path) for name, path in models.items()}


@pytest.mark.parametrize("name", VARIANTS)
def test_packed_logits_equal_those_of_transformers(
    name: str, world: Backend, models: dict[str, Path], expected: dict[str, torch.Tensor]
) -> None:
    assert expected[name].abs().max() > 1
    assert difference(logits(models[name], ParallelConfig(), world.device), expected[name]) <= TOLERANCE


@pytest.mark.parametrize("name", VARIANTS)
def test_export_returns_every_tensor_of_the_directory_bit_for_bit(
    name: str, world: Backend, models: dict[str, Path]
) -> None:
    model, config, chunks = build(models[name], ParallelConfig())
    exported = dict(HFExporter(chunks, model, config).tensors())
    source = HFTensors(models[name])
    assert exported.keys() == source.names()
    for tensor_name, tensor in exported.items():
        assert tensor.dtype == source[tensor_name].dtype
        assert torch.equal(tensor, source[tensor_name]), tensor_name


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda w: w.pop("model.layers.1.mlp.gate.weight"), "missing .*mlp.gate.weight"),
        (lambda w: w.update(extra=torch.zeros(1)), "unexpected .*extra"),
        (lambda w: w.update({"model.norm.weight": torch.zeros(7)}), r"mis-shaped .*model.norm.weight \(7,\) instead"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(
    damage, sentence: str, world: Backend, glm4_moe: Path, tmp_path: Path
) -> None:
    shutil.copy(glm4_moe / "config.json", tmp_path)
    weights = load_file(glm4_moe / "model.safetensors")
    damage(weights)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=sentence):
        build(tmp_path, ParallelConfig())


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3", "glm_moe_dsa shared indices"])
def test_a_new_critic_has_the_policys_hidden_states_and_values_near_its_bias(
    name: str, world: Backend, models: dict[str, Path]
) -> None:
    model, config, policy = build(models[name], ParallelConfig())
    critic = build_critic(model, config, "native", bias=0.5, seed=0)
    copy_backbone(policy, critic)
    batch = packed(sequences(model.vocab_size), 1, world.device)
    hidden = []
    for chunk in (*policy, *critic):
        chunk.decoder.register_forward_hook(lambda _module, _inputs, output: hidden.append(output))
        values = chunk(**forward_kwargs(batch))
    assert torch.equal(hidden[0], hidden[1])
    assert values.shape == (1, batch.num_tokens, 1)
    assert (values - 0.5).abs().max() < 0.1
