"""Megatron's models against transformers, and weights in and out."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron_sao.config import ParallelConfig
from megatron_sao.models.backend import Backend
from megatron_sao.models.build import build_critic, copy_backbone
from megatron_sao.trainer.trainable import forward_kwargs
from megatron_sao.weights.export import HFExporter
from megatron_sao.weights.load import HFTensors, WeightError
from tests.distributed.gradients import SGD, assert_same, mixed_batch, rounding, step_and_change
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
from tests.distributed.parity_table import PARITY_TABLE
from tests.distributed.walk_models import STEPS, walks

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
    name: str,
    world: Backend,
    models: dict[str, Path],
    expected: dict[str, torch.Tensor],
    pytestconfig: pytest.Config,
) -> None:
    assert expected[name].abs().max() > 1
    model, _, chunks = build(models[name], ParallelConfig())
    found = difference(logits(model, chunks, ParallelConfig(), world.device), expected[name])
    pytestconfig.stash.setdefault(PARITY_TABLE, {}).setdefault(name, {})["one rank"] = found
    assert found <= TOLERANCE


@pytest.mark.parametrize("name", VARIANTS)
def test_gradients_of_every_weight_equal_those_of_transformers(
    name: str, world: Backend, models: dict[str, Path], tmp_path: Path
) -> None:
    """Of the logits times random numbers; on both sides written as weights, under the names they have on disk."""
    model, config, chunks = build(models[name], ParallelConfig())
    token_ids = sequences(model.vocab_size)
    reference = AutoModelForCausalLM.from_pretrained(models[name], dtype=torch.float32)
    theirs = torch.cat([reference(s[None]).logits[0] for s in token_ids])
    direction = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(2))
    ours = chunks[0](**forward_kwargs(packed(token_ids, 1, world.device)))[0]
    for logits_, network in ((theirs, reference), (ours, chunks[0])):
        (logits_ * direction).sum().backward()
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    reference.save_pretrained(tmp_path)
    expected_gradients = HFTensors(tmp_path)
    for tensor_name, gradient in HFExporter(chunks, model, config).tensors():
        expected_gradient = expected_gradients[tensor_name]
        # an indexer never has one, and an expert not where no token comes to it
        assert expected_gradient.any() or ".indexer." in tensor_name or ".experts." in tensor_name, tensor_name
        error = float((gradient - expected_gradient).norm())
        assert error <= 1e-5 * float(expected_gradient.norm()), tensor_name


@pytest.fixture(scope="module")
def walked(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one torchrun leaves behind that walks through all models and layouts of two ranks."""
    out = tmp_path_factory.mktemp("walked")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    walk = [*torchrun, "-m", "tests.distributed.walk_models", str(models["glm4_moe"].parent), str(out)]
    done = subprocess.run(walk, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return out


@pytest.mark.timeout(660)
def test_logits_and_exported_weights_of_two_ranks_equal_them_too(
    models: dict[str, Path], expected: dict[str, torch.Tensor], walked: Path, pytestconfig: pytest.Config
) -> None:
    table = pytestconfig.stash.setdefault(PARITY_TABLE, {})
    for layout, name in walks():
        found = difference(torch.load(walked / f"{layout}-{name}.pt", weights_only=True), expected[name])
        table.setdefault(name, {})[layout.split()[0]] = found
        assert found <= TOLERANCE, (layout, name)
        exported, source = load_file(walked / f"{layout}-{name}.safetensors"), HFTensors(models[name])
        assert exported.keys() == source.names()
        assert all(torch.equal(tensor, source[tensor_name]) for tensor_name, tensor in exported.items()), (layout, name)


@pytest.mark.timeout(660)
def test_a_step_of_latent_attention_on_two_ranks_equals_that_of_one(
    world: Backend, models: dict[str, Path], walked: Path, tmp_path: Path
) -> None:
    """Metrics, and of every parameter of policy and critic gradient and change."""
    single = {name: step_and_change(models[name], mixed_batch(), tmp_path / name, world, SGD) for name in STEPS}
    for name, layouts in STEPS.items():
        for layout in layouts:
            result = torch.load(walked / f"{layout}-{name}-step.pt", weights_only=True)
            assert_same(result, single[name], tolerance=1e-5, rounding=rounding(models[name]))


@pytest.mark.parametrize("name", VARIANTS)
def test_export_returns_every_tensor_of_the_directory_bit_for_bit(
    name: str, world: Backend, models: dict[str, Path]
) -> None:
    model, config, chunks = build(models[name], ParallelConfig())
    exported = list(HFExporter(chunks, model, config).tensors())
    source = HFTensors(models[name])
    assert sorted(tensor_name for tensor_name, _ in exported) == sorted(source.names())
    for tensor_name, tensor in exported:
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
