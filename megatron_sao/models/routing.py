"""The choice of experts: replaying the engine's in the policy, and how evenly it loads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class RoutedSeqParams(PackedSeqParams):
    """Packed sequences with what layers must know of their tokens. Megatron hands this object to every layer, and to
    the same layer again when it recomputes it, so that a layer is always told of the micro-batch it is working on.

    Attributes:
        real_tokens: bool [T], False for padding.
        routed_experts: integers [T, MoE layers, top_k], -1 where the router chooses by itself; None: everywhere.
        selections: by layer number, the keys that its indexer chose (models/dsa.py).
    """

    real_tokens: torch.Tensor | None = None
    routed_experts: torch.Tensor | None = None
    selections: dict[int, list[torch.Tensor | None]] = field(default_factory=dict)


class ExpertChoice:
    """Chooses the experts of one layer, in the place that Megatron has for its own ``RouterReplay``.

    That one is not used because it is told globally whether a forward or a recomputation comes next, which no caller
    of a pipeline schedule can know; because it keeps one list over all models of a process; and because it has no
    tokens without a record. The router turns the choice into probabilities as ever: its own scores of these experts,
    normalised and scaled, so that its gradient is that of the experts in use.
    """

    def __init__(self, index: int, config: TransformerConfig) -> None:
        self.index = index  # among the MoE layers of the whole model
        self.load = torch.zeros(config.num_moe_experts, dtype=torch.int64, device=torch.cuda.current_device())
        self._sequence_parallel = config.sequence_parallel
        self._real: torch.Tensor | None = None
        self._recorded: torch.Tensor | None = None

    def begin(self, _layer: torch.nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        """Before the layer runs: take this rank's tokens of the micro-batch."""
        tokens: RoutedSeqParams = kwargs["packed_seq_params"]
        self._real, self._recorded = self._own(tokens.real_tokens), None
        if tokens.routed_experts is not None:
            self._recorded = self._own(tokens.routed_experts)[:, self.index].long()

    def _own(self, per_token: torch.Tensor) -> torch.Tensor:
        if not self._sequence_parallel:
            return per_token
        parts = per_token.chunk(parallel_state.get_tensor_model_parallel_world_size())
        return parts[parallel_state.get_tensor_model_parallel_rank()]

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        own_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores ``[t, E]`` → those of the chosen experts and their ids, ``[t, top_k]`` each; Megatron calls it."""
        values, experts = own_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self._recorded is not None:
            experts = torch.where(self._recorded < 0, experts, self._recorded)
            values = scores.gather(1, experts)
        if torch.is_grad_enabled():  # once per training pass: of a recomputed layer only the second run has gradients
            chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, experts, True)
            self.load += (chosen & self._real[:, None]).sum(0)
        return values, experts


def attach_expert_choice(chunks: list[GPTModel]) -> list[ExpertChoice]:
    """Give every router of this rank an :class:`ExpertChoice`. From then on the chunks need ``RoutedSeqParams``."""
    choices = []
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            if isinstance(layer.mlp, MoELayer):
                index = sum(chunk.config.moe_layer_freq[: layer.layer_number - 1])
                choices.append(ExpertChoice(index, chunk.config))
                layer.mlp.router.router_replay = choices[-1]
                layer.register_forward_pre_hook(choices[-1].begin, with_kwargs=True)
    return choices


def expert_load(choices: list[ExpertChoice], config: TransformerConfig) -> dict[str, float]:
    """How many tokens went to the busiest and to the idlest expert of any layer, as a multiple of an even share, since
    the last call; nothing for a dense model. Over all micro-batches, ranks and pipeline stages; collective."""
    if not config.num_moe_experts:
        return {}
    device = torch.cuda.current_device()
    load = torch.zeros(sum(config.moe_layer_freq), config.num_moe_experts, dtype=torch.int64, device=device)
    for choice in choices:
        load[choice.index] = choice.load
        choice.load.zero_()
    dist.all_reduce(load)  # every (token, layer) pair is one rank's: expert-parallel ranks route their own tokens
    share = load * config.num_moe_experts / load.sum(1, keepdim=True).clamp(min=1)
    return {"moe/load_max": share.max().item(), "moe/load_min": share.min().item()}
