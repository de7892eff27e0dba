"""Which of the critic's parameters RL trains, by Megatron's names, per kind of attention."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron_sao.config import AlgorithmConfig, ConfigError
from megatron_sao.trainer import critic
from megatron_sao.trainer.critic import freeze_critic

pytestmark = pytest.mark.unit

ATTENTION = {
    "GQA": ["linear_qkv.weight", "linear_qkv.bias", "linear_proj.weight", "linear_qkv.layer_norm_weight"],
    "QK-norm": ["q_layernorm.weight", "k_layernorm.weight"],
    "MLA": [
        "linear_q_proj.weight", "linear_q_down_proj.weight", "linear_q_up_proj.weight", "linear_kv_down_proj.weight",
        "linear_kv_up_proj.weight", "q_layernorm.weight", "kv_layernorm.weight", "linear_q_up_proj.layer_norm_weight",
        "linear_kv_up_proj.layer_norm_weight", "linear_proj.weight",
    ],
    "linear attention": ["in_proj.weight", "conv1d.weight", "A_log", "dt_bias", "out_norm.weight", "out_proj.weight"],
    "DSA indexer": [
        "core_attention.indexer.linear_wq_b.weight", "core_attention.indexer.linear_wk.weight",
        "core_attention.indexer.k_norm.weight", "core_attention.indexer.k_norm.bias",
        "core_attention.indexer.linear_weights_proj.weight",
    ],
}  # fmt: skip
OTHERS_FROZEN = [
    "embedding.word_embeddings.weight", "decoder.layers.0.input_layernorm.weight",
    "decoder.layers.0.pre_mlp_layernorm.weight", "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
    "decoder.layers.1.mlp.router.weight", "decoder.final_layernorm.weight",
]  # fmt: skip
TRAINED = [
    "decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.0.mlp.linear_fc2.weight",
    "decoder.layers.0.mlp.linear_fc2.bias", "decoder.layers.1.mlp.experts.local_experts.7.linear_fc1.weight",
    "decoder.layers.1.mlp.experts.linear_fc2.weight63", "decoder.layers.1.mlp.shared_experts.linear_fc1.weight",
    "output_layer.weight", "output_layer.bias",
]  # fmt: skip


class Named(nn.Module):
    """A model with parameters of the given names."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        for name in names:
            *parents, leaf = name.split(".")
            module: nn.Module = self
            for parent in parents:
                if not hasattr(module, parent):
                    module.add_module(parent, nn.Module())
                module = getattr(module, parent)
            module.register_parameter(leaf, nn.Parameter(torch.zeros(1)))


@pytest.mark.parametrize("kind", ATTENTION)
def test_every_parameter_of_the_token_mixer_is_frozen_and_what_follows_it_trains(kind: str) -> None:
    attention = [f"decoder.layers.1.self_attention.{name}" for name in ATTENTION[kind]]
    model = Named(attention + OTHERS_FROZEN + TRAINED)
    freeze_critic([model], AlgorithmConfig().critic_trainable)
    assert sorted(name for name, p in model.named_parameters() if p.requires_grad) == sorted(TRAINED)


def test_the_full_critic_of_the_ablation_trains_everything() -> None:
    model = Named(OTHERS_FROZEN + TRAINED)
    freeze_critic([model], [".*"])
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_patterns_that_match_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"critic_trainable = \['attn'\]: no parameter"):
        freeze_critic([Named(TRAINED)], ["attn"])


@pytest.mark.parametrize("others", [[True], [False, True]])
def test_a_rank_without_a_match_is_fine_where_another_has_one(others: list[bool], monkeypatch) -> None:
    model = Named(OTHERS_FROZEN)
    monkeypatch.setattr(critic.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(critic, "all_gather_json", lambda matches, device: [matches, *others])
    freeze_critic([model], [r"^output_layer\."])
    assert not any(parameter.requires_grad for parameter in model.parameters())
