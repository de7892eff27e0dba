"""How Megatron's parameters correspond to Hugging Face tensors, one entry per Megatron parameter.

Names here are global: layer and expert indices count over the whole model, whatever pipeline stage or expert rank
holds them. Each entry says how the full Megatron tensor is assembled from HF tensors (its ``kind``) and along which
parallel dimension it is sharded. Every HF tensor belongs to exactly one entry.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_sao.models.hf import HFModel

Kind = Literal["replicated", "column", "row", "vocab", "qkv", "gate_up"]


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter and the HF tensors it is made of.

    Attributes:
        name: global Megatron name, e.g. ``decoder.layers.3.mlp.experts.local_experts.5.linear_fc1.weight``.
        hf: HF tensor names, in the order in which ``kind`` takes them.
        kind: ``replicated``; ``column`` (sharded along dim 0), ``row`` (dim 1), ``vocab`` (dim 0, padded);
            ``qkv`` (q, k, v interleaved by query group, then along dim 0); ``gate_up`` (each shard is its own
            slice of gate above its own slice of up).
        expert: sharded over the expert-tensor-parallel group instead of the tensor-parallel one.
    """

    name: str
    hf: tuple[str, ...]
    kind: Kind
    expert: bool = False


def entries(model: HFModel, config: TransformerConfig, head: Literal["policy", "critic"] = "policy") -> list[Entry]:
    """All entries of a model in layer order. A critic's value head has no HF tensor and therefore no entry."""
    out = [Entry("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocab")]
    for layer in range(config.num_layers):
        out += _latent_attention(layer, model) if model.latent_attention else _attention(layer, config)
        out += _norms(layer)
        out += _moe(layer, config) if model.is_moe_layer(layer) else _mlp(layer)
    out.append(Entry("decoder.final_layernorm.weight", ("model.norm.weight",), "replicated"))
    if head == "policy" and not model.tied:
        out.append(Entry("output_layer.weight", ("lm_head.weight",), "vocab"))
    return out


def mtp_tensors(model: HFModel, names: Iterable[str]) -> set[str]:
    """Those of the names on disk that belong to multi-token-prediction layers, which count on after the decoder's.

    Such layers draft tokens in an engine. No model here builds them: their tensors are carried along as they are.
    """
    first = model.raw["num_hidden_layers"]
    layers = range(first, first + model.num_mtp_layers)
    matches = ((name, _HF_LAYER.match(name)) for name in names)
    return {name for name, match in matches if match and int(match[1]) in layers}


def _attention(layer: int, config: TransformerConfig) -> Iterator[Entry]:
    ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
    for leaf in ("weight", "bias") if config.add_qkv_bias else ("weight",):
        qkv = tuple(f"{theirs}self_attn.{part}_proj.{leaf}" for part in "qkv")
        yield Entry(f"{ours}self_attention.linear_qkv.{leaf}", qkv, "qkv")
    if config.qk_layernorm:
        for part in "qk":
            name = f"{ours}self_attention.{part}_layernorm.weight"
            yield Entry(name, (f"{theirs}self_attn.{part}_norm.weight",), "replicated")
    yield Entry(ours + "self_attention.linear_proj.weight", (theirs + "self_attn.o_proj.weight",), "row")


_LATENT_ATTENTION: dict[str, tuple[str, Kind]] = {
    "linear_q_down_proj.weight": ("q_a_proj.weight", "replicated"),
    "q_layernorm.weight": ("q_a_layernorm.weight", "replicated"),
    "linear_q_up_proj.weight": ("q_b_proj.weight", "column"),
    "linear_kv_down_proj.weight": ("kv_a_proj_with_mqa.weight", "replicated"),
    "kv_layernorm.weight": ("kv_a_layernorm.weight", "replicated"),
    "linear_kv_up_proj.weight": ("kv_b_proj.weight", "column"),
    "linear_proj.weight": ("o_proj.weight", "row"),
}
_INDEXER: dict[str, tuple[str, Kind]] = {
    "core_attention.indexer.linear_wq_b.weight": ("indexer.wq_b.weight", "replicated"),
    "core_attention.indexer.linear_wk.weight": ("indexer.wk.weight", "replicated"),
    "core_attention.indexer.k_norm.weight": ("indexer.k_norm.weight", "replicated"),
    "core_attention.indexer.k_norm.bias": ("indexer.k_norm.bias", "replicated"),
    "core_attention.indexer.linear_weights_proj.weight": ("indexer.weights_proj.weight", "replicated"),
}


def _latent_attention(layer: int, model: HFModel) -> Iterator[Entry]:
    has_indexer = bool(model.indexer_types) and model.indexer_types[layer] == "full"
    for ours, (theirs, kind) in (_LATENT_ATTENTION | (_INDEXER if has_indexer else {})).items():
        name = f"decoder.layers.{layer}.self_attention.{ours}"
        yield Entry(name, (f"model.layers.{layer}.self_attn.{theirs}",), kind)


