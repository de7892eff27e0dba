"""Grouping of tensors into buckets."""

from __future__ import annotations

import pytest
import torch

from megatron_sao.weights.push import buckets

pytestmark = pytest.mark.unit


def test_buckets_keep_order_and_bound_and_give_a_larger_tensor_one_of_its_own() -> None:
    tensors = [(name, torch.zeros(size)) for name, size in (("a", 2), ("b", 2), ("c", 9), ("d", 1), ("e", 3))]
    names = [[name for name, _ in bucket] for bucket in buckets(iter(tensors), max_bytes=16)]
    assert names == [["a", "b"], ["c"], ["d", "e"]]
    assert list(buckets(iter([]), 16)) == []
