"""Layer specs: which module computes each part of a transformer layer.

``native`` layers are Megatron's own parallel linears with torch's RMSNorm and scaled-dot-product attention; they run
on any device. ``transformer_engine`` layers are Megatron's own specs, CUDA only.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_transformer_block_with_experimental_attention_variant_spec,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_mlp_module_spec_for_backend
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from megatron_sao.models.attention import PackedSDPA, vectorise_packed_rotary
from megatron_sao.models.dsa import SparseLatentAttention, SparseSDPA
from megatron_sao.models.mla import LATENT_NORM_EPSILON, DuplicatedLinear, LatentAttention, bind_duplicated_linear

# Keys of the Transformer Engine layers, whose linears own the norm before them: a checkpoint then loads into both.
_QKV_NORM_KEYS = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
_LATENT_NORM_KEYS = {
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}
_MLP_NORM_KEYS = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}


def prepare_native_layers() -> None:
    """Bind the parts of native layers that Megatron has no seam for. Before any of them is built."""
    vectorise_packed_rotary()
    bind_duplicated_linear()


def decoder_block_spec(config: TransformerConfig, layers: str, vp_stage: int | None) -> TransformerBlockSubmodules:
    """The specs of the layers that this pipeline stage builds.

    Args:
        config: the model's Megatron config.
        layers: ``native`` or ``transformer_engine``.
        vp_stage: index of the virtual pipeline stage, or None without interleaving.
    """
    if layers == "transformer_engine":
        if config.experimental_attention_variant:
            return get_transformer_block_with_experimental_attention_variant_spec(config, vp_stage=vp_stage)
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
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


class LatentRMSNorm(RMSNorm):
    """The norm of multi-latent attention's latents, with an epsilon of its own."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, **_: Any) -> torch.nn.RMSNorm:
        return RMSNorm(config, hidden_size, eps=LATENT_NORM_EPSILON)


class NativeSpecProvider(LocalSpecProvider):
    """Megatron's local modules with the two parts that are ours."""

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type:
        return RMSNorm

    def core_attention(self) -> type:
        return PackedSDPA


def _layer_spec(config: TransformerConfig, is_moe: bool, provider: NativeSpecProvider) -> ModuleSpec:
    latent = config.multi_latent_attention
    keys = {} if is_moe else dict(_MLP_NORM_KEYS)
    if not latent:
        keys |= _QKV_NORM_KEYS
    elif config.experimental_attention_variant is None:  # with DSA Megatron's are norms of their own
        keys |= _LATENT_NORM_KEYS
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=_latent_attention(config, provider) if latent else _attention(config, provider),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=get_mlp_module_spec_for_backend(
                provider, num_experts=config.num_moe_experts if is_moe else None, moe_grouped_gemm=False
            ),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=keys,
        ),
    )


def _attention(config: TransformerConfig, provider: NativeSpecProvider) -> ModuleSpec:
    qk_norm = RMSNorm if config.qk_layernorm else IdentityOp
    return ModuleSpec(
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


def _latent_attention(config: TransformerConfig, provider: NativeSpecProvider) -> ModuleSpec:
    sparse = config.experimental_attention_variant == "dsa"
    return ModuleSpec(
        module=SparseLatentAttention if sparse else LatentAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            linear_q_down_proj=DuplicatedLinear,
            linear_q_up_proj=provider.column_parallel_linear(),
            linear_kv_down_proj=DuplicatedLinear,
            linear_kv_up_proj=provider.column_parallel_linear(),
            core_attention=SparseSDPA if sparse else provider.core_attention(),
            linear_proj=provider.row_parallel_linear(),
            q_layernorm=LatentRMSNorm,
            kv_layernorm=LatentRMSNorm,
        ),
    )
