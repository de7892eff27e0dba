"""Layer specs: which module computes each part of a transformer layer.

``native`` layers are Megatron's own parallel linears with torch's RMSNorm and scaled-dot-product attention; they run
on any device. ``transformer_engine`` layers are Megatron's own spec, CUDA only.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_mlp_module_spec_for_backend
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import attention
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch.nn.attention.bias import causal_lower_right

from megatron_sao.config import ConfigError
from megatron_sao.data.packing import context_positions, in_pack_order

# Keys of the Transformer Engine layers, whose linears own the norm before them: a checkpoint then loads into both.
_FUSED_NORM_KEYS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


def decoder_block_spec(config: TransformerConfig, layers: str, vp_stage: int | None) -> TransformerBlockSubmodules:
    """The specs of the layers that this pipeline stage builds.

    Args:
        config: the model's Megatron config.
        layers: ``native`` or ``transformer_engine``.
        vp_stage: index of the virtual pipeline stage, or None without interleaving.

    Raises:
        ConfigError: the native layers do not cover the model's attention.
    """
    if layers == "transformer_engine":
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    if config.multi_latent_attention:
        raise ConfigError("multi-latent attention has no native layers yet; use model.layers=transformer_engine")
    provider = NativeSpecProvider()
    pattern = config.moe_layer_freq if config.num_moe_experts else [0] * config.num_layers
    specs = [_layer_spec(config, bool(is_moe), provider) for is_moe in pattern]
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(
        layer_specs=specs[first : first + count], layer_norm=provider.layer_norm(rms_norm=True)
    )


class RMSNorm:
    """torch's RMSNorm, its weight tagged so that Megatron reduces its gradient under sequence parallelism."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.RMSNorm:
        norm = torch.nn.RMSNorm(hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device())
        norm.weight.sequence_parallel = config.sequence_parallel
        return norm


class PackedSDPA(MegatronModule):
    """Causal attention over packed sequences with torch's scaled_dot_product_attention, one call per sequence.

    Takes query ``[tokens, heads, dim]`` and key/value ``[tokens, kv_heads, dim]`` with ``cu_seqlens`` in
    ``packed_seq_params`` and returns ``[tokens, heads * dim]``. Under context parallelism the tokens are this rank's
    (data/packing.py), ``cu_seqlens`` is the whole pack's, and keys and values are gathered from all ranks.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        *,
        pg_collection: ProcessGroupCollection,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale, self.context_group = softmax_scale, pg_collection.cp

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        query, key, value = (t.squeeze(1) if t.dim() == 4 else t for t in (query, key, value))
        cu_seqlens, rank, size = packed_seq_params.cu_seqlens_q, self.context_group.rank(), self.context_group.size()
        if size > 1:
            dims = key.size(-1), value.size(-1)
            # backward, this sums what the queries of all ranks contribute
            gathered = gather_from_sequence_parallel_region(torch.cat([key, value], -1), group=self.context_group)
            key, value = in_pack_order(gathered, cu_seqlens, size).split(dims, -1)
        chunks = _query_chunks(cu_seqlens.tolist(), rank, size)
        queries = query.split([length for length, _, _ in chunks])
        seen = [(key[start:end], value[start:end]) for _, start, end in chunks]
        return torch.cat([self._attend(q, k, v) for q, (k, v) in zip(queries, seen, strict=True)]).flatten(1)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attention of a sequence's last queries, the last of which sees every key."""
        whole = query.size(0) == key.size(0)
        return F.scaled_dot_product_attention(
            *(t.transpose(0, 1).unsqueeze(0) for t in (query, key, value)),
            attn_mask=None if whole else causal_lower_right(query.size(0), key.size(0)),
            is_causal=whole,
            scale=self.softmax_scale,
            enable_gqa=query.size(1) != key.size(1),
        )[0].transpose(0, 1)


def _query_chunks(cu_seqlens: list[int], rank: int, size: int) -> list[tuple[int, int, int]]:
    """For each run of consecutive queries of a context-parallel rank: their number, and start and end in the pack of
    what the last of them sees."""
    if size == 1:
        return [(end - start, start, end) for start, end in pairwise(cu_seqlens)]
    chunks = []
    for start, end in pairwise(cu_seqlens):
        length = (end - start) // (2 * size)
        chunks += [(length, start, start + (index + 1) * length) for index in (rank, 2 * size - 1 - rank)]
    return chunks


def vectorise_packed_rotary() -> None:
    """Rotate all packed sequences at once. Unfused, upstream loops over them in Python, forward and backward: a third
    of a step for short sequences. The arithmetic is the same."""
    original = attention.apply_rotary_pos_emb

    def apply(
        tensor: torch.Tensor,
        freqs: torch.Tensor,
        config: TransformerConfig,
        cu_seqlens: torch.Tensor | None = None,
        mscale: float = 1.0,
        cp_group: Any = None,
        **options: Any,
    ) -> torch.Tensor:
        if cu_seqlens is None or cp_group is None or config.apply_rope_fusion:
            return original(tensor, freqs, config, cu_seqlens, mscale, cp_group, **options)
        _, positions = context_positions(cu_seqlens, cp_group.rank(), cp_group.size())
        rotated = original(tensor.unsqueeze(1), freqs[positions], config, None, mscale, cp_group, **options)
        return rotated.squeeze(1)

    attention.apply_rotary_pos_emb = apply


class NativeSpecProvider(LocalSpecProvider):
    """Megatron's local modules with the two parts that are ours."""

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type:
        return RMSNorm

    def core_attention(self) -> type:
        return PackedSDPA


def _layer_spec(config: TransformerConfig, is_moe: bool, provider: NativeSpecProvider) -> ModuleSpec:
    qk_norm = RMSNorm if config.qk_layernorm else IdentityOp
    self_attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=provider.column_parallel_linear(),
            core_attention=provider.core_attention(),
            linear_proj=provider.row_parallel_linear(),
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )
    keys = {"input_layernorm.": _FUSED_NORM_KEYS["input_layernorm."]} if is_moe else _FUSED_NORM_KEYS
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=self_attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=get_mlp_module_spec_for_backend(
                provider, num_experts=config.num_moe_experts if is_moe else None, moe_grouped_gemm=False
            ),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=keys,
        ),
    )
