"""DeepSeek sparse attention (DSA): an indexer chooses the keys that each query sees.

The choice has no gradient, so that RL cannot train an indexer; it takes an objective of its own. Here it is frozen.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings import RotaryEmbedding, YarnRotaryEmbedding
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.experimental_attention_variant.dsa import source_dsa_compute_layer
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import MLATransformerConfig

from megatron_sao.models.attention import (
    PackedSDPA,
    apply_packed_rotary,
    gather_context,
    query_blocks,
    query_runs,
)
from megatron_sao.models.mla import DuplicatedLinear, Float32Linear, LatentAttention
from megatron_sao.models.routing import RoutedSeqParams

Selection = list[torch.Tensor | None]  # per run of queries as in PackedSDPA


def freeze_indexers(chunks: list[GPTModel]) -> None:
    """Keep optimizer and gradient buffers from the indexers, if the model has any."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if ".core_attention.indexer." in name:
                parameter.requires_grad_(False)


class Indexer(MegatronModule):
    """Scores every key before a query and chooses the best ``dsa_indexer_topk``.

    The score of a key is the sum over heads of a weight, from the query's token, times ReLU(q·k / √dim), in float32.
    """

    def __init__(self, config: MLATransformerConfig, groups: ProcessGroupCollection) -> None:
        super().__init__(config=config)
        self.heads, self.dim = config.dsa_indexer_n_heads, config.dsa_indexer_head_dim
        self.top_k, self.groups = config.dsa_indexer_topk, groups
        self.linear_wq_b = DuplicatedLinear(config.q_lora_rank, self.heads * self.dim, config=config)
        self.linear_wk = DuplicatedLinear(config.hidden_size, self.dim, config=config)
        device, dtype = torch.cuda.current_device(), config.params_dtype
        self.k_norm = torch.nn.LayerNorm(self.dim, config.dsa_indexer_k_norm_epsilon, device=device, dtype=dtype)
        self.linear_weights_proj = Float32Linear(config.hidden_size, self.heads, config=config)

    @torch.no_grad()
    def forward(
        self,
        hidden: torch.Tensor,
        query_latent: torch.Tensor,
        rotary: RotaryEmbedding | YarnRotaryEmbedding,
        tokens: RoutedSeqParams,
    ) -> Selection:
        """Choose for this rank's queries.

        Args:
            hidden: the layer's normalised input, ``[T, 1, hidden]``; a share of it under sequence parallelism.
            query_latent: the normalised query latent, ``[T, q_lora_rank]``, shared likewise.
            rotary: the attention's own.
        """
        if self.config.sequence_parallel:
            hidden, query_latent = (
                gather_from_sequence_parallel_region(t, group=self.groups.tp) for t in (hidden, query_latent)
            )
        hidden = hidden.squeeze(1)
        queries = self.linear_wq_b(query_latent)[0].unflatten(-1, (self.heads, self.dim))
        keys = self.k_norm(self.linear_wk(hidden)[0]).unsqueeze(1)
        queries, keys = (self._rotate(t, rotary, tokens).float() for t in (queries, keys))
        weights = self.linear_weights_proj(hidden)[0] * self.heads**-0.5
        keys = gather_context(keys.squeeze(1), tokens.cu_seqlens_q, self.groups.cp)
        runs = query_runs(tokens.cu_seqlens_q, self.groups.cp)
        lengths = [length for length, _, _ in runs]
        return [
            self._choose(q, keys[start:end], w)
            for q, w, (_, start, end) in zip(queries.split(lengths), weights.split(lengths), runs, strict=True)
        ]

    def _rotate(
        self, tensor: torch.Tensor, rotary: RotaryEmbedding | YarnRotaryEmbedding, tokens: RoutedSeqParams
    ) -> torch.Tensor:
        """The first of the head's dimensions, in interleaved pairs; the others have no position."""
        freqs, mscale = rotary(tokens.max_seqlen_q, packed_seq=True), 1.0
        if isinstance(freqs, tuple):  # YaRN's
            freqs, mscale = freqs
        return apply_packed_rotary(
            tensor, freqs, self.config, tokens.cu_seqlens_q, mscale, self.groups.cp, mla_rotary_interleaved=True
        )

    def _choose(self, queries: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor | None:
        """For queries ``[n, heads, dim]``, the last of which sees every key ``[m, dim]``, and their weights
        ``[n, heads]`` the chosen keys, int32 ``[n, top_k]``; None where each sees all before it. One that sees fewer
        than top_k repeats the first."""
        n, m = queries.size(0), keys.size(0)
        if m <= self.top_k:
            return None
        blocks = query_blocks(n, m)
        return torch.cat([self._best(queries[rows], keys[:seen], weights[rows]) for rows, seen in blocks])

    def _best(self, queries: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Of equal scores the earlier key is taken, whatever order a device's top-k leaves them in."""
        n, m = queries.size(0), keys.size(0)
        scores = queries.new_zeros(n, m)
        for head in range(self.heads):  # one at a time: the scores of all would be heads times as large
            scores += weights[:, head, None] * (queries[:, head] @ keys.T * self.dim**-0.5).relu()
        causal = torch.ones(n, m, dtype=torch.bool, device=keys.device).tril(m - n)
        scores.masked_fill_(~causal, -torch.inf)
        worst = scores.topk(min(self.top_k, m)).values[:, -1:]
        better, equal = scores > worst, scores == worst
        room = self.top_k - better.sum(-1, keepdim=True)
        mask = causal & (better | equal & (equal.cumsum(-1) <= room))
        rows, positions = mask.nonzero(as_tuple=True)
        counts = mask.sum(-1)
        columns = torch.arange(len(rows), device=keys.device) - (counts.cumsum(0) - counts)[rows]
        chosen = torch.zeros(n, self.top_k, dtype=torch.int32, device=keys.device)
        chosen[rows, columns] = positions.int()
        return chosen


class SparseSDPA(PackedSDPA):
    """:class:`PackedSDPA` over the keys that an indexer chooses: this layer's, or one of an earlier layer of the same
    pipeline stage, whose choice this layer shares."""

    requires_dsa_inputs = True  # Megatron then passes x and qr

    def __init__(
        self,
        config: MLATransformerConfig,
        layer_number: int,
        *args: Any,
        pg_collection: ProcessGroupCollection,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, layer_number, *args, pg_collection=pg_collection, **kwargs)
        self.chooser = source_dsa_compute_layer(
            layer_number, config.dsa_indexer_skip_topk_offset, config.dsa_indexer_topk_freq
        )
        self.indexer = Indexer(config, pg_collection) if self.chooser == layer_number else None

    def forward(
        self,
        *tensors: torch.Tensor | None,
        x: torch.Tensor,
        qr: torch.Tensor,
        rotary: RotaryEmbedding | YarnRotaryEmbedding,
        packed_seq_params: RoutedSeqParams,
        **options: Any,
    ) -> torch.Tensor:
        selection = packed_seq_params.selections.get(self.chooser)
        if selection is None:
            selection = self.indexer(x, qr, rotary, packed_seq_params)
            if self.config.dsa_indexer_topk_freq > 1:  # for the layers that share it, and for their recomputation
                packed_seq_params.selections[self.chooser] = selection
        return super().forward(*tensors, packed_seq_params=packed_seq_params, selection=selection, **options)


class SparseLatentAttention(LatentAttention):
    """Multi-latent attention whose core is a :class:`SparseSDPA`."""

    def _run_core_attention(self, *tensors: torch.Tensor | None, **options: Any) -> torch.Tensor:
        return super()._run_core_attention(*tensors, rotary=self.rotary_pos_emb, **options)
