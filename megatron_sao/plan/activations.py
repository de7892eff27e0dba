"""What a forward pass keeps for its backward pass, in bytes.

Models on the meta device cannot be run: where a token goes depends on its values. So this is arithmetic on the widths
of the model, for the native layers, with fused norms as CUDA has them; tests/distributed/test_plan_memory.py compares
it with what autograd keeps. Transformer Engine keeps less. Experts are taken to be evenly loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_sao.config import ParallelConfig, RunConfig
from megatron_sao.models.attention import QUERIES
from megatron_sao.models.hf import HFModel
from megatron_sao.plan.simulate import LayerKind, SimulatedModel
from megatron_sao.trainer.logprobs import COLUMNS, ROWS

_FLOAT, _INDEX = 4, 8  # bytes
_HEADS = ("output_layer.weight", "word_embeddings.weight")  # the latter where they are tied


@dataclass(frozen=True)
class Tokens:
    """Of a micro-batch.

    Attributes:
        local: on a context-parallel rank, which its attention and the wide part of its linears see.
        split: the share of a tensor-parallel rank under sequence parallelism, else the same.
        context: those whose keys and values a rank gathers.
    """

    local: int
    split: int
    context: int

    @classmethod
    def at_most(cls, config: RunConfig) -> Tokens:
        """In a micro-batch that is filled to the limit, or holds one trajectory of the greatest length."""
        parallel = config.parallel
        local = -(-max(parallel.max_tokens_per_microbatch, config.rollout.max_tokens) // parallel.cp)
        return cls(local, -(-local // parallel.tp) if parallel.sequence_parallel else local, local * parallel.cp)


@dataclass(frozen=True)
class Activations:
    """Attributes:
    kept: what the micro-batches in flight keep.
    working: what one layer needs beside that while it runs forward or backward.
    selections: the keys that layers of sparse attention have chosen, and what one of them works with.
    logprobs: of the vocabulary projection and its gradient.
    """

    kept: int
    working: int
    selections: int
    logprobs: int

    @property
    def total(self) -> int:
        return self.kept + self.working + self.selections + self.logprobs


def activations(
    config: RunConfig, model: HFModel, megatron: TransformerConfig, stage: int, policy: SimulatedModel
) -> Activations:
    """Of the model that ``policy`` describes, on pipeline stage ``stage``. The critic, whose turn comes before the
    policy's, needs no more."""
    layer = Layer(model, megatron, Tokens.at_most(config))
    flying, recompute = in_flight(config.parallel, stage), config.model.recompute
    needs = {kind: layer.kept(kind, recompute == "selective") for kind in set(policy.layers)}
    if recompute == "full":
        per_microbatch, again = len(policy.layers) * layer.entrance, max(needs.values())
    else:
        per_microbatch, again = sum(needs[kind] for kind in policy.layers), 0
    # where every layer chooses for itself and is recomputed, it chooses again
    remembered = recompute == "none" or megatron.dsa_indexer_topk_freq > 1
    choices = flying * sum(kind.indexer for kind in policy.layers) if remembered else 1
    return Activations(
        kept=int(flying * per_microbatch) + (layer.last_stage if policy.last else 0),
        working=again + max(layer.gradients(kind) for kind in needs),
        selections=int(choices * layer.choice) + layer.choosing if layer.sparse else 0,
        logprobs=layer.logprobs(policy) if policy.last else 0,
    )


def in_flight(parallel: ParallelConfig, stage: int) -> float:
    """Micro-batches of a stage that have gone forward and not yet backward, where a step has enough of them. With
    interleaving a rank's chunks of layers count as parts of one."""
    ahead = parallel.pp - stage - 1
    if parallel.vpp is None:
        return ahead + 1
    return (2 * ahead + (parallel.vpp - 1) * parallel.pp + 1) / parallel.vpp


