"""Log-probabilities and entropies of given tokens, from hidden states and the vocabulary-parallel head.

Logits are the largest tensor of a step: 8,192 tokens of a 154,880-word vocabulary are 5 GB in float32. Here they exist
one block at a time, [``ROWS``, ``COLUMNS``], forward and again backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region

ROWS, COLUMNS = 1024, 8192  # of a block of logits: 32 MB, and large enough for full speed of the matrix products


def linear_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    temperature: float,
    vocab_size: int,
    entropy_grad: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``log softmax(hidden @ weight.T / temperature)[labels]`` and the entropy of that softmax in nats.

    Args:
        hidden: ``[n, h]``, the same on every tensor-parallel rank. Its gradient is this rank's share of the sum.
        weight: this rank's rows of the head, ``[v / tp, h]``.
        labels: int64 ``[n]``.
        vocab_size: real vocabulary; the head's rows beyond it are padding and have probability 0.
        entropy_grad: whether the entropy is differentiable.

    Returns:
        Two ``[n]`` tensors, float32 (float64 for float64 input), the same on every tensor-parallel rank.
    """
    return _LinearLogprobs.apply(hidden, weight, labels, temperature, vocab_size, entropy_grad)


def linear_support_logprobs(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, temperature: float, support: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`linear_logprobs` over the support of truncated sampling, with a differentiable entropy.

    Args:
        labels: ``[n]``; a label outside its support has log-probability -inf.
        support: ids ``[n, K]``, filled up with -1.
    """
    columns = support - _first_row(weight)
    columns = columns.masked_fill(columns >= len(weight), -1)
    # each id lies on one rank, so that the sum over ranks is the logit itself
    logits = reduce_from_tensor_model_parallel_region(_SupportLogits.apply(hidden, weight, columns, temperature))
    logprobs = logits.masked_fill(support < 0, float("-inf")).log_softmax(-1)
    equal = support == labels[:, None]
    chosen = torch.where(equal, logprobs, 0.0).sum(-1).masked_fill(~equal.any(-1), float("-inf"))
    finite = torch.where(support >= 0, logprobs, 0.0)
    return chosen, -(finite.exp() * finite * (support >= 0)).sum(-1)


class _LinearLogprobs(torch.autograd.Function):
    """Softmax statistics by blocks with a running maximum; the backward pass computes each block again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        temperature: float,
        vocab_size: int,
        entropy_grad: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        labels = labels - _first_row(weight)
        real = min(max(vocab_size - _first_row(weight), 0), len(weight))
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        statistics = hidden.new_zeros(4, len(hidden), dtype=dtype)  # maximum, and sums of exp, exp * logit, label logit
        statistics[0] = torch.finfo(dtype).min  # not -inf: 0 * -inf is NaN
        for rows, columns in _blocks(len(hidden), real):
            logits = _product(hidden[rows], weight[columns]).div_(temperature)
            _include(statistics[:, rows], logits, labels[rows] - columns.start)
        maximum, total, mean, chosen = _over_ranks(statistics)
        entropy = total.log() - mean / total
        ctx.save_for_backward(hidden, weight, labels, maximum + total.log(), entropy)
        ctx.temperature, ctx.real, ctx.entropy_grad = temperature, real, entropy_grad
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return chosen - maximum - total.log(), entropy

    @staticmethod
    def backward(ctx: Any, logprob_grad: torch.Tensor, entropy_grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, labels, log_total, entropy = ctx.saved_tensors
        hidden_grad = torch.zeros_like(hidden, dtype=log_total.dtype)
        weight_grad = torch.zeros_like(weight, dtype=log_total.dtype)
        logprob_grad, entropy_grad = logprob_grad / ctx.temperature, entropy_grad / ctx.temperature
        for rows, columns in _blocks(len(hidden), ctx.real):
            logits = _product(hidden[rows], weight[columns]).div_(ctx.temperature).sub_(log_total[rows, None])
            if ctx.entropy_grad:
                slope = -logprob_grad[rows, None] - entropy_grad[rows, None] * (logits + entropy[rows, None])
            else:
                slope = -logprob_grad[rows, None]
            grad = logits.exp_().mul_(slope)
            mine, places = _labels_of(labels[rows] - columns.start, grad)
            grad[mine, places] += logprob_grad[rows][mine]
            grad = grad.to(hidden.dtype)
            hidden_grad[rows] += _product(grad, weight[columns].T)
            weight_grad[columns] += _product(grad.T, hidden[rows].T)
        return hidden_grad.to(hidden.dtype), weight_grad.to(weight.dtype), None, None, None, None


class _SupportLogits(torch.autograd.Function):
    """``hidden @ weight.T / temperature`` at given columns ``[n, K]`` of every row, 0 where the column is negative.

    Whole rows of logits exist for a few tokens at a time: the fewer, the more often all of the head's gradient is added
    to.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, columns: torch.Tensor, temperature: float
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, columns)
        ctx.temperature, ctx.rows = temperature, max(1, 8 * ROWS * COLUMNS // len(weight))
        chosen = hidden.new_zeros(columns.shape, dtype=torch.promote_types(hidden.dtype, torch.float32))
        for rows in _slices(len(hidden), ctx.rows):
            chosen[rows] = _product(hidden[rows], weight).gather(1, columns[rows].clamp(min=0))
        return chosen.div_(temperature).masked_fill_(columns < 0, 0.0)

    @staticmethod
    def backward(ctx: Any, chosen_grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, columns = ctx.saved_tensors
        chosen_grad = chosen_grad.masked_fill(columns < 0, 0.0) / ctx.temperature
        hidden_grad = torch.zeros_like(hidden, dtype=chosen_grad.dtype)
        weight_grad = torch.zeros_like(weight, dtype=chosen_grad.dtype)
        for rows in _slices(len(hidden), ctx.rows):
            grad = chosen_grad.new_zeros(rows.stop - rows.start, len(weight))
            grad = grad.scatter_add_(1, columns[rows].clamp(min=0), chosen_grad[rows]).to(hidden.dtype)
            hidden_grad[rows] = _product(grad, weight.T)
            for part in _slices(len(weight), COLUMNS):
                weight_grad[part] += _product(grad[:, part].T, hidden[rows].T)
        return hidden_grad.to(hidden.dtype), weight_grad.to(weight.dtype), None, None


def _include(statistics: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> None:
    """Take a block ``[r, c]`` into its rows' statistics ``[4, r]``; ``labels`` are relative to its columns."""
    maximum, total, mean, chosen = statistics
    mine, places = _labels_of(labels, logits)
    chosen[mine] = logits[mine, places]
    larger = torch.maximum(maximum, logits.amax(-1))
    mean += total * (maximum - larger)
    rescale = (maximum - larger).exp()
    logits -= larger[:, None]
    weights = logits.exp()
    total *= rescale
    total += weights.sum(-1)
    mean *= rescale
    mean += weights.mul_(logits).sum(-1)
    maximum.copy_(larger)


def _over_ranks(statistics: torch.Tensor) -> torch.Tensor:
    """Statistics of the whole vocabulary from every rank's share of it."""
    group = parallel_state.get_tensor_model_parallel_group()
    maximum, total, mean, _ = statistics
    larger = maximum.clone()
    dist.all_reduce(larger, dist.ReduceOp.MAX, group=group)
    mean += total * (maximum - larger)
    statistics[1:3] *= (maximum - larger).exp()
    dist.all_reduce(statistics[1:], group=group)
    maximum.copy_(larger)
    return statistics


def _blocks(rows: int, columns: int) -> Iterator[tuple[slice, slice]]:
    for row in _slices(rows, ROWS):
        for column in _slices(columns, COLUMNS):
            yield row, column


def _slices(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _labels_of(labels: torch.Tensor, block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows whose label lies in a block, and its column there."""
    mine = ((labels >= 0) & (labels < block.shape[1])).nonzero().squeeze(1)
    return mine, labels[mine]


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """``left @ right.T``, accumulated and returned in float32 where the factors are narrower."""
    if left.dtype in (torch.float32, torch.float64):
        return left @ right.T
    if left.is_cuda:
        return torch.mm(left, right.T, out_dtype=torch.float32)
    return left.float() @ right.T.float()


def _first_row(weight: torch.Tensor) -> int:
    """The token id of this tensor-parallel rank's first row of the head."""
    return parallel_state.get_tensor_model_parallel_rank() * len(weight)
