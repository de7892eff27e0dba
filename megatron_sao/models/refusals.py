"""Features of a Hugging Face config that the models here do not have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megatron.core.transformer.experimental_attention_variant.dsa import is_dsa_skip_topk_layer

if TYPE_CHECKING:
    from megatron_sao.models.hf import HFModel

_SPARSE = ("indexed_attention", "deepseek_sparse_attention")  # transformers' name, and the one before it
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def refusals(model: HFModel) -> Iterator[str]:
    """For every feature that is not implemented the config's field, its value and what there is instead."""
    raw = model.raw
    if raw.get("hidden_act", "silu") != "silu":
        yield f"hidden_act = {raw['hidden_act']!r} (only silu is)"
    if raw.get("mlp_bias"):
        yield "mlp_bias = true"
    if raw.get("attention_bias") and model.model_type != "glm4_moe":
        yield f"attention_bias = true for {model.model_type}"
    if raw.get("use_sliding_window"):
        yield "use_sliding_window = true"
    attention = _SPARSE if model.model_type == "glm_moe_dsa" else ("full_attention",)
    for kind in sorted(set(raw.get("layer_types") or ()) - set(attention)):
        yield f"layer_types with {kind!r} for {model.model_type} (only {' and '.join(attention)} are)"
    yield from _rope(model)
    if model.latent_attention:
        yield from _latent_attention(model)
    if model.num_experts:
        yield from _routing(model)


def _rope(model: HFModel) -> Iterator[str]:
    rope = model.rope
    kind = rope["rope_type"]
    if kind == "llama3" and model.model_type == "llama":
        for field, value in _LLAMA3.items():
            if rope.get(field) != value:
                yield f"{field} = {rope.get(field)} of rope_type 'llama3' (only {value} is)"
    elif kind == "yarn" and model.latent_attention:
        yield from _yarn(rope)
    elif kind != "default":
        yield f"rope_type = {kind!r} for {model.model_type}"


def _yarn(rope: dict[str, Any]) -> Iterator[str]:
    if rope.get("attention_factor") is not None:
        yield f"attention_factor = {rope['attention_factor']} of rope_type 'yarn'"
    if not rope.get("truncate", True):
        yield "truncate = false of rope_type 'yarn'"
    for field in ("factor", "original_max_position_embeddings"):
        if not rope.get(field):
            yield f"rope_type 'yarn' without {field}"
    if bool(rope.get("mscale")) != bool(rope.get("mscale_all_dim")):
        yield "one of mscale and mscale_all_dim of rope_type 'yarn' without the other"


def _latent_attention(model: HFModel) -> Iterator[str]:
    raw = model.raw
    if not raw.get("q_lora_rank"):
        yield "q_lora_rank = null"
    if (raw.get("num_key_value_heads") or raw["num_attention_heads"]) != raw["num_attention_heads"]:
        yield f"num_key_value_heads = {raw['num_key_value_heads']} (only num_attention_heads is)"
    for field in ("rope_interleave", "indexer_rope_interleave"):
        if not raw.get(field, True):
            yield f"{field} = false"
    if model.rope["partial_rotary_factor"] != 1:
        yield f"partial_rotary_factor = {model.rope['partial_rotary_factor']} for {model.model_type}"
    frequency, offset = model.indexer_schedule
    shared = [is_dsa_skip_topk_layer(layer + 1, offset, frequency) for layer in range(len(model.indexer_types))]
    if shared != [kind == "shared" for kind in model.indexer_types]:
        yield f"indexer_types = {model.indexer_types} (only those of an index_topk_freq and index_skip_topk_offset are)"


def _routing(model: HFModel) -> Iterator[str]:
    raw = model.raw
    if raw["num_experts_per_tok"] < 2:
        yield f"num_experts_per_tok = {raw['num_experts_per_tok']} (only 2 and more are)"
    if model.model_type == "qwen3_moe":
        return
    if not raw.get("norm_topk_prob", True):
        yield f"norm_topk_prob = false for {model.model_type}"
    if raw.get("scoring_func", "sigmoid") != "sigmoid":
        yield f"scoring_func = {raw['scoring_func']!r} for {model.model_type} (only sigmoid is)"
    if raw.get("topk_method", "noaux_tc") != "noaux_tc":
        yield f"topk_method = {raw['topk_method']!r} (only noaux_tc is)"
    if raw.get("moe_layer_freq", 1) != 1:
        yield f"moe_layer_freq = {raw['moe_layer_freq']} (only 1 is)"
    if model.num_expert_groups > 1 and raw["num_experts_per_tok"] // raw["topk_group"] != 2:
        # Megatron ranks a group by its best top-k/topk_group experts, the models by its best two
        yield (
            f"topk_group = {raw['topk_group']} with num_experts_per_tok = {raw['num_experts_per_tok']} (only half as "
            "many groups as experts are)"
        )