def _norms(layer: int) -> Iterator[Entry]:
    ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
    yield Entry(ours + "input_layernorm.weight", (theirs + "input_layernorm.weight",), "replicated")
    yield Entry(ours + "pre_mlp_layernorm.weight", (theirs + "post_attention_layernorm.weight",), "replicated")


def _gated(ours: str, theirs: str, expert: bool = False) -> Iterator[Entry]:
    gate_up = (theirs + "gate_proj.weight", theirs + "up_proj.weight")
    yield Entry(ours + "linear_fc1.weight", gate_up, "gate_up", expert)
    yield Entry(ours + "linear_fc2.weight", (theirs + "down_proj.weight",), "row", expert)


def _mlp(layer: int) -> Iterator[Entry]:
    yield from _gated(f"decoder.layers.{layer}.mlp.", f"model.layers.{layer}.mlp.")


def _moe(layer: int, config: TransformerConfig) -> Iterator[Entry]:
    ours, theirs = f"decoder.layers.{layer}.mlp.", f"model.layers.{layer}.mlp."
    yield Entry(ours + "router.weight", (theirs + "gate.weight",), "replicated")
    if config.moe_router_enable_expert_bias:
        yield Entry(ours + "router.expert_bias", (theirs + "gate.e_score_correction_bias",), "replicated")
    for expert in range(config.num_moe_experts):
        yield from _gated(f"{ours}experts.local_experts.{expert}.", f"{theirs}experts.{expert}.", expert=True)
    if config.moe_shared_expert_intermediate_size:
        yield from _gated(ours + "shared_experts.", theirs + "shared_experts.")


# Transformer Engine keeps a norm inside the linear after it, and an expert's weights in one grouped module.
_SPELLINGS = (
    (re.compile(r"self_attention\.linear_qkv\.layer_norm_weight$"), "input_layernorm.weight"),
    (re.compile(r"self_attention\.linear_(q|kv)_up_proj\.layer_norm_weight$"), r"self_attention.\1_layernorm.weight"),
    (re.compile(r"mlp\.linear_fc1\.layer_norm_weight$"), "pre_mlp_layernorm.weight"),
    (re.compile(r"experts\.(linear_fc[12])\.weight(\d+)$"), r"experts.local_experts.\2.\1.weight"),
)
_HF_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_LAYER = re.compile(r"(?<=decoder\.layers\.)\d+")
_EXPERT = re.compile(r"(?<=experts\.local_experts\.)\d+")


def global_name(local_name: str, layer_offset: int, expert_offset: int) -> str:
    """The global name of a parameter that a rank calls ``local_name``, in the native layers' spelling."""
    name = local_name
    for pattern, spelling in _SPELLINGS:
        name = pattern.sub(spelling, name)
    name = _LAYER.sub(lambda m: str(int(m[0]) + layer_offset), name)
    return _EXPERT.sub(lambda m: str(int(m[0]) + expert_offset), name)


def shard(kind: Kind, tensors: list[torch.Tensor], config: TransformerConfig, rank: int, size: int) -> torch.Tensor:
    """The slice of a Megatron parameter that rank ``rank`` of ``size`` holds, from its full HF tensors.

    ``vocab`` tensors must have been padded by the caller so that ``size`` divides their rows.
    """
    if kind == "replicated":
        return tensors[0]
    if kind == "gate_up":
        return torch.cat([t.chunk(size)[rank] for t in tensors])
    full = _interleave_qkv(tensors, config) if kind == "qkv" else tensors[0]
    return full.chunk(size, dim=1 if kind == "row" else 0)[rank]


def unshard(kind: Kind, shards: list[torch.Tensor], config: TransformerConfig) -> list[torch.Tensor]:
    """The full HF tensors from the shards of all tensor-parallel ranks, in rank order: the inverse of :func:`shard`."""
    if kind == "replicated":
        return [shards[0]]
    if kind == "gate_up":
        halves = [s.chunk(2) for s in shards]
        return [torch.cat([h[i] for h in halves]) for i in range(2)]
    full = torch.cat(shards, dim=1 if kind == "row" else 0)
    return _separate_qkv(full, config) if kind == "qkv" else [full]


def _interleave_qkv(tensors: list[torch.Tensor], config: TransformerConfig) -> torch.Tensor:
    """q ``[heads·d, …]``, k and v ``[groups·d, …]`` → ``[groups·(heads/groups + 2)·d, …]``, as Megatron fuses them."""
    groups, dim = config.num_query_groups, config.kv_channels
    rest = tensors[0].shape[1:]
    return torch.cat([t.reshape(groups, -1, dim, *rest) for t in tensors], dim=1).reshape(-1, *rest)


def _separate_qkv(full: torch.Tensor, config: TransformerConfig) -> list[torch.Tensor]:
    groups, dim = config.num_query_groups, config.kv_channels
    rest = full.shape[1:]
    sizes = [config.num_attention_heads // groups, 1, 1]
    parts = full.reshape(groups, -1, dim, *rest).split(sizes, dim=1)
    return [part.reshape(-1, *rest) for part in parts]
