"""Which trajectories share a micro-batch, on which data-parallel rank, and which of their tokens are on which
context-parallel rank.

Context parallelism cuts every sequence of a pack into 2 * size equal chunks and gives rank r the r-th from the front
and the r-th from the end, so that under a causal mask all ranks have the same work. It is the layout that Megatron and
Transformer Engine expect.
"""

from __future__ import annotations

import heapq

import torch


def pack(lengths: list[int], num_ranks: int, max_tokens: int, multiple: int = 1) -> list[list[list[int]]]:
    """Spread trajectories over ranks and micro-batches of at most ``max_tokens``, balanced by tokens.

    Every rank gets the same number of micro-batches, because the ranks' collectives have to match; where there is
    nothing left to fill one, it is empty and the caller runs a dummy. The j-th micro-batches of all ranks are of
    similar size, because expert parallelism makes the ranks wait for each other inside each of them.

    The method is LPT (longest processing time first: Graham, "Bounds on multiprocessing timing anomalies", 1969): of m
    micro-batches the fullest has at most 4/3 - 1/(3m) times the tokens of the fullest in the best division into m; and
    m is the least multiple of ``num_ranks`` with which none overflows. They are then dealt out in rounds of one per
    rank, the fullest of a round to the rank with the fewest tokens.

    Args:
        lengths: tokens per trajectory, each >= 1.
        num_ranks: data-parallel ranks.
        max_tokens: bound on a micro-batch; a longer trajectory gets one of its own.
        multiple: each rank's number of micro-batches is a multiple of it, made up with empty ones.

    Returns:
        ``plan[rank][micro_batch]``: ascending indices into ``lengths``; each index exactly once, at least one
        micro-batch. A pure function of its arguments, so every rank computes the same plan.

    Raises:
        ValueError: a length, num_ranks or max_tokens below 1.
    """
    if num_ranks < 1 or max_tokens < 1 or min(lengths, default=1) < 1:
        raise ValueError(
            f"num_ranks={num_ranks}, max_tokens={max_tokens}, shortest trajectory {min(lengths, default=1)}: "
            "all must be at least 1"
        )
    least_tokens = sum(min(length, max_tokens) for length in lengths)
    num_bins = num_ranks * max(1, -(-least_tokens // (max_tokens * num_ranks)))
    while (bins := _fill(lengths, num_bins, max_tokens)) is None:
        num_bins += num_ranks

    plan: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    tokens = [0] * num_ranks
    for start in range(0, num_bins, num_ranks):  # bins come largest first
        least_loaded_first = sorted(range(num_ranks), key=lambda rank: (tokens[rank], rank))
        for rank, (load, indices) in zip(least_loaded_first, bins[start : start + num_ranks], strict=True):
            plan[rank].append(indices)
            tokens[rank] += load
    missing = -len(plan[0]) % multiple
    return [micro_batches + [[] for _ in range(missing)] for micro_batches in plan]


def _fill(lengths: list[int], num_bins: int, max_tokens: int) -> list[tuple[int, list[int]]] | None:
    """Longest trajectory first, each into the emptiest bin: ``(tokens, indices)`` per bin, fullest first; None if
    one does not fit."""
    heap: list[tuple[int, int, list[int]]] = [(0, number, []) for number in range(num_bins)]
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        load, number, indices = heap[0]
        if indices and load + lengths[index] > max_tokens:
            return None
        heapq.heapreplace(heap, (load + lengths[index], number, [*indices, index]))
    return [(load, sorted(indices)) for load, _, indices in sorted(heap, key=lambda bin: (-bin[0], bin[1]))]


def context_positions(cu_seqlens: torch.Tensor, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of context-parallel rank ``rank`` in the order in which it holds them.

    Args:
        cu_seqlens: int [n + 1] over the sequences of the whole pack, of T tokens; every length is a multiple of
            2 * size, or any where size is 1.

    Returns:
        Their positions in the pack and in their sequences, [T / size] each, of cu_seqlens' dtype.
    """
    lengths = cu_seqlens.diff() // size
    starts, chunks = torch.stack([cu_seqlens[:-1], lengths // 2]).repeat_interleave(lengths, dim=1)
    index = torch.arange(starts.numel(), dtype=starts.dtype, device=starts.device) - starts // size
    index += chunks * torch.where(index < chunks, rank, 2 * (size - 1) - rank)
    return starts + index, index


def in_pack_order(gathered: torch.Tensor, cu_seqlens: torch.Tensor, size: int) -> torch.Tensor:
    """The pack's tokens ``[T, …]`` from those of context-parallel rank 0, 1, …, one after the other; differentiable."""
    order = torch.cat([context_positions(cu_seqlens, rank, size)[0] for rank in range(size)])
    return torch.empty_like(gathered).index_copy(0, order.long(), gathered)
