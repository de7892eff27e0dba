"""HF tensors and tensor-parallel shards: fused layouts, spelled out by hand and inverted by property."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_sao.models.hf import HFModel
from megatron_sao.models.mapping import global_name, mtp_tensors, shard, unshard

pytestmark = pytest.mark.unit


def attention(heads: int, groups: int, dim: int) -> SimpleNamespace:
    return SimpleNamespace(num_attention_heads=heads, num_query_groups=groups, kv_channels=dim)


def test_qkv_is_interleaved_by_query_group() -> None:
    q, k, v = torch.arange(4)[:, None], torch.tensor([[10], [11]]), torch.tensor([[20], [21]])
    config = attention(heads=4, groups=2, dim=1)
    assert shard("qkv", [q, k, v], config, 0, 1).flatten().tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert shard("qkv", [q, k, v], config, 1, 2).flatten().tolist() == [2, 3, 11, 21]


def test_each_shard_of_gate_and_up_holds_its_own_slices_of_both() -> None:
    gate, up = torch.arange(4)[:, None], torch.arange(10, 14)[:, None]
    assert shard("gate_up", [gate, up], attention(1, 1, 1), 1, 2).flatten().tolist() == [2, 3, 12, 13]


@given(
    kind=st.sampled_from(["replicated", "column", "row", "vocab", "qkv", "gate_up"]),
    size=st.sampled_from([1, 2, 4]),
    bias=st.booleans(),
    queries_per_group=st.integers(1, 3),
)
def test_unshard_inverts_shard_bit_for_bit(kind: str, size: int, bias: bool, queries_per_group: int) -> None:
    groups, dim = 4, 3
    config = attention(groups * queries_per_group, groups, dim)
    columns = () if bias and kind != "row" else (8,)
    rows = {"qkv": [groups * queries_per_group * dim, groups * dim, groups * dim], "gate_up": [8, 8]}.get(kind, [8])
    tensors = [torch.randn(n, *columns) for n in rows]
    shards = [shard(kind, tensors, config, rank, size).clone() for rank in range(size)]
    restored = unshard(kind, shards, config)
    assert len(restored) == len(tensors)
    assert all(torch.equal(a, b) for a, b in zip(restored, tensors, strict=True))


@pytest.mark.parametrize(
    ("local", "expected"),
    [
        ("decoder.layers.1.mlp.experts.local_experts.0.linear_fc1.weight",
         "decoder.layers.5.mlp.experts.local_experts.2.linear_fc1.weight"),
        ("decoder.layers.0.mlp.experts.linear_fc2.weight1",
         "decoder.layers.4.mlp.experts.local_experts.3.linear_fc2.weight"),
        ("decoder.layers.0.self_attention.linear_qkv.layer_norm_weight", "decoder.layers.4.input_layernorm.weight"),
        ("decoder.layers.0.mlp.linear_fc1.layer_norm_weight", "decoder.layers.4.pre_mlp_layernorm.weight"),
        ("decoder.layers.0.self_attention.linear_q_up_proj.layer_norm_weight",
         "decoder.layers.4.self_attention.q_layernorm.weight"),
        ("decoder.layers.0.self_attention.linear_kv_up_proj.layer_norm_weight",
         "decoder.layers.4.self_attention.kv_layernorm.weight"),
        ("decoder.layers.0.self_attention.linear_kv_up_proj.weight",
         "decoder.layers.4.self_attention.linear_kv_up_proj.weight"),
        ("decoder.layers.0.self_attention.core_attention.indexer.k_norm.bias",
         "decoder.layers.4.self_attention.core_attention.indexer.k_norm.bias"),
        ("decoder.layers.0.mlp.router.weight", "decoder.layers.4.mlp.router.weight"),
        ("output_layer.weight", "output_layer.weight"),
    ],
)  # fmt: skip
def test_local_names_become_global_in_either_layers_spelling(local: str, expected: str) -> None:
    assert global_name(local, layer_offset=4, expert_offset=2) == expected


def test_tensors_of_mtp_layers_are_those_after_the_decoders_layers_and_no_others() -> None:
    mtp = {
        "model.layers.12.eh_proj.weight", "model.layers.12.mlp.experts.0.up_proj.weight",
        "model.layers.13.shared_head.norm.weight",
    }  # fmt: skip
    others = {"model.layers.1.mlp.gate.weight", "model.layers.11.mlp.gate.weight", "model.layers.14.mlp.gate.weight"}
    others |= {"model.norm.weight", "lm_head.weight"}
    model = HFModel(Path(), {"num_hidden_layers": 12, "num_nextn_predict_layers": 2}, "glm4_moe")
    assert mtp_tensors(model, mtp | others) == mtp
    assert mtp_tensors(HFModel(Path(), {"num_hidden_layers": 12}, "qwen3_moe"), mtp | others) == set()
