"""Multi-latent attention from Megatron's own module and the parts of it that are not in Megatron's local layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig

# As in transformers, whatever the config says. SGLang and Megatron's Transformer Engine layers take rms_norm_eps, which
# is 1e-5 for GLM-5: far below a latent's variance either way.
LATENT_NORM_EPSILON = 1e-6


class DuplicatedLinear(torch.nn.Linear):
    """A linear without bias that every tensor-parallel rank holds whole and applies to its share of the sequence;
    Megatron adds up the ranks' gradients. Returns the output and no bias, as Megatron's linears do."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **_: Any) -> None:
        device = torch.cuda.current_device()
        super().__init__(input_size, output_size, bias=False, device=device, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        return F.linear(hidden, self.weight), None


class Float32Linear(DuplicatedLinear):
    """One that computes in float32 and whose weight stays so when the model around it is cast."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig) -> None:
        super().__init__(input_size, output_size, config=config)
        self.weight.data = self.weight.data.float()

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        return super().forward(hidden.float())

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Float32Linear:
        def move(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(move, recurse)


class LatentAttention(MLASelfAttention):
    """Megatron's, with a core attention that takes values of another width than the keys as they are."""

    def _run_core_attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,
    ) -> torch.Tensor:
        options.pop("attention_bias", None)
        return self.core_attention(query, key, value, attention_mask, **options)


def bind_duplicated_linear() -> None:
    """Let Megatron take :class:`DuplicatedLinear` where it knows Transformer Engine's alone. The column-parallel
    linears that it would also take are silently wrong under tensor parallelism: nothing adds up the gradients of the
    keys' rotary part."""
    multi_latent_attention.TELinear = DuplicatedLinear
