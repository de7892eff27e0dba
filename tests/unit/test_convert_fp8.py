"""Block-quantised FP8 in and out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron_sao.config import ConfigError
from megatron_sao.models.hf import read_hf_model
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


def test_blocks_that_have_not_changed_keep_their_scales_bit_for_bit(weight: torch.Tensor) -> None:
    codes, scale = quantise(weight, BLOCK)
    scale[0, 0] *= 1.7  # as another quantiser might have chosen it
    codes[0, 0] = -0.0
    scale[1, 1] = float("inf")  # of the block of zeros
    once = dequantise(codes, scale, BLOCK)
    again, scale_again = quantise(once, BLOCK, previous=scale)
    assert torch.equal(scale_again, scale)
    assert torch.equal(again.view(torch.uint8), codes.view(torch.uint8))
    once[9, 7] *= 1.5
    changed, scale_changed = quantise(once, BLOCK, previous=scale)
    assert (scale_changed != scale).nonzero().tolist() in ([[2, 2]], [])
    torch.testing.assert_close(dequantise(changed, scale_changed, BLOCK)[9, 7], once[9, 7], rtol=2**-4, atol=0)


def test_power_of_two_scales_never_overflow_and_are_exact_to_dequantise(weight: torch.Tensor) -> None:
    codes, scale = quantise(weight * 1000, BLOCK, power_of_two=True)
    assert torch.equal(scale, scale.log2().round().exp2())
    assert codes.float().isfinite().all()
    assert torch.equal(dequantise(codes, scale, BLOCK).float(), codes.float() * _spread(scale, codes))


def _spread(scale: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    rows = scale.repeat_interleave(BLOCK[0], 0)[: codes.shape[0]]
    return rows.repeat_interleave(BLOCK[1], 1)[:, : codes.shape[1]]


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "compressed-tensors", "format": "float-quantized"},
        {"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]},
        {"quant_method": "fp8", "fmt": "e4m3"},  # one scale per tensor
        {"quant_method": "gptq", "bits": 4},
    ],
)
def test_other_quantisation_is_refused_with_a_sentence(quantization: dict, tmp_path: Path) -> None:
    config = {"model_type": "llama", "vocab_size": 8, "hidden_size": 8, "num_attention_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    with pytest.raises(ConfigError, match=f"quant_method '{quantization['quant_method']}'.*use the bfloat16 release"):
        read_hf_model(tmp_path)


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
