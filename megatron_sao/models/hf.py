"""From a Hugging Face ``config.json`` to a Megatron ``TransformerConfig``: the only place that reads the former."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_sao.config import ConfigError, ModelConfig, ParallelConfig
from megatron_sao.data.routing import RoutingShape
from megatron_sao.models.pipeline import check_pipeline
from megatron_sao.models.refusals import refusals

MODEL_TYPES = ("deepseek_v3", "glm4_moe", "glm_moe_dsa", "llama", "qwen3", "qwen3_moe")
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
    def latent_attention(self) -> bool:
        """Whether attention is multi-latent (MLA)."""
        return self.model_type in ("deepseek_v3", "glm_moe_dsa")

    @property
    def indexer_types(self) -> list[str]:
        """With sparse attention (DSA), for each layer ``full``, if it has an indexer, or ``shared``, if it takes over
        the choice of the last one that has; else []."""
        raw = self.raw
        if self.model_type != "glm_moe_dsa":
            return []
        if given := raw.get("indexer_types") or raw.get("index_topk_pattern"):
            return [{"F": "full", "S": "shared"}.get(kind, kind) for kind in given]
        frequency, offset = max(raw.get("index_topk_freq", 1), 1), raw.get("index_skip_topk_offset", 2)
        layers = range(1, raw["num_hidden_layers"] + 1)
        return ["shared" if max(layer - offset, 0) % frequency else "full" for layer in layers]

    @property
    def indexer_schedule(self) -> tuple[int, int]:
        """(frequency, offset) of Megatron's rule for :attr:`indexer_types`: of the layers, counted from 1, those up to
        the offset are full, and of the later ones every frequency-th."""
        types = self.indexer_types
        if "shared" not in types:
            return 1, 1
        offset = types.index("shared")
        following = types.index("full", offset) if "full" in types[offset:] else len(types)
        return following + 1 - offset, offset

    @cached_property
    def routing(self) -> RoutingShape | None:
        """None for a dense model."""
        return RoutingShape.of_config(self.raw)

    @property
    def num_experts(self) -> int:
        """Routed experts, 0 for a dense model."""
        return self.routing.num_experts if self.routing else 0

    @property
    def num_expert_groups(self) -> int:
        """Groups of which a token's experts come from the best few; 1: from anywhere."""
        return self.raw.get("n_group") or 1

    @property
    def num_mtp_layers(self) -> int:
        """Multi-token-prediction layers after the decoder's; a checkpoint need not have the tensors of all of them."""
        return self.raw.get("num_nextn_predict_layers") or 0

    @property
    def fp8_block(self) -> tuple[int, int] | None:
        """Rows and columns that share a scale in a checkpoint of block-quantised FP8, else None."""
        quantization = self.raw.get("quantization_config")
        return tuple(quantization["weight_block_size"]) if quantization else None

    def is_moe_layer(self, layer: int) -> bool:
        return self.routing is not None and layer in self.routing.moe_layers


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
    for feature in refusals(model):
        raise ConfigError(f"{feature} in {path}/config.json is not implemented")
    _check_quantization(raw.get("quantization_config"), path)
    return model


def _check_quantization(quantization: dict[str, Any] | None, path: Path) -> None:
    if quantization is None:
        return
    method, block = quantization.get("quant_method"), quantization.get("weight_block_size")
    blocks = isinstance(block, list) and len(block) == 2 and all(isinstance(b, int) and b > 0 for b in block)
    if method != "fp8" or quantization.get("fmt", "e4m3") != "e4m3" or not blocks:
        raise ConfigError(
            f"quantization_config in {path}/config.json has quant_method {method!r}, fmt {quantization.get('fmt')!r}, "
            f"weight_block_size {block!r}: of quantised weights only FP8 (e4m3) with one scale per block can be read; "
            "use the bfloat16 release of the model"
        )


