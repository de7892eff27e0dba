"""Attention over packed sequences on any device: torch's scaled dot products and Megatron's rotary embedding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings import apply_rotary_pos_emb
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import attention, multi_latent_attention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.attention.bias import causal_lower_right

from megatron_sao.data.packing import context_positions, in_pack_order

QUERIES = 512  # of a run that sparse attention takes at a time: no more of their scores and masks ever exist


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
        selection: Sequence[torch.Tensor | None] | None = None,
    ) -> torch.Tensor:
        """``selection``: per run of queries (:func:`query_runs`) the keys that each sees, counted from the run's first,
        int32 ``[queries, top_k]``, or None for all up to its own position."""
        query, key, value = (t.squeeze(1) if t.dim() == 4 else t for t in (query, key, value))
        cu_seqlens = packed_seq_params.cu_seqlens_q
        if self.context_group.size() > 1:
            dims = key.size(-1), value.size(-1)
            key, value = gather_context(torch.cat([key, value], -1), cu_seqlens, self.context_group).split(dims, -1)
        runs = query_runs(cu_seqlens, self.context_group)
        queries = query.split([length for length, _, _ in runs])
        parts = [
            attend(q, key[start:end], value[start:end], self.softmax_scale)
            if chosen is None
            else AttentionToChosen.apply(q, key[start:end], value[start:end], chosen, self.softmax_scale)
            for q, (_, start, end), chosen in zip(queries, runs, selection or [None] * len(runs), strict=True)
        ]
        return torch.cat(parts).flatten(1)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention of a sequence's last queries, the last of which sees every key; ``mask``: bool ``[queries, keys]``."""
    causal = mask is None and query.size(0) == key.size(0)
    if mask is None and not causal:
        mask = causal_lower_right(query.size(0), key.size(0))
    return F.scaled_dot_product_attention(
        *(t.transpose(0, 1).unsqueeze(0) for t in (query, key, value)),
        attn_mask=mask,
        is_causal=causal,
        scale=scale,
        enable_gqa=query.size(1) != key.size(1),
    )[0].transpose(0, 1)


class AttentionToChosen(torch.autograd.Function):
    """:func:`attend` to the chosen keys alone, int32 ``[queries, top_k]``.

    The mask of a block of queries exists while that block is worked on, and is made again in the backward pass, which
    starts from the inputs: torch would keep the masks of all blocks, in the dtype of the scores.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, chosen: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value, chosen)
        ctx.scale = scale
        blocks = query_blocks(query.size(0), key.size(0))
        return torch.cat([
            attend(query[rows], key[:seen], value[:seen], scale, _mask(chosen[rows], seen)) for rows, seen in blocks
        ])  # fmt: skip

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, chosen = ctx.saved_tensors
        wide = torch.promote_types(key.dtype, torch.float32)  # of the sums over blocks
        sums = torch.empty_like(query), torch.zeros_like(key, dtype=wide), torch.zeros_like(value, dtype=wide)
        for rows, seen in query_blocks(query.size(0), key.size(0)):
            inputs = [t.detach().requires_grad_() for t in (query[rows], key[:seen], value[:seen])]
            with torch.enable_grad():
                output = attend(*inputs, ctx.scale, _mask(chosen[rows], seen))
            of_query, of_key, of_value = torch.autograd.grad(output, inputs, gradient[rows])
            sums[0][rows] = of_query
            sums[1][:seen] += of_key
            sums[2][:seen] += of_value
        return sums[0], sums[1].to(key.dtype), sums[2].to(value.dtype), None, None


def query_blocks(queries: int, keys: int) -> Iterator[tuple[slice, int]]:
    """The blocks in which sparse attention goes through a run of queries, the last of which sees every key, and how
    many keys the last of each block sees."""
    for start in range(0, queries, QUERIES):
        end = min(start + QUERIES, queries)
        yield slice(start, end), keys - queries + end


def _mask(chosen: torch.Tensor, keys: int) -> torch.Tensor:
    mask = torch.zeros(chosen.size(0), keys, dtype=torch.bool, device=chosen.device)
    return mask.scatter_(1, chosen.long(), True)


def query_runs(cu_seqlens: torch.Tensor, context_group: torch.distributed.ProcessGroup) -> list[tuple[int, int, int]]:
    """For each run of consecutive queries of this context-parallel rank: their number, and start and end in the pack
    of what the last of them sees."""
    rank, size = context_group.rank(), context_group.size()
    if size == 1:
        return [(end - start, start, end) for start, end in pairwise(cu_seqlens.tolist())]
    runs = []
    for start, end in pairwise(cu_seqlens.tolist()):
        length = (end - start) // (2 * size)
        runs += [(length, start, start + (index + 1) * length) for index in (rank, 2 * size - 1 - rank)]
    return runs


def gather_context(
    local: torch.Tensor, cu_seqlens: torch.Tensor, context_group: torch.distributed.ProcessGroup
) -> torch.Tensor:
    """The whole pack's tokens ``[T, …]`` in its order from this context-parallel rank's. Collective over these ranks;
    backward, it sums what the queries of all of them contribute."""
    if context_group.size() == 1:
        return local
    return in_pack_order(
        gather_from_sequence_parallel_region(local, group=context_group), cu_seqlens, context_group.size()
    )


def apply_packed_rotary(
    tensor: torch.Tensor,
    freqs: torch.Tensor,
    config: TransformerConfig,
    cu_seqlens: torch.Tensor | None = None,
    mscale: float = 1.0,
    cp_group: Any = None,
    **options: Any,
) -> torch.Tensor:
    """Megatron's ``apply_rotary_pos_emb`` for all packed sequences at once: tensor ``[tokens, heads, dim]``, freqs
    ``[positions, 1, 1, rotated]``."""
    if cu_seqlens is None or cp_group is None or config.apply_rope_fusion:
        return apply_rotary_pos_emb(tensor, freqs, config, cu_seqlens, mscale, cp_group, **options)
    _, positions = context_positions(cu_seqlens, cp_group.rank(), cp_group.size())
    rotated = apply_rotary_pos_emb(tensor.unsqueeze(1), freqs[positions], config, None, mscale, cp_group, **options)
    return rotated.squeeze(1)


def vectorise_packed_rotary() -> None:
    """Rotate all packed sequences at once. Unfused, upstream loops over them in Python, forward and backward: a third
    of a step for short sequences. The arithmetic is the same."""
    attention.apply_rotary_pos_emb = multi_latent_attention.apply_rotary_pos_emb = apply_packed_rotary
