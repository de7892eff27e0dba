"""Block-quantised FP8 in and out."""

from __future__ import annotations

import pytest
import torch

from megatron_sao.weights.fp8 import FP8, FP8Error, dequantise, is_quantisable, quantise
from tests.conversion import dequantise_by_loops, quantise_by_loops

pytestmark = pytest.mark.unit

BLOCK = (4, 3)


@pytest.fixture
def weight() -> torch.Tensor:
    """Blocks at both edges are ragged, and one block is all zero."""
    weight = torch.randn(10, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight[4:8, 3:6] = 0
    return weight


def test_weights_are_dequantised_with_the_scale_of_their_own_block(weight: torch.Tensor) -> None:
    codes, scale = quantise_by_loops(weight, BLOCK)
    scale[2, 2] = 7.0  # ragged on both sides
    assert torch.equal(dequantise(codes, scale, BLOCK), dequantise_by_loops(codes, scale, BLOCK))


@pytest.mark.parametrize("scale_of_zeros", [0.0, float("inf"), float("nan")])
def test_an_all_zero_block_is_zero_whatever_its_scale(weight: torch.Tensor, scale_of_zeros: float) -> None:
    codes, scale = quantise_by_loops(weight, BLOCK)
    expected = dequantise(codes, scale, BLOCK)
    scale[1, 1] = scale_of_zeros
    assert torch.equal(dequantise(codes, scale, BLOCK), expected)


def test_a_scale_that_is_not_finite_is_refused_where_it_counts(weight: torch.Tensor) -> None:
    codes, scale = quantise_by_loops(weight, BLOCK)
    scale[0, 0] = float("inf")
    with pytest.raises(FP8Error, match="block row 0"):
        dequantise(codes, scale, BLOCK)


def test_quantised_weights_and_scales_are_those_of_a_loop_over_blocks(weight: torch.Tensor) -> None:
    codes, scale = quantise(weight, BLOCK)
    expected_codes, expected_scale = quantise_by_loops(weight, BLOCK)
    assert codes.dtype == FP8
    assert torch.equal(scale, expected_scale)
    assert torch.equal(codes.float(), expected_codes.float())


def test_quantising_what_was_dequantised_finds_the_same_codes_again(weight: torch.Tensor) -> None:
    codes, scale = quantise(weight, BLOCK)
    again, scale_again = quantise(dequantise(codes, scale, BLOCK), BLOCK)
    assert torch.equal(again.float(), codes.float())
    torch.testing.assert_close(scale_again, scale, rtol=2**-8, atol=0)


def test_power_of_two_scales_never_overflow_and_are_exact_to_dequantise(weight: torch.Tensor) -> None:
    codes, scale = quantise(weight * 1000, BLOCK, power_of_two=True)
    assert torch.equal(scale, scale.log2().round().exp2())
    assert codes.float().isfinite().all()
    assert torch.equal(dequantise(codes, scale, BLOCK).float(), codes.float() * _spread(scale, codes))


def _spread(scale: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    rows = scale.repeat_interleave(BLOCK[0], 0)[: codes.shape[0]]
    return rows.repeat_interleave(BLOCK[1], 1)[:, : codes.shape[1]]


@pytest.mark.parametrize(
    ("name", "quantised"),
    [
        ("model.layers.3.mlp.gate_proj.weight", True),
        ("model.layers.3.mlp.gate.weight", False),  # the router: a pattern must not match too much
        ("model.layers.3.mlp.experts.12.down_proj.weight", True),
        ("model.layers.3.mlp.shared_experts.up_proj.weight", True),
        ("model.layers.3.self_attn.kv_a_proj_with_mqa.weight", True),
        ("model.layers.3.self_attn.indexer.wq_b.weight", True),
        ("model.layers.3.self_attn.indexer.wk.weight", True),
        ("model.layers.3.self_attn.indexer.weights_proj.weight", False),
        ("model.layers.92.eh_proj.weight", False),
        ("model.embed_tokens.weight", False),
        ("lm_head.weight", False),
    ],
)
def test_linear_layers_are_quantised_and_routers_embeddings_and_heads_are_not(name: str, quantised: bool) -> None:
    assert is_quantisable(name) == quantised
