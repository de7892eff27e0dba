"""Megatron's models against transformers, and weights in and out."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron_sao.config import ConfigError, ModelConfig, ParallelConfig
from megatron_sao.models.backend import Backend
from megatron_sao.models.build import build_critic, build_policy, copy_backbone
from megatron_sao.models.hf import read_hf_model, transformer_config
from megatron_sao.trainer.microbatch import build_microbatches
from megatron_sao.trainer.trainable import forward_kwargs
from megatron_sao.weights.export import HFExporter
from megatron_sao.weights.load import HFTensors, WeightError, load_hf_weights
from tests.trajectories import make_trajectory

pytestmark = pytest.mark.distributed


def build(path: Path) -> tuple:
    model = read_hf_model(path)
    config = transformer_config(model, ModelConfig(path=path), ParallelConfig())
    return model, config, build_policy(model, config, "native")


@pytest.mark.parametrize("name", ["glm4_moe", "llama", "qwen3"])
def test_packed_logits_equal_those_of_transformers(name: str, world: Backend, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(name)
    model, config, chunks = build(path)
    load_hf_weights(chunks, model, config, "policy")
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(0, model.vocab_size, (n,), generator=generator) for n in (10, 7, 1, 20)]
    trajectories = [
        make_trajectory(token_ids=s.numpy().astype("int32"), loss_mask=s.numpy() * 0, logprobs=s.numpy() * 0.0,
                        rewards=s.numpy() * 0.0)
        for s in sequences
    ]  # fmt: skip
    (batch,) = build_microbatches(trajectories, 0, 1, 1000, 1, world.device)
    logits = chunks[0](**forward_kwargs(batch))[0]
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    expected = torch.cat([reference(s[None]).logits[0] for s in sequences])
    assert expected.abs().max() > 1
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["glm4_moe", "llama", "qwen3"])
def test_export_returns_every_tensor_of_the_directory_bit_for_bit(
    name: str, world: Backend, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(name)
    model, config, chunks = build(path)
    load_hf_weights(chunks, model, config, "policy")
    exported = dict(HFExporter(chunks, model, config).tensors())
    source = HFTensors(path)
    assert exported.keys() == source.names()
    for tensor_name, tensor in exported.items():
        assert tensor.dtype == source[tensor_name].dtype
        assert torch.equal(tensor, source[tensor_name]), tensor_name


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda w: w.pop("model.layers.1.mlp.gate.weight"), "missing .*mlp.gate.weight"),
        (lambda w: w.update(extra=torch.zeros(1)), "unexpected .*extra"),
        (lambda w: w.update({"model.norm.weight": torch.zeros(7)}), r"mis-shaped .*model.norm.weight \(7,\) instead of"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(
    damage, sentence: str, world: Backend, glm4_moe: Path, tmp_path: Path
) -> None:
    shutil.copy(glm4_moe / "config.json", tmp_path)
    weights = load_file(glm4_moe / "model.safetensors")
    damage(weights)
    save_file(weights, tmp_path / "model.safetensors")
    model, config, chunks = build(tmp_path)
    with pytest.raises(WeightError, match=sentence):
        load_hf_weights(chunks, model, config, "policy")


def test_unsupported_architecture_is_refused_with_a_sentence(glm4_moe: Path, tmp_path: Path) -> None:
    text = (glm4_moe / "config.json").read_text().replace('"glm4_moe"', '"mamba"')
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="model_type 'mamba'"):
        read_hf_model(tmp_path)


def test_a_new_critic_has_the_policys_hidden_states_and_values_near_its_bias(world: Backend, glm4_moe: Path) -> None:
    model, config, policy = build(glm4_moe)
    load_hf_weights(policy, model, config, "policy")
    critic = build_critic(model, config, "native", bias=0.5, seed=0)
    copy_backbone(policy, critic)
    (batch,) = build_microbatches([make_trajectory()], 0, 1, 1000, 1, world.device)
    hidden = []
    for chunk in (*policy, *critic):
        chunk.decoder.register_forward_hook(lambda _module, _inputs, output: hidden.append(output))
        values = chunk(**forward_kwargs(batch))
    assert torch.equal(hidden[0], hidden[1])
    assert values.shape == (1, batch.num_tokens, 1)
    assert (values - 0.5).abs().max() < 0.1
