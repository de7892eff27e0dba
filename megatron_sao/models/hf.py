"""From a Hugging Face ``config.json`` to a Megatron ``TransformerConfig``: the only place that reads the former."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_sao.config import ConfigError, ModelConfig, ParallelConfig

MODEL_TYPES = ("glm4_moe", "llama", "qwen3")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class HFModel:
    """What a model is, read from its directory.

    Attributes:
        path: the directory.
        raw: ``config.json`` as a mapping.
        model_type: e.g. ``glm4_moe`` or ``llama``.
    """

    path: Path
    raw: dict[str, Any]
    model_type: str

    @property
    def vocab_size(self) -> int:
        return self.raw["vocab_size"]

    @property
    def head_dim(self) -> int:
        default = 128 if self.model_type == "qwen3" else self.raw["hidden_size"] // self.raw["num_attention_heads"]
        return self.raw.get("head_dim") or default

    @property
    def tied(self) -> bool:
        return bool(self.raw.get("tie_word_embeddings", False))

    @property
    def rope(self) -> dict[str, Any]:
        """``rope_parameters`` (transformers 5), or the same from the older top-level fields."""
        rope = dict(self.raw.get("rope_parameters") or self.raw.get("rope_scaling") or {})
        partial = 0.5 if self.model_type == "glm4_moe" else 1.0
        rope.setdefault("rope_theta", self.raw.get("rope_theta", 10000.0))
        rope.setdefault("partial_rotary_factor", self.raw.get("partial_rotary_factor", partial))
        rope.setdefault("rope_type", rope.get("type", "default"))
        return rope

    @property
    def num_experts(self) -> int:
        """Routed experts, 0 for a dense model."""
        return self.raw.get("n_routed_experts", 0) if self.model_type == "glm4_moe" else 0

    @property
    def num_mtp_layers(self) -> int:
        """Multi-token-prediction layers after the decoder's; a checkpoint need not have the tensors of all of them."""
        return self.raw.get("num_nextn_predict_layers") or 0

    def is_moe_layer(self, layer: int) -> bool:
        return self.num_experts > 0 and layer >= self.raw.get("first_k_dense_replace", 0)


def read_hf_model(path: Path) -> HFModel:
    """Read and check a model directory.

    Raises:
        ConfigError: no directory, no or malformed ``config.json``, or a feature that is not implemented.
    """
    if not path.is_dir():
        raise ConfigError(f"model.path = '{path}' is not a directory; give a Hugging Face model directory")
    try:
        raw = json.loads((path / "config.json").read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(f"model.path = '{path}': cannot read config.json ({error})") from error
    model = HFModel(path, raw, raw.get("model_type", ""))
    if model.model_type not in MODEL_TYPES:
        known = ", ".join(MODEL_TYPES)
        raise ConfigError(f"model_type {model.model_type!r} in {path}/config.json is none of those supported: {known}")
    if model.rope["rope_type"] != "default":
        raise ConfigError(f"rope_type {model.rope['rope_type']!r} in {path}/config.json is not implemented")
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"hidden_act {raw['hidden_act']!r} in {path}/config.json is not implemented: silu is")
    if raw.get("mlp_bias"):
        raise ConfigError(f"mlp_bias in {path}/config.json is not implemented")
    if model.model_type != "glm4_moe" and raw.get("attention_bias"):
        raise ConfigError(f"attention_bias in {path}/config.json is not implemented for {model.model_type}")
    if raw.get("use_sliding_window"):
        raise ConfigError(f"use_sliding_window in {path}/config.json is not implemented")
    if raw.get("quantization_config"):
        raise ConfigError(f"quantization_config in {path}/config.json: quantised weights cannot be read yet")
    if model.num_experts and not raw.get("norm_topk_prob", True):
        raise ConfigError(f"norm_topk_prob = false in {path}/config.json is not implemented")
    if model.num_experts and (raw.get("n_group", 1) > 1 or raw["num_experts_per_tok"] < 2):
        raise ConfigError(f"n_group > 1 or num_experts_per_tok = 1 in {path}/config.json is not implemented")
    return model


def transformer_config(model: HFModel, settings: ModelConfig, parallel: ParallelConfig) -> TransformerConfig:
    """The Megatron config of ``model`` under the given layout. Weights are never randomly trusted: they are loaded.

    There is no auxiliary load-balancing loss, whatever ``router_aux_loss_coef`` says: it belongs to pretraining, and in
    RL its gradient would compete with the policy's. The load is logged instead (``moe/load_max``).
    """
    raw, dtype = model.raw, _DTYPES[settings.dtype]
    kwargs: dict[str, Any] = {
        "num_layers": raw["num_hidden_layers"],
        "hidden_size": raw["hidden_size"],
        "ffn_hidden_size": raw["intermediate_size"],
        "num_attention_heads": raw["num_attention_heads"],
        "num_query_groups": raw.get("num_key_value_heads") or raw["num_attention_heads"],
        "kv_channels": model.head_dim,
        "qk_layernorm": bool(raw.get("use_qk_norm", model.model_type == "qwen3")),
        "add_qkv_bias": bool(raw.get("attention_bias", False)),
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "layernorm_epsilon": raw["rms_norm_eps"],
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method_std": raw.get("initializer_range", 0.02),
        "rotary_interleaved": False,
    }
    if model.num_experts:
        kwargs |= _moe_kwargs(model, settings, parallel)
    kwargs |= _layout_kwargs(settings, parallel, dtype)
    return TransformerConfig(**kwargs)


def _moe_kwargs(model: HFModel, settings: ModelConfig, parallel: ParallelConfig) -> dict[str, Any]:
    raw = model.raw
    return {
        "num_moe_experts": model.num_experts,
        "moe_layer_freq": [int(model.is_moe_layer(layer)) for layer in range(raw["num_hidden_layers"])],
        "moe_ffn_hidden_size": raw["moe_intermediate_size"],
        "moe_router_topk": raw["num_experts_per_tok"],
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,  # the expert bias is part of the model; RL must not move it
        "moe_router_topk_scaling_factor": raw.get("routed_scaling_factor", 1.0),
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_shared_expert_intermediate_size": raw["moe_intermediate_size"] * raw["n_shared_experts"]
        if raw.get("n_shared_experts")
        else None,
        "moe_grouped_gemm": settings.layers == "transformer_engine",
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.etp,
    }


def _layout_kwargs(settings: ModelConfig, parallel: ParallelConfig, dtype: torch.dtype) -> dict[str, Any]:
    recompute: dict[str, Any] = {}
    if settings.recompute == "full":
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif settings.recompute == "selective":
        recompute = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    interleaved = parallel.vpp is not None
    return recompute | {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "virtual_pipeline_model_parallel_size": parallel.vpp,
        "context_parallel_size": parallel.cp,
        "sequence_parallel": parallel.sequence_parallel,
        # Micro-batches are packed and differ in length, so stages tell each other shapes.
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
        # Batched p2p pairs wrongly when the previous stage is also the next one (interleaved, two stages).
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        "calculate_per_token_loss": True,  # the loss is a sum; Megatron divides by the global denominator
        "perform_initialization": False,
        "use_cpu_initialization": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "deterministic_mode": False,
    }
