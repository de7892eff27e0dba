"""Log-probabilities of given tokens from vocabulary-parallel logits."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region, vocab_parallel_cross_entropy


def mask_vocab_padding(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Set the logits of rows that only pad the vocabulary to −inf; logits are this rank's share ``[s, b, v / tp]``."""
    first = parallel_state.get_tensor_model_parallel_rank() * logits.shape[-1]
    real = vocab_size - first
    if real >= logits.shape[-1]:
        return logits
    padding = torch.arange(logits.shape[-1], device=logits.device) >= real
    return logits.masked_fill(padding, float("-inf"))


def token_logprobs(logits: torch.Tensor, labels: torch.Tensor, temperature: float) -> torch.Tensor:
    """``log softmax(logits / temperature)[labels]`` in float32.

    Args:
        logits: this tensor-parallel rank's share of the vocabulary, ``[s, b, v / tp]``.
        labels: token ids ``[s, b]``.

    Returns:
        ``[s, b]`` float32, the same on every tensor-parallel rank.
    """
    return -vocab_parallel_cross_entropy(logits.float() / temperature, labels)


def token_entropy(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Entropy in nats of ``softmax(logits / temperature)``, ``[s, b]`` float32; arguments as :func:`token_logprobs`."""
    group = parallel_state.get_tensor_model_parallel_group()
    scaled = logits.float() / temperature
    maximum = scaled.detach().max(dim=-1, keepdim=True).values
    dist.all_reduce(maximum, dist.ReduceOp.MAX, group=group)
    scaled = scaled - maximum
    weights = scaled.exp()
    total = reduce_from_tensor_model_parallel_region(weights.sum(-1))
    mean = reduce_from_tensor_model_parallel_region(torch.where(weights > 0, weights * scaled, 0.0).sum(-1)) / total
    return total.log() - mean


def support_logprobs(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float, support: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`token_logprobs` and :func:`token_entropy` over the support of truncated sampling.

    Args:
        logits: this tensor-parallel rank's share of the vocabulary, ``[n, 1, v / tp]``.
        labels: ``[n, 1]``; a label outside its support has log-probability -inf.
        support: ids ``[n, K]``, filled up with -1.

    Returns:
        Log-probabilities and entropies, ``[n, 1]`` float32, the same on every tensor-parallel rank.
    """
    first = parallel_state.get_tensor_model_parallel_rank() * logits.shape[-1]
    local = support - first
    mine = (local >= 0) & (local < logits.shape[-1]) & (support >= 0)
    gathered = logits[:, 0].gather(1, local.clamp(0, logits.shape[-1] - 1)).float()
    # each id lies on one rank, so that the sum over ranks is the logit itself
    gathered = reduce_from_tensor_model_parallel_region(torch.where(mine, gathered, 0.0)) / temperature
    logprobs = gathered.masked_fill(support < 0, float("-inf")).log_softmax(-1)
    chosen = torch.where(support == labels, logprobs, 0.0).sum(-1, keepdim=True)
    chosen = chosen.masked_fill(~(support == labels).any(-1, keepdim=True), float("-inf"))
    finite = torch.where(support >= 0, logprobs, 0.0)
    return chosen, -(finite.exp() * finite * (support >= 0)).sum(-1, keepdim=True)
