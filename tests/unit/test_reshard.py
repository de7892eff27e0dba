"""The reshard plan: complete, balanced, exact on any sharding, and quick at full size."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from math import prod
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sao.config import ConfigError
from megatron_sao.models.mapping import Entry, shard
from megatron_sao.weights.reshard import (
    Layout,
    Plan,
    Weight,
    broadcast_traffic,
    build_plan,
    p2p_traffic,
    place,
    shard_shape,
    shard_slices,
    spread_sources,
)

pytestmark = pytest.mark.unit


def moe_weights(
    layers: int, dense: int, hidden: int, ffn: int, moe_ffn: int, heads: int, groups: int, dim: int, experts: int,
    vocab: int, tied: bool = False, dtype: torch.dtype = torch.bfloat16, bias: bool = True,
) -> list[Weight]:  # fmt: skip
    """All weights of a model of GLM-4.5's architecture, from its sizes."""

    def gated(ours: str, theirs: str, width: int, expert: bool = False) -> list[Weight]:
        names = (theirs + "gate_proj.weight", theirs + "up_proj.weight")
        fc1 = Entry(ours + "linear_fc1.weight", names, "gate_up", expert)
        fc2 = Entry(ours + "linear_fc2.weight", (theirs + "down_proj.weight",), "row", expert)
        return [Weight(fc1, ((width, hidden),) * 2, dtype), Weight(fc2, ((hidden, width),), dtype)]

    def plain(ours: str, theirs: str, kind: str, shape: tuple[int, ...], dtype: torch.dtype = dtype) -> Weight:
        return Weight(Entry(ours, (theirs,), kind), (shape,), dtype)

    out = [plain("embedding.word_embeddings.weight", "model.embed_tokens.weight", "vocab", (vocab, hidden))]
    for layer in range(layers):
        ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        for leaf, columns in (("weight", (hidden,)), ("bias", ()))[: 1 + bias]:
            names = tuple(f"{theirs}self_attn.{part}_proj.{leaf}" for part in "qkv")
            rows = [(n * dim, *columns) for n in (heads, groups, groups)]
            out.append(
                Weight(Entry(f"{ours}self_attention.linear_qkv.{leaf}", names, "qkv"), tuple(rows), dtype, groups)
            )
        out.append(plain(ours + "input_layernorm.weight", theirs + "norm.weight", "replicated", (hidden,)))
        out.append(
            plain(ours + "self_attention.linear_proj.weight", theirs + "o_proj.weight", "row", (hidden, heads * dim))
        )
        if layer < dense:
            out += gated(ours + "mlp.", theirs + "mlp.", ffn)
            continue
        out.append(
            plain(ours + "mlp.router.expert_bias", theirs + "gate.bias", "replicated", (experts,), torch.float32)
        )
        for expert in range(experts):
            out += gated(f"{ours}mlp.experts.local_experts.{expert}.", f"{theirs}experts.{expert}.", moe_ffn, True)
        out += gated(ours + "mlp.shared_experts.", theirs + "shared_experts.", moe_ffn)
    out.append(plain("decoder.final_layernorm.weight", "model.norm.weight", "replicated", (hidden,)))
    if not tied:
        out.append(plain("output_layer.weight", "lm_head.weight", "vocab", (vocab, hidden)))
    return out


def tiny_weights(tied: bool = False) -> list[Weight]:
    sizes = {"hidden": 8, "ffn": 8, "moe_ffn": 4, "heads": 8, "groups": 4, "dim": 2, "experts": 4, "vocab": 11}
    return moe_weights(layers=4, dense=1, tied=tied, **sizes)


