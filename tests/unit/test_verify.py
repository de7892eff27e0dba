"""Checksums of an engine's fused tensors, against tensors fused here by hand."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from megatron_sao.config import ConfigError
from megatron_sao.models.hf import HFModel
from megatron_sao.weights.verify import EngineChecksums, differences

pytestmark = pytest.mark.unit

LAYER = "model.layers.1."
ATTENTION, EXPERTS = LAYER + "self_attn.", LAYER + "mlp.experts."


def sha(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def model(**sizes: int) -> HFModel:
    raw = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2} | sizes
    raw |= {"n_routed_experts": 2, "num_experts_per_tok": 2}
    return HFModel(Path("unused"), raw, "glm4_moe")


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def checksums(tensors: dict[str, torch.Tensor], tp: int) -> list[dict[str, str]]:
    made = EngineChecksums(model(), tp, torch.bfloat16)
    for name, tensor in tensors.items():
        made.add(name, tensor)
    return made.result()


def test_q_k_and_v_are_fused_by_rank() -> None:
    q, k, v = random(8, 6), random(4, 6), random(4, 6) + 1
    names = [f"{ATTENTION}{part}_proj.weight" for part in "qkv"]
    ranks = checksums(dict(zip(names, (q, k, v), strict=True)), tp=2)
    fused = [torch.cat([q[:4], k[:2], v[:2]]), torch.cat([q[4:], k[2:], v[2:]])]
    assert ranks == [{f"{ATTENTION}qkv_proj.weight": sha(tensor)} for tensor in fused]


def test_a_layers_experts_are_stacked_with_gate_above_up() -> None:
    parts = {
        f"{EXPERTS}{e}.{p}_proj.weight": random(4, 6) + e + i for e in (0, 1) for i, p in enumerate(("gate", "up"))
    }
    down = {f"{EXPERTS}{e}.down_proj.weight": random(6, 4) + e for e in (0, 1)}
    ranks = checksums(parts | down, tp=2)
    for rank, rows in enumerate((slice(0, 2), slice(2, 4))):
        w13 = torch.stack(
            [torch.cat([parts[f"{EXPERTS}{e}.{p}_proj.weight"][rows] for p in ("gate", "up")]) for e in (0, 1)]
        )
        w2 = torch.stack([down[f"{EXPERTS}{e}.down_proj.weight"][:, rows] for e in (0, 1)])
        assert ranks[rank] == {f"{EXPERTS}w13_weight": sha(w13), f"{EXPERTS}w2_weight": sha(w2)}


def test_the_vocabulary_is_padded_with_zeros_the_router_is_float32_and_draft_layers_are_left_out() -> None:
    embedding, gate, norm = random(70, 4), random(2, 4), random(4)
    ranks = checksums(
        {
            "model.embed_tokens.weight": embedding,
            f"{LAYER}mlp.gate.weight": gate,
            "model.norm.weight": norm,
            "model.layers.2.input_layernorm.weight": norm,
        },
        tp=2,
    )
    padded = torch.cat([embedding, torch.zeros(58, 4).bfloat16()])
    same = {f"{LAYER}mlp.gate.weight": sha(gate.float()), "model.norm.weight": sha(norm)}
    assert ranks == [{"model.embed_tokens.weight": sha(part)} | same for part in (padded[:64], padded[64:])]


def test_parts_out_of_order_or_missing_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"k_proj.weight is part 1 of .*qkv_proj.weight, but part 0 is due"):
        checksums({f"{ATTENTION}k_proj.weight": random(4, 6)}, tp=1)
    with pytest.raises(ValueError, match=r"qkv_proj.weight has 1 of its 3 parts"):
        checksums({f"{ATTENTION}q_proj.weight": random(8, 6)}, tp=1)


def test_an_unknown_model_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="layout of a mamba is not known"):
        EngineChecksums(HFModel(Path("unused"), {}, "mamba"), 1, torch.bfloat16)


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ({"intermediate_size": 96}, "for 2 ranks SGLang pads intermediate_size = 96 to a multiple of 64"),
        ({"moe_intermediate_size": 32}, "pads moe_intermediate_size = 32"),
        ({"num_key_value_heads": 1}, "pads num_key_value_heads = 1 to a multiple of 2"),
    ],
)
def test_a_model_that_the_engine_pads_is_refused_rather_than_called_wrong(sizes: dict[str, int], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        EngineChecksums(model(**sizes), 2, torch.bfloat16)


def test_differences_name_the_tensor_the_rank_and_what_is_wrong() -> None:
    assert differences([{"a": "1"}], [{"a": "1"}]) == []
    assert differences([{"a": "1", "b": "2"}], [{"a": "3", "c": "4"}]) == [
        "a", "b is missing in the engine", "c was never sent",
    ]  # fmt: skip
    assert differences([{"a": "1"}, {"a": "2"}], [{"a": "1"}, {"a": "1"}]) == ["a (rank 1)"]
    assert differences([{"a": "1"}], []) == ["0 ranks reported instead of 1"]
