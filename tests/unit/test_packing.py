"""Packing: every trajectory once, nothing over the bound, all ranks in step, every token on one context rank."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sao.data.packing import context_positions, in_pack_order, pack

batches = st.lists(st.integers(1, 300), max_size=60)
wild_batches = st.lists(
    st.builds(lambda power, more: 2**power + more, st.integers(0, 17), st.integers(0, 99)), max_size=60
)


@given(batches, st.integers(1, 8), st.integers(1, 250))
@settings(max_examples=300)
def test_every_trajectory_is_packed_once_within_the_bound_and_ranks_stay_in_step(
    lengths: list[int], num_ranks: int, max_tokens: int
) -> None:
    plan = pack(lengths, num_ranks, max_tokens)
    micro_batches = [micro_batch for rank in plan for micro_batch in rank]
    assert sorted(index for micro_batch in micro_batches for index in micro_batch) == list(range(len(lengths)))
    assert len(plan) == num_ranks and len({len(rank) for rank in plan}) == 1 and plan[0]
    for micro_batch in micro_batches:
        assert len(micro_batch) == 1 or sum(lengths[i] for i in micro_batch) <= max_tokens
    assert plan == pack(lengths, num_ranks, max_tokens)


@given(wild_batches, st.integers(1, 8), st.sampled_from([512, 8192, 131_072]), st.integers(1, 4))
@settings(max_examples=300)
def test_lengths_from_1_to_131072_leave_every_rank_with_as_many_micro_batches(
    lengths: list[int], num_ranks: int, max_tokens: int, multiple: int
) -> None:
    plan = pack(lengths, num_ranks, max_tokens, multiple)
    counts = {len(rank) for rank in plan}
    assert len(plan) == num_ranks and len(counts) == 1 and counts.pop() % multiple == 0
    assert sorted(index for rank in plan for micro_batch in rank for index in micro_batch) == list(range(len(lengths)))
    for rank in plan:
        for micro_batch in rank:
            assert len(micro_batch) <= 1 or sum(lengths[i] for i in micro_batch) <= max_tokens


@given(st.lists(st.integers(1, 100), min_size=1, max_size=7), st.integers(1, 3))
@settings(max_examples=100)
def test_the_fullest_micro_batch_is_within_a_third_of_the_best_division(lengths: list[int], num_ranks: int) -> None:
    """The best is found by trying all."""

    def fullest(assignment: tuple[int, ...]) -> int:
        return max(sum(n for n, rank in zip(lengths, assignment, strict=True) if rank == r) for r in range(num_ranks))

    best = min(fullest(assignment) for assignment in product(range(num_ranks), repeat=len(lengths)))
    found = max(sum(lengths[i] for i in micro_batch) for (micro_batch,) in pack(lengths, num_ranks, sum(lengths)))
    assert found <= (4 / 3 - 1 / (3 * num_ranks)) * best + 1e-9


@given(batches, st.integers(1, 8), st.integers(1, 250))
@settings(max_examples=300)
def test_ranks_differ_by_no_more_than_the_longest_micro_batch(
    lengths: list[int], num_ranks: int, max_tokens: int
) -> None:
    plan = pack(lengths, num_ranks, max_tokens)
    tokens = [sum(lengths[i] for micro_batch in rank for i in micro_batch) for rank in plan]
    longest = max(sum(lengths[i] for i in micro_batch) for rank in plan for micro_batch in rank)
    assert max(tokens) - min(tokens) <= longest


@given(batches, st.integers(1, 8), st.integers(1, 250))
@settings(max_examples=300)
def test_micro_batches_are_not_wasted(lengths: list[int], num_ranks: int, max_tokens: int) -> None:
    """Two half-full micro-batches could have been one, so at most about twice the least possible number are used."""
    bounded = [min(length, max_tokens) for length in lengths]
    least = max(1, math.ceil(sum(bounded) / (max_tokens * num_ranks)))
    assert len(pack(lengths, num_ranks, max_tokens)[0]) <= 2 * least + 1


def test_equal_trajectories_fill_micro_batches_exactly() -> None:
    assert pack([100] * 8, 2, 200) == [[[0, 4], [2, 6]], [[1, 5], [3, 7]]]


def test_a_rank_with_more_tokens_gets_the_smaller_micro_batch_next() -> None:
    assert pack([5, 4, 3, 2], 2, 5) == [[[0], [3]], [[1], [2]]]


def test_a_micro_batch_that_would_overflow_opens_another() -> None:
    assert pack([6, 6, 6], 1, 10) == [[[0], [1], [2]]]


def test_an_overlong_trajectory_travels_alone() -> None:
    plan = pack([10, 500, 10, 10], 1, 100)
    assert [1] in plan[0] and [0, 2, 3] in plan[0]


def test_fewer_trajectories_than_ranks_leave_dummies() -> None:
    assert pack([5, 7], 4, 100) == [[[1]], [[0]], [[]], [[]]]
    assert pack([], 2, 100) == [[[]], [[]]]


def test_random_batches_are_balanced_to_a_few_percent() -> None:
    lengths = [(i * 7919) % 900 + 100 for i in range(128)]
    tokens = [sum(lengths[i] for micro_batch in rank for i in micro_batch) for rank in pack(lengths, 8, 4096)]
    assert max(tokens) / (sum(tokens) / 8) < 1.02


@pytest.mark.parametrize(("lengths", "num_ranks", "max_tokens"), [([0], 1, 1), ([1], 0, 1), ([1], 1, 0)])
def test_impossible_arguments_are_refused(lengths: list[int], num_ranks: int, max_tokens: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        pack(lengths, num_ranks, max_tokens)


def test_a_context_rank_has_the_chunk_of_its_number_from_either_end_of_every_sequence() -> None:
    cu_seqlens = torch.tensor([0, 8, 12], dtype=torch.int32)
    split = [[positions.tolist() for positions in context_positions(cu_seqlens, rank, 2)] for rank in range(2)]
    assert split == [[[0, 1, 6, 7, 8, 11], [0, 1, 6, 7, 0, 3]], [[2, 3, 4, 5, 9, 10], [2, 3, 4, 5, 1, 2]]]
    whole, within = context_positions(torch.tensor([0, 5, 8]), 0, 1)
    assert whole.tolist() == list(range(8)) and within.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 5))
@settings(max_examples=100)
def test_the_context_ranks_tokens_make_up_the_pack_again(chunks: list[int], size: int) -> None:
    cu_seqlens = torch.tensor([0, *(2 * size * length for length in chunks)]).cumsum(0)
    packed = torch.arange(2 * int(cu_seqlens[-1])).view(-1, 2)
    gathered = torch.cat([packed[context_positions(cu_seqlens, rank, size)[0]] for rank in range(size)])
    assert torch.equal(in_pack_order(gathered, cu_seqlens, size), packed)