def layouts() -> list[Layout]:
    """Every layout of up to eight ranks of a model of four layers and four experts."""
    out = []
    for world, tp, pp, ep, etp in itertools.product((1, 2, 4, 8), (1, 2, 4), (1, 2, 4), (1, 2, 4), (1, 2)):
        if world % (tp * pp) == 0 and world % (etp * ep * pp) == 0:
            stages = tuple(layer * pp // 4 for layer in range(4))
            out.append(Layout(world, stages, tp, pp, ep, etp, experts=4))
    return out


def full_tensors(weights: list[Weight]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    names = [(name, shape, w.dtype) for w in weights for name, shape in zip(w.entry.hf, w.shapes, strict=True)]
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape, dtype in names}


def sharded(weight: Weight, full: dict[str, torch.Tensor], index: int, shards: int) -> torch.Tensor:
    """What Megatron's rank holds, by the project's conversion in the other direction."""
    tensors = [full[name] for name in weight.entry.hf]
    if weight.entry.kind == "vocab":
        tensors = [torch.nn.functional.pad(tensors[0], (0, 0, 0, -len(tensors[0]) % shards), value=7.0)]
    groups = weight.groups
    config = SimpleNamespace(
        num_attention_heads=groups * weight.shapes[0][0] // weight.shapes[-1][0],
        num_query_groups=groups,
        kv_channels=weight.shapes[-1][0] // groups,
    )
    return shard(weight.entry.kind, tensors, config, index, shards).contiguous()


def applied(plan: Plan, full: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    out = {}
    for transfer in plan.transfers:
        weight, shards = transfer.weight, len(transfer.holders)
        tensors = [torch.full(shape, torch.nan, dtype=weight.dtype) for shape in weight.shapes]
        for index in range(shards):
            held = sharded(weight, full, index, shards)
            assert held.shape == shard_shape(weight, shards)
            place(weight, held, index, shards, tensors)
        out |= dict(zip(weight.entry.hf, tensors, strict=True))
    return out


@pytest.mark.parametrize("tied", [False, True])
def test_under_every_small_layout_each_tensor_is_sent_once_from_ranks_that_hold_it(tied: bool) -> None:
    weights = tiny_weights(tied)
    for layout in layouts():
        layout = Layout(**(vars(layout) | {"tied": tied}))
        for per_stage, together in itertools.product((n for n in (1, 2) if layout.stage_size % n == 0), (True, False)):
            plan = build_plan(weights, layout, 256, spread_sources(layout, per_stage), together)
            sent = Counter(name for t in plan.transfers for name in t.weight.entry.hf)
            assert sent == Counter(name for w in weights for name in w.entry.hf)
            for transfer in plan.transfers:
                assert transfer.source in plan.sources and 0 in plan.sources
                check_holders(transfer.weight.entry, transfer.holders, layout)
                for tensor, shape in enumerate(transfer.weight.shapes):
                    parts = [transfer.slices(i)[tensor] for i in range(len(transfer.holders))]
                    edges = [0, *(part.stop for part in parts)]
                    assert [part.start for part in parts] == edges[:-1] and edges[-1] == shape[parts[0].dim]


def check_holders(entry: Entry, holders: tuple[int, ...], layout: Layout) -> None:
    """By Megatron's order of ranks, written out anew: tp (or expert tp, then ep) fastest, pp slowest."""
    for index, rank in enumerate(holders):
        stage, within = divmod(rank, layout.world_size // layout.pp)
        if "layers." in entry.name:
            assert stage == int(entry.name.split("layers.")[1].split(".")[0]) * layout.pp // 4
        elif entry.name.startswith("embedding"):
            assert stage == 0 or (layout.tied and stage == layout.pp - 1)
        else:
            assert stage == layout.pp - 1
        if entry.expert:
            assert within % layout.etp == index and len(holders) == layout.etp
            expert = int(entry.name.split("local_experts.")[1].split(".")[0])
            assert within // layout.etp % layout.ep == expert // (4 // layout.ep)
        elif entry.kind != "replicated":
            assert within % layout.tp == index and len(holders) == layout.tp


def test_every_small_layout_gives_back_the_tensors_bit_for_bit() -> None:
    weights = tiny_weights()
    full = full_tensors(weights)
    for layout in {(layout.tp, layout.etp): layout for layout in layouts()}.values():
        restored = applied(build_plan(weights, layout, 256, (0,)), full)
        assert restored.keys() == full.keys()
        assert all(torch.equal(restored[name], full[name]) for name in full)


@settings(max_examples=60)
@given(
    data=st.data(), tp=st.sampled_from([1, 2, 4]), etp=st.sampled_from([1, 2, 3]), vocab=st.integers(1, 40),
    queries=st.integers(1, 3), dim=st.integers(1, 5), dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_a_random_model_comes_back_bit_for_bit(data, tp, etp, vocab, queries, dim, dtype) -> None:
    groups = tp * data.draw(st.integers(1, 2))
    weights = moe_weights(
        layers=1, dense=0, hidden=data.draw(st.integers(1, 6)), ffn=4, moe_ffn=12, heads=groups * queries,
        groups=groups, dim=dim, experts=2, vocab=vocab, dtype=dtype,
    )  # fmt: skip
    full = full_tensors(weights)
    plan = build_plan(weights, Layout(tp * etp, (0,), tp=tp, etp=etp, experts=2), 64, (0,))
    restored = applied(plan, full)
    assert all(torch.equal(restored[name], full[name]) for name in full)


def test_buckets_keep_their_bound_and_alignment_and_a_layers_experts_stay_with_one_source_in_order() -> None:
    weights = tiny_weights()
    layout = Layout(8, (0, 0, 1, 1), pp=2, ep=2, experts=4)
    plan = build_plan(weights, layout, 300, spread_sources(layout, 2))
    assert plan.sources == (0, 2, 4, 6)
    for source, buckets in plan.buckets.items():
        for number, bucket in enumerate(buckets):
            assert all((t.source, t.bucket) == (source, number) for t in bucket)
            assert len(bucket) == 1 or sum(t.weight.nbytes for t in bucket) <= 300
            assert [t.offset for t in bucket] == [sum(t.weight.nbytes for t in bucket[:i]) for i in range(len(bucket))]
            assert all(t.offset % t.weight.dtype.itemsize == 0 for t in bucket)
    for layer in (1, 2, 3):
        mine = [t for t in plan.transfers if f"layers.{layer}.mlp.experts" in t.weight.entry.name]
        assert len({t.source for t in mine}) == 1
        assert [t.bucket for t in mine] == sorted(t.bucket for t in mine)


def test_experts_that_need_not_stay_together_are_sent_by_whoever_holds_them() -> None:
    weights = tiny_weights()
    layout = Layout(8, (0, 0, 1, 1), pp=2, ep=2, experts=4)  # even ranks hold the first two experts
    plan = build_plan(weights, layout, 300, tuple(range(8)), experts_together=False)
    for transfer in plan.transfers:
        name = transfer.weight.entry.name
        if transfer.weight.entry.expert:
            assert transfer.source % 2 == int(name.split("local_experts.")[1][0]) // 2, name
    assert broadcast_traffic(plan, [1]).gathered.keys() == {*range(8)}
    assert sum(broadcast_traffic(plan, [1]).gathered.values()) == 0
    half = build_plan(weights, layout, 300, spread_sources(layout, 2), experts_together=False)
    assert {t.source // 4 == t.holders[0] // 4 for t in half.transfers} == {True}, "else by a source of their stage"


def test_a_float32_tensor_never_lies_at_an_odd_place_behind_bfloat16_ones() -> None:
    norm = Weight(Entry("decoder.final_layernorm.weight", ("a",), "replicated"), ((3,),), torch.bfloat16)
    bias = Weight(Entry("decoder.layers.0.mlp.router.expert_bias", ("b",), "replicated"), ((2,),), torch.float32)
    plan = build_plan([norm, bias, norm], Layout(1, (0,)), 1000, (0,))
    assert [(t.bucket, t.offset) for t in plan.transfers] == [(0, 0), (1, 0), (1, 8)]


def test_the_load_is_spread_over_sources_and_replicas() -> None:
    weights = tiny_weights()
    layout = Layout(8, (0,) * 4, ep=2, experts=4)
    plan = build_plan(weights, layout, 300, spread_sources(layout, 2))
    traffic = broadcast_traffic(plan, [1])
    assert max(traffic.sent.values()) < 1.3 * min(traffic.sent.values())
    # Each source holds half of the experts; the other half has three other replicas each.
    given_by_odd = [n for rank, n in traffic.gathered.items() if rank % 2]
    assert len(given_by_odd) == 4 and max(given_by_odd) < 1.5 * min(given_by_odd)


def test_what_cannot_be_divided_is_refused_by_name() -> None:
    weights = tiny_weights()
    with pytest.raises(ConfigError, match=r"parallel.tp = 8 does not divide decoder.layers.0.self_attention"):
        build_plan(weights, Layout(8, (0,) * 4, tp=8, experts=4), 300, (0,))
    with pytest.raises(ConfigError, match="sources_per_stage = 3 does not divide the 8 ranks"):
        spread_sources(Layout(8, (0,) * 4, experts=4), 3)


def test_traffic_counts_every_byte_of_a_hand_made_case() -> None:
    """Two tensor-parallel ranks, one column-sharded weight of 64 bytes and a replicated one of 8; two engines."""
    column = Weight(Entry("output_layer.weight", ("a",), "column"), ((4, 8),), torch.bfloat16)
    norm = Weight(Entry("decoder.final_layernorm.weight", ("b",), "replicated"), ((4,),), torch.bfloat16)
    plan = build_plan([column, norm], Layout(2, (), tp=2), 1000, (0,))
    broadcast = broadcast_traffic(plan, [1, 2])
    assert broadcast.sent == {0: 144} and broadcast.gathered == {0: 0, 1: 32} and broadcast.received == [72] * 3
    assert broadcast.lower_bound(1.0, 1.0) == (144.0, "out of trainer rank 0")
    assert broadcast.lower_bound(10.0, 1.0) == (72.0, "into a rank of an engine")
    p2p = p2p_traffic(plan, [1, 2])
    assert p2p.received == [72, 40, 40] and sum(p2p.sent.values()) == 2 * 64 + 3 * 8


def test_at_the_size_of_glm_5_2_on_256_ranks_the_plan_takes_seconds() -> None:
    """Its MoE and sizes, with grouped-query attention of about as many bytes as its latent attention."""
    weights = moe_weights(
        layers=78, dense=3, hidden=6144, ffn=12288, moe_ffn=2048, heads=64, groups=8, dim=192, experts=256,
        vocab=154880, bias=False,
    )  # fmt: skip
    starts = (0, 14, 22, 30, 38, 46, 54, 62, 78)  # layers per pipeline stage: 14, six times 8, 16
    stages = tuple(sum(layer >= start for start in starts[1:-1]) for layer in range(78))
    started = time.process_time()  # what others do on this machine does not count
    layout = Layout(256, stages, tp=4, pp=8, ep=32, experts=256)
    plan = build_plan(weights, layout, 2**30, spread_sources(layout, 1))
    broadcast, p2p = broadcast_traffic(plan, [16] * 8), p2p_traffic(plan, [16] * 8)
    assert time.process_time() - started < 30  # 3 s on an idle core
    total = sum(prod(shape) * 2 for w in weights for shape in w.shapes if w.dtype == torch.bfloat16)
    assert 1.4e12 < total < 1.6e12
    assert sum(broadcast.sent.values()) == pytest.approx(8 * total, rel=1e-5)
    assert p2p.lower_bound(50e9, 50e9)[0] < broadcast.lower_bound(50e9, 50e9)[0] / 8


def test_vocabulary_padding_belongs_to_no_slice() -> None:
    weight = Weight(Entry("output_layer.weight", ("lm_head.weight",), "vocab"), ((5, 2),), torch.float32)
    assert [shard_slices(weight, i, 4)[0][2:] for i in range(4)] == [(0, 2), (2, 4), (4, 5), (5, 5)]