def transformer_config(model: HFModel, settings: ModelConfig, parallel: ParallelConfig) -> TransformerConfig:
    """The Megatron config of ``model`` under the given layout. Weights are never randomly trusted: they are loaded.

    There is no auxiliary load-balancing loss, whatever ``router_aux_loss_coef`` says: it belongs to pretraining, and in
    RL its gradient would compete with the policy's. The load is logged instead (``moe/load_max``).

    Raises:
        ConfigError: the layout does not suit the model.
    """
    raw, dtype = model.raw, _DTYPES[settings.dtype]
    kwargs: dict[str, Any] = {
        "num_layers": raw["num_hidden_layers"],
        "hidden_size": raw["hidden_size"],
        "ffn_hidden_size": raw["intermediate_size"],
        "num_attention_heads": raw["num_attention_heads"],
        "num_query_groups": raw.get("num_key_value_heads") or raw["num_attention_heads"],
        "kv_channels": model.head_dim,
        "qk_layernorm": bool(raw.get("use_qk_norm", model.model_type in ("qwen3", "qwen3_moe"))),
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
    check_pipeline(model, parallel)
    if not model.latent_attention:
        return TransformerConfig(**kwargs)
    return MLATransformerConfig(**kwargs | _latent_kwargs(model, parallel))


def _latent_kwargs(model: HFModel, parallel: ParallelConfig) -> dict[str, Any]:
    raw, rope = model.raw, model.rope
    if parallel.tp > 1 and not parallel.sequence_parallel:
        raise ConfigError(
            f"parallel.tp = {parallel.tp} with parallel.sequence_parallel = false: nothing would add up the gradients "
            "of multi-latent attention's keys over tensor-parallel ranks; set sequence_parallel to true"
        )
    kwargs = {
        "multi_latent_attention": True,
        "num_query_groups": raw["num_attention_heads"],
        "kv_channels": raw["v_head_dim"],
        "qk_layernorm": True,
        "q_lora_rank": raw["q_lora_rank"],
        "kv_lora_rank": raw["kv_lora_rank"],
        "qk_head_dim": raw["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": raw["qk_rope_head_dim"],
        "v_head_dim": raw["v_head_dim"],
        "rope_type": "yarn" if rope["rope_type"] == "yarn" else "rope",
        "rotary_base": rope["rope_theta"],
        "rotary_scaling_factor": 1.0,
    }
    if rope["rope_type"] == "yarn":
        kwargs |= {
            "rotary_scaling_factor": rope["factor"],
            "original_max_position_embeddings": rope["original_max_position_embeddings"],
            "beta_fast": rope.get("beta_fast") or 32,
            "beta_slow": rope.get("beta_slow") or 1,
            "mscale": rope.get("mscale") or 1.0,
            "mscale_all_dim": rope.get("mscale_all_dim") or 0.0,
        }
    return kwargs | (_indexer_kwargs(model) if model.indexer_types else {})


def _indexer_kwargs(model: HFModel) -> dict[str, Any]:
    raw = model.raw
    frequency, offset = model.indexer_schedule
    return {
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": raw["index_n_heads"],
        "dsa_indexer_head_dim": raw["index_head_dim"],
        "dsa_indexer_topk": raw["index_topk"],
        "dsa_indexer_topk_freq": frequency,
        "dsa_indexer_skip_topk_offset": offset,
        "dsa_indexer_loss_coeff": 0.0,
        "dsa_indexer_rope_interleaved": True,
        "dsa_indexer_k_norm_epsilon": 1e-6,
        # A Hadamard transform of queries and keys alike: it changes no score, only how well they would quantise.
        "dsa_indexer_rotate_activation": False,
        "cp_comm_type": "allgather",
    }


def _moe_kwargs(model: HFModel, settings: ModelConfig, parallel: ParallelConfig) -> dict[str, Any]:
    raw = model.raw
    return _router_kwargs(model) | {
        "num_moe_experts": model.num_experts,
        "moe_layer_freq": [int(model.is_moe_layer(layer)) for layer in range(raw["num_hidden_layers"])],
        "moe_ffn_hidden_size": raw["moe_intermediate_size"],
        "moe_shared_expert_intermediate_size": raw["moe_intermediate_size"] * raw["n_shared_experts"]
        if raw.get("n_shared_experts")
        else None,
        "moe_grouped_gemm": settings.layers == "transformer_engine",
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.etp,
    }


def _router_kwargs(model: HFModel) -> dict[str, Any]:
    raw = model.raw
    kwargs: dict[str, Any] = {
        "moe_router_topk": raw["num_experts_per_tok"],
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_bias_update_rate": 0.0,  # the expert bias is part of the model; RL must not move it
    }
    if model.model_type == "qwen3_moe":
        # the softmax of the chosen experts' logits is their softmax over all experts, normalised
        return kwargs | {
            "moe_router_score_function": "softmax",
            "moe_router_pre_softmax": not raw.get("norm_topk_prob", False),
        }
    if model.num_expert_groups > 1:
        kwargs |= {"moe_router_num_groups": model.num_expert_groups, "moe_router_group_topk": raw["topk_group"]}
    return kwargs | {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": raw.get("routed_scaling_factor", 1.0),
    }


def _layout_kwargs(settings: ModelConfig, parallel: ParallelConfig, dtype: torch.dtype) -> dict[str, Any]:
    recompute: dict[str, Any] = {}
    if settings.recompute == "full":
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif settings.recompute == "selective":
        recompute = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    interleaved = parallel.vpp is not None
    return recompute | {
        "transformer_impl": "local" if settings.layers == "native" else "transformer_engine",
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "virtual_pipeline_model_parallel_size": parallel.vpp,
        "context_parallel_size": parallel.cp,
        "sequence_parallel": parallel.sequence_parallel,
        "num_layers_in_first_pipeline_stage": parallel.pp_first_layers,
        "num_layers_in_last_pipeline_stage": parallel.pp_last_layers,
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
