"""Small random models of awkward sizes in HF format: norms and biases away from their defaults, so that a part that
is left out or swapped shows in the logits."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB_SIZE = 23


def write_glm4_moe(path: Path, layers: int = 4, dense: int = 1) -> Path:
    config = Glm4MoeConfig(
        vocab_size=VOCAB_SIZE, hidden_size=48, intermediate_size=80, moe_intermediate_size=24, num_hidden_layers=layers,
        num_attention_heads=6, num_key_value_heads=2, head_dim=16, n_routed_experts=4, num_experts_per_tok=2,
        n_shared_experts=1, first_k_dense_replace=dense, n_group=1, topk_group=1, use_qk_norm=True, attention_bias=True,
        partial_rotary_factor=0.5, routed_scaling_factor=1.5, max_position_embeddings=256, pad_token_id=0,
        tie_word_embeddings=False, dtype="float32",
    )  # fmt: skip
    return _write(Glm4MoeForCausalLM(config), path)


def write_llama(path: Path, vocab_size: int = 31) -> Path:
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=36, intermediate_size=52, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=12, max_position_embeddings=128, tie_word_embeddings=True, rms_norm_eps=1e-5,
        dtype="float32",
    )  # fmt: skip
    return _write(LlamaForCausalLM(config), path)


def write_qwen3(path: Path) -> Path:
    config = Qwen3Config(
        vocab_size=29, hidden_size=40, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128, tie_word_embeddings=False, dtype="float32",
    )  # fmt: skip
    return _write(Qwen3ForCausalLM(config), path)


def _write(model: PreTrainedModel, path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "inv_freq" in name:
                continue
            spread = 0.2 if tensor.dim() < 2 else 0.15
            tensor.add_(torch.randn(tensor.shape, generator=generator) * spread)
    model.save_pretrained(path)
    return path