class Layer:
    """Arithmetic on the widths of a model's layers, as one tensor-parallel rank has them."""

    def __init__(self, model: HFModel, megatron: TransformerConfig, tokens: Tokens) -> None:
        self.megatron, self.tokens, self.size = megatron, tokens, megatron.params_dtype.itemsize
        self.rotated = int(megatron.kv_channels * model.rope["partial_rotary_factor"])
        self.tp, self.etp = megatron.tensor_model_parallel_size, megatron.expert_tensor_parallel_size
        self.heads = megatron.num_attention_heads // self.tp
        self.groups = max(megatron.num_query_groups // self.tp, 1)
        sparse = megatron.experimental_attention_variant == "dsa"
        self.sparse = sparse and tokens.context > megatron.dsa_indexer_topk  # else all keys are seen
        if megatron.multi_latent_attention:
            self.groups, self.rotated = self.heads, megatron.qk_pos_emb_head_dim
            self.key, self.value = megatron.qk_head_dim + self.rotated, megatron.v_head_dim
        else:
            self.key = self.value = megatron.kv_channels

    @property
    def entrance(self) -> int:
        """The input of a layer."""
        return self.tokens.split * self.megatron.hidden_size * self.size

    def kept(self, kind: LayerKind, core_again: bool) -> int:
        """All that one layer keeps without recomputation, or (``core_again``) with that of the core attention."""
        norms = 2 * (2 * self.entrance + self.tokens.split * _FLOAT)
        attention = self._latent_projections() if self.megatron.multi_latent_attention else self._projections()
        wide = self.megatron.ffn_hidden_size // self.tp
        mlp = self._experts() if kind.moe else self._gated(self.tokens.local, wide)
        return norms + attention + self._core_attention(core_again) + mlp

    def _projections(self) -> int:
        """Grouped-query attention up to its core: what QK-norm and rotary embedding keep."""
        angles = 4 * self.rotated * self.size  # sine and cosine, for queries and for keys
        if not self.megatron.qk_layernorm:
            return self.tokens.local * angles
        fused = (self.heads + 2 * self.groups) * self.key
        copied = self.heads * self.key if self.heads > self.groups else 0
        return self.tokens.local * (angles + (fused + copied) * self.size + (self.heads + self.groups) * _FLOAT)

    def _latent_projections(self) -> int:
        """Multi-latent attention up to its core: latents before and after their norms, and the rotary embedding."""
        m = self.megatron
        latents = 2 * (m.q_lora_rank or 0) + 2 * m.kv_lora_rank + self.rotated
        return (self.tokens.split * latents + self.tokens.local * 4 * self.rotated) * self.size

    def _core_attention(self, again: bool) -> int:
        """Queries of the rank's own tokens, keys and values, which context parallelism gathers, and the output: as the
        kernel leaves it, and put together for the projection."""
        local, context = self.tokens.local, self.tokens.context
        if self.megatron.multi_latent_attention:
            values = self.heads * self.value
        elif self.megatron.qk_layernorm:
            values = 0  # part of the fused projection, which the norms keep
        else:
            values = (self.heads + 2 * self.groups) * self.value  # the fused projection for their sake
        kept = local * (self.heads * (self.key + self.value) + self.groups * self.key + values) * self.size
        if again:
            return kept
        if context > local:
            kept += (context * (self.key + self.value) - local * self.key) * self.groups * self.size
        if self.sparse:
            return kept  # its backward pass starts from its inputs
        return kept + local * self.heads * (self.value * self.size + _FLOAT)

    def _experts(self) -> int:
        """Router; routed copies of the tokens before, in and after their experts; the shared expert."""
        m = self.megatron
        router = self.tokens.split * (m.num_moe_experts * _FLOAT + m.moe_router_topk * (4 * _INDEX + 3 * _FLOAT))
        routed, width = self._routed, m.moe_ffn_hidden_size // self.etp
        inside = routed * ((2 * m.hidden_size + width) * self.size + _FLOAT) + self._gated(routed, width)
        return router + inside + self._gated(self.tokens.local, (m.moe_shared_expert_intermediate_size or 0) // self.tp)

    @property
    def _routed(self) -> int:
        return self.tokens.split * self.megatron.moe_router_topk * self.etp

    def _gated(self, tokens: int, width: int) -> int:
        """Gate and up projection, the gate's activation, the up projection once more, and their product."""
        return tokens * 5 * width * self.size

    def gradients(self, kind: LayerKind) -> int:
        """An estimate of the gradients alive at the worst moment: of the MLP's inner activations and of its input."""
        m = self.megatron
        inner = (
            self._routed * (4 * m.moe_ffn_hidden_size // self.etp + m.hidden_size)
            if kind.moe
            else self.tokens.local * 4 * m.ffn_hidden_size // self.tp
        )
        return inner * self.size + 2 * self.entrance

    @property
    def choice(self) -> int:
        """The keys that a layer of native sparse attention has chosen, int32, alive as long as their micro-batch is."""
        return self.tokens.local * self.megatron.dsa_indexer_topk * _FLOAT

    @property
    def choosing(self) -> int:
        """An estimate of what native sparse attention works with at the worst moment: four float32 matrices of a block
        of queries and all keys while it chooses; or a block's mask, once more in the model's dtype, and the gradients
        of all keys and values, in float32 while they are summed up."""
        block = min(QUERIES, self.tokens.local) * self.tokens.context
        sums = self.tokens.context * self.groups * (self.key + self.value) * (_FLOAT + self.size)
        return max(4 * _FLOAT * block, block * (1 + self.size) + sums)

    @property
    def last_stage(self) -> int:
        """Input of the final norm, and hidden states of the tokens that are predicted: here all of them."""
        tokens, hidden = self.tokens, self.megatron.hidden_size * self.size
        gathered = tokens.local * hidden if tokens.split != tokens.local else 0
        return self.entrance + tokens.split * _FLOAT + gathered + tokens.local * (hidden + 3 * _INDEX + 2 * _FLOAT)

    def logprobs(self, policy: SimulatedModel) -> int:
        """Gradients of hidden states and head, in float32 and then in the model's dtype, and the blocks of logits."""
        head = max(torch.Size(shape).numel() for name, shape in policy.tensors if name.endswith(_HEADS))
        gradients = (self.tokens.local * self.megatron.hidden_size + head) * (_FLOAT + self.size)
        return gradients + 4 * ROWS * COLUMNS * _FLOAT
