"""Logits of packed sequences under any layout, and what they should be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import AutoModelForCausalLM

from megatron_sao.config import ModelConfig, ParallelConfig
from megatron_sao.convert.parity import last_stage_logits, pack_tokens
from megatron_sao.models.build import build_policy
from megatron_sao.models.hf import HFModel, read_hf_model, transformer_config
from megatron_sao.trainer.microbatch import MicroBatch
from megatron_sao.weights.load import load_hf_weights
from tests import tiny_models

TOLERANCE = 5e-6  # of the largest logit
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 2.0,
    "beta_slow": 1.0, "mscale": 0.7, "mscale_all_dim": 1.2,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
# Of every architecture several configs; four layers at most, of which a second pipeline stage takes the last two.
VARIANTS: dict[str, tuple[Callable[..., Path], dict]] = {
    "llama tied": (tiny_models.write_llama, {}),
    "llama untied, llama3 rope": (
        tiny_models.write_llama, {"tie_word_embeddings": False, "rope_parameters": LLAMA3, "head_dim": 16},
    ),
    "qwen3": (tiny_models.write_qwen3, {}),
    "qwen3 tied": (tiny_models.write_qwen3, {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "qwen3_moe": (tiny_models.write_qwen3_moe, {}),
    "qwen3_moe every second layer, tied": (
        tiny_models.write_qwen3_moe,
        {
            "decoder_sparse_step": 2, "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        },
    ),
    "qwen3_moe dense layers, not renormalised": (
        tiny_models.write_qwen3_moe, {"mlp_only_layers": [0, 2], "norm_topk_prob": False, "num_key_value_heads": 6},
    ),
    "glm4_moe": (tiny_models.write_glm4_moe, {}),
    "glm4_moe all sparse, no QK norm, two shared": (
        tiny_models.write_glm4_moe,
        {"first_k_dense_replace": 0, "use_qk_norm": False, "n_shared_experts": 2, "num_key_value_heads": 6},
    ),
    "glm4_moe three dense, grouped, tied, no bias": (
        tiny_models.write_glm4_moe,
        {
            "first_k_dense_replace": 3, "n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2,
            "attention_bias": False, "tie_word_embeddings": True, "partial_rotary_factor": 0.25,
        },
    ),
    "deepseek_v3": (tiny_models.write_deepseek_v3, {}),
    "deepseek_v3 YaRN, all sparse, wide values": (
        tiny_models.write_deepseek_v3, {"rope_parameters": YARN, "first_k_dense_replace": 0, "v_head_dim": 18},
    ),
    "deepseek_v3 YaRN without mscale, three dense, ungrouped, tied": (
        tiny_models.write_deepseek_v3,
        {
            "rope_parameters": {k: v for k, v in YARN.items() if "mscale" not in k}, "first_k_dense_replace": 3,
            "n_group": 1, "topk_group": 1, "tie_word_embeddings": True,
        },
    ),
    "glm_moe_dsa shared indices": (tiny_models.write_glm_moe_dsa, {}),
    "glm_moe_dsa an indexer each, all sparse": (
        tiny_models.write_glm_moe_dsa,
        {"index_topk_freq": 1, "index_topk": 7, "first_k_dense_replace": 0, "index_head_dim": 6, "v_head_dim": 14},
    ),
    "glm_moe_dsa shared once, YaRN, three dense, tied": (
        tiny_models.write_glm_moe_dsa,
        {
            "index_topk_freq": 2, "index_skip_topk_offset": 1, "rope_parameters": YARN, "first_k_dense_replace": 3,
            "tie_word_embeddings": True,
        },
    ),
}  # fmt: skip


def sequences(vocab_size: int) -> list[torch.Tensor]:
    """Without token 0, which pads some of the models: transformers gives its embedding no gradient."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, vocab_size, (n,), generator=generator) for n in (10, 7, 1, 22)]


def build(path: Path, parallel: ParallelConfig) -> tuple[HFModel, TransformerConfig, list[GPTModel]]:
    """A loaded policy."""
    model = read_hf_model(path)
    config = transformer_config(model, ModelConfig(path=path), parallel)
    chunks = build_policy(model, config, "native")
    load_hf_weights(chunks, model, config, "policy")
    return model, config, chunks


def packed(token_ids: list[torch.Tensor], multiple: int, device: torch.device) -> MicroBatch:
    return pack_tokens([ids.tolist() for ids in token_ids], multiple, device)


@torch.no_grad()
def logits(
    model: HFModel, chunks: list[GPTModel], parallel: ParallelConfig, device: torch.device
) -> torch.Tensor | None:
    """``[tokens, vocabulary]`` of all sequences, on the ranks of the last pipeline stage."""
    return last_stage_logits(model, chunks, packed(sequences(model.vocab_size), parallel.tp, device))


@torch.no_grad()
def reference_logits(path: Path) -> torch.Tensor:
    """What transformers makes of them, one sequence at a time."""
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return torch.cat([reference(s[None]).logits[0] for s in sequences(reference.config.vocab_size)])


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest, relative to the largest logit."""
    return float((actual - expected).abs().max() / expected.abs().max())
