"""Small random models of awkward sizes in HF format: norms and biases away from their defaults, so that a part that
is left out or swapped shows in the logits. ``changes`` are fields of the config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCAB_SIZE = 23


def write_glm4_moe(path: Path, layers: int = 4, **changes: Any) -> Path:
    fields = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 48, "intermediate_size": 80, "moe_intermediate_size": 24,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
        "use_qk_norm": True, "attention_bias": True, "partial_rotary_factor": 0.5, "routed_scaling_factor": 1.5,
        "max_position_embeddings": 256, "pad_token_id": 0, "tie_word_embeddings": False, "dtype": "float32",
    }  # fmt: skip
    return _write(Glm4MoeForCausalLM(Glm4MoeConfig(num_hidden_layers=layers, **fields | changes)), path)


def write_llama(path: Path, vocab_size: int = 31, **changes: Any) -> Path:
    fields = {
        "hidden_size": 36, "intermediate_size": 52, "num_hidden_layers": 2, "num_attention_heads": 6,
        "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 128, "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5, "dtype": "float32",
    }  # fmt: skip
    return _write(LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, **fields | changes)), path)


def write_qwen3(path: Path, **changes: Any) -> Path:
    fields = {
        "vocab_size": 29, "hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
        "tie_word_embeddings": False, "dtype": "float32",
    }  # fmt: skip
    return _write(Qwen3ForCausalLM(Qwen3Config(**fields | changes)), path)


def write_qwen3_moe(path: Path, **changes: Any) -> Path:
    fields = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 40, "intermediate_size": 56, "moe_intermediate_size": 24,
        "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 6,
        "num_experts_per_tok": 3, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "max_position_embeddings": 128, "tie_word_embeddings": False, "dtype": "float32",
    }  # fmt: skip
    return _write(Qwen3MoeForCausalLM(Qwen3MoeConfig(**fields | changes)), path)


def write_deepseek_v3(path: Path, **changes: Any) -> Path:
    fields = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 48, "intermediate_size": 72, "moe_intermediate_size": 24,
        "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 6, "q_lora_rank": 20,
        "kv_lora_rank": 12, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 14, "n_routed_experts": 8,
        "num_experts_per_tok": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
        "routed_scaling_factor": 1.5, "rms_norm_eps": 1e-5, "max_position_embeddings": 256, "num_mtp_layers": 0,
        "tie_word_embeddings": False, "dtype": "float32",
    }  # fmt: skip
    return _write(DeepseekV3ForCausalLM(DeepseekV3Config(**fields | changes)), path)


def write_glm_moe_dsa(path: Path, **changes: Any) -> Path:
    """Its queries see 5 keys. Layers 1, 2 and 4 choose them, 3 takes over the choice of 2. So many index heads that no
    key scores zero in all of them: which of equal keys `transformers` takes is not defined."""
    fields = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 48, "intermediate_size": 72, "moe_intermediate_size": 24,
        "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 6, "q_lora_rank": 20,
        "kv_lora_rank": 12, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 20, "n_routed_experts": 6,
        "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
        "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-5, "index_topk": 5, "index_head_dim": 10,
        "index_n_heads": 16, "index_topk_freq": 2, "index_skip_topk_offset": 2, "max_position_embeddings": 256,
        "tie_word_embeddings": False, "dtype": "float32",
    }  # fmt: skip
    return _write(GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**fields | changes)), path)


def _write(model: PreTrainedModel, path: Path) -> Path:
    """Weights that depend on nothing but the shapes, not on what the process has drawn before, far enough from their
    defaults for every one to matter."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "inv_freq" in name:
                continue
            is_vector = tensor.dim() < 2
            mean = 1.0 if is_vector and name.endswith("weight") else 0.0
            tensor.copy_(mean + torch.randn(tensor.shape, generator=generator) * (0.2 if is_vector else 0.15))
    model.save_pretrained(path)
    return path
