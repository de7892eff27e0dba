"""The reshard plan: from (trainer layout, weights) to the list of transfers that make full Hugging Face tensors.

Pure: no process, no tensor of the model, only names and shapes. A plan says for every HF tensor which ranks hold its
slices, which of their replicas gives them, which source rank gathers and sends it, and in which bucket.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch

from megatron_sao.config import ConfigError
from megatron_sao.models.mapping import Entry

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"experts\.local_experts\.(\d+)\.")


@dataclass(frozen=True)
class Weight:
    """A Megatron parameter and the full HF tensors it is made of.

    Attributes:
        shapes: of ``entry.hf``, in that order, without vocabulary padding.
        dtype: of all of them.
        groups: query groups, for the kind ``qkv``.
    """

    entry: Entry
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    groups: int = 1

    @cached_property
    def nbytes(self) -> int:
        return sum(prod(shape) for shape in self.shapes) * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """How the trainer's ranks divide the model (Megatron's order of ranks: tp, cp, ep, dp, pp).

    Attributes:
        layer_stages: pipeline rank of every decoder layer.
        experts: routed experts per MoE layer, 0 for a dense model.
        tied: the last pipeline stage holds the embedding too, as its head.
    """

    world_size: int
    layer_stages: tuple[int, ...]
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    experts: int = 0
    tied: bool = False

    @property
    def stage_size(self) -> int:
        return self.world_size // self.pp

    def stages(self, entry: Entry) -> tuple[int, ...]:
        """The pipeline ranks that hold ``entry``."""
        if match := _LAYER.match(entry.name):
            return (self.layer_stages[int(match[1])],)
        if entry.name.startswith("embedding."):
            return (0, self.pp - 1) if self.tied and self.pp > 1 else (0,)
        return (self.pp - 1,)  # the last norm, the head, multi-token prediction

    def replicas(self, entry: Entry) -> list[tuple[int, ...]]:
        """Every set of ranks that together hold ``entry``, each in the order of its shards."""
        shards, first, stride = 1, 0, 1
        if entry.expert:
            stride = self.ep * self.etp
            first = self.etp * (int(_EXPERT.search(entry.name)[1]) * self.ep // self.experts)
            shards = self.etp
        elif entry.kind != "replicated":
            shards = stride = self.tp
        return [
            tuple(range(start, start + shards))
            for stage in self.stages(entry)
            for start in range(stage * self.stage_size + first, (stage + 1) * self.stage_size, stride)
        ]


class Slice(NamedTuple):
    """Rows (``dim`` 0) or columns (1) ``start`` to ``stop`` of the ``tensor``-th HF tensor of a weight."""

    tensor: int
    dim: int
    start: int
    stop: int


@dataclass(frozen=True)
class Transfer:
    """One weight on its way: rank ``holders[i]`` gives shard ``i`` to ``source``, which sends the full tensors at byte
    ``offset`` of its bucket number ``bucket``."""

    weight: Weight
    holders: tuple[int, ...]
    source: int
    bucket: int
    offset: int

    def slices(self, shard: int) -> list[Slice]:
        return shard_slices(self.weight, shard, len(self.holders))


@dataclass(frozen=True)
class Plan:
    """All transfers, in model order for each source."""

    layout: Layout
    sources: tuple[int, ...]
    transfers: tuple[Transfer, ...]

    @cached_property
    def buckets(self) -> dict[int, list[list[Transfer]]]:
        """The buckets of every source, in the order in which it sends them."""
        out: dict[int, list[list[Transfer]]] = {source: [] for source in self.sources}
        for transfer in self.transfers:
            mine = out[transfer.source]
            if transfer.bucket == len(mine):
                mine.append([])
            mine[transfer.bucket].append(transfer)
        return out

    @property
    def rounds(self) -> int:
        """All sources gather their ``r``-th buckets together."""
        return max(len(buckets) for buckets in self.buckets.values())


def shard_slices(weight: Weight, shard: int, shards: int) -> list[Slice]:
    """Which parts of its HF tensors a shard of ``weight`` holds. Vocabulary padding belongs to none."""
    dim = 1 if weight.entry.kind == "row" else 0
    out = []
    for index, shape in enumerate(weight.shapes):
        size = -(-shape[dim] // shards)
        out.append(Slice(index, dim, min(shard * size, shape[dim]), min((shard + 1) * size, shape[dim])))
    return out


def shard_shape(weight: Weight, shards: int) -> tuple[int, ...]:
    """The shape of one of ``shards`` shards of ``weight`` as Megatron holds it, vocabulary padding included."""
    if weight.entry.kind == "replicated":
        return weight.shapes[0]
    dim = 1 if weight.entry.kind == "row" else 0
    shape = list(weight.shapes[0])
    shape[dim] = sum(-(-full[dim] // shards) for full in weight.shapes)
    return tuple(shape)


def shard_nbytes(weight: Weight, index: int, shards: int) -> int:
    """Of what shard ``index`` of ``shards`` holds of the HF tensors; vocabulary padding does not count."""
    slices = shard_slices(weight, index, shards)
    elements = [
        (part.stop - part.start) * prod(weight.shapes[part.tensor]) // weight.shapes[part.tensor][part.dim]
        for part in slices
    ]
    return sum(elements) * weight.dtype.itemsize


def lies_as_held(weight: Weight, shards: int) -> bool:
    """Whether the shards, one after the other as Megatron holds them, are the HF tensors, one after the other."""
    kind = weight.entry.kind
    return kind in ("replicated", "column", "vocab") or (shards == 1 and kind != "qkv")


def place(weight: Weight, shard: torch.Tensor, index: int, shards: int, out: Sequence[torch.Tensor]) -> None:
    """Copy shard ``index`` of ``shards``, as Megatron holds it, to where it belongs in the HF tensors ``out``."""
    slices = shard_slices(weight, index, shards)
    for part, piece in zip(slices, _pieces(weight, shard, slices), strict=True):
        target = out[part.tensor].narrow(part.dim, part.start, part.stop - part.start)
        target.view(piece.shape).copy_(piece)


def _pieces(weight: Weight, shard: torch.Tensor, slices: list[Slice]) -> Sequence[torch.Tensor]:
    """Views of a shard, one per HF tensor. Those of ``qkv`` keep their query groups as a dimension of their own."""
    rows = [part.stop - part.start for part in slices]
    if weight.entry.kind == "gate_up":
        return shard.split(rows)
    if weight.entry.kind == "qkv":
        groups = weight.groups * rows[0] // weight.shapes[0][0]
        return shard.view(groups, -1, *shard.shape[1:]).split([n // groups for n in rows], dim=1)
    return (shard[: rows[0]] if weight.entry.kind == "vocab" else shard,)


def spread_sources(layout: Layout, per_stage: int) -> tuple[int, ...]:
    """Source ranks, ``per_stage`` of them evenly spread over the ranks of each pipeline stage; rank 0 is one.

    Raises:
        ConfigError: the ranks of a stage cannot be divided into so many.
    """
    if not 1 <= per_stage <= layout.stage_size or layout.stage_size % per_stage:
        raise ConfigError(
            f"weights.sources_per_stage = {per_stage} does not divide the {layout.stage_size} ranks of a pipeline "
            "stage; choose a divisor"
        )
    return tuple(range(0, layout.world_size, layout.stage_size // per_stage))


def build_plan(
    weights: Sequence[Weight],
    layout: Layout,
    bucket_bytes: int,
    sources: tuple[int, ...],
    experts_together: bool = True,
) -> Plan:
    """Decide who gathers and sends what.

    Every weight is sent by one source: one that holds a part of it where there is any, else one of its own pipeline
    stage; of these the one with the fewest bytes so far. Each shard is given by one of its replicas: the one that the
    source is part of, else the one that has given least.

    Args:
        experts_together: one source of its stage sends all experts of a layer, in order, and so can compute the
            checksum of the tensor into which an engine fuses them; otherwise each may come from where it is.

    Raises:
        ConfigError: a tensor cannot be divided as the layout says.
    """
    owners: dict[str, int] = {}
    load: dict[int, int] = dict.fromkeys(sources, 0)
    filling: dict[int, tuple[int, int]] = dict.fromkeys(sources, (0, 0))  # number and bytes of the open bucket
    given: dict[int, int] = defaultdict(int)
    transfers = []
    for weight in weights:
        _check_divisible(weight, layout)
        replicas = layout.replicas(weight.entry)
        unit = _unit(weight.entry) if experts_together else weight.entry.name
        if unit not in owners:
            candidates = _nearest(sources, layout, weight.entry, [] if experts_together else replicas)
            owners[unit] = min(candidates, key=lambda source: (load[source], source))
        source = owners[unit]
        load[source] += weight.nbytes
        holders = _holders(replicas, source, given)
        for rank in holders:
            given[rank] += 0 if rank == source else weight.nbytes // len(holders)
        bucket, filled = filling[source]
        if filled and (filled + weight.nbytes > bucket_bytes or filled % weight.dtype.itemsize):
            bucket, filled = bucket + 1, 0
        transfers.append(Transfer(weight, holders, source, bucket, filled))
        filling[source] = bucket, filled + weight.nbytes
    return Plan(layout, sources, tuple(transfers))


def _nearest(sources: tuple[int, ...], layout: Layout, entry: Entry, replicas: list[tuple[int, ...]]) -> Sequence[int]:
    """The sources in ``replicas``; else those of the stages of ``entry``; else all."""
    stages = layout.stages(entry)
    near = [source for source in sources if source // layout.stage_size in stages]
    return [source for source in near if any(source in ranks for ranks in replicas)] or near or sources


def _holders(replicas: list[tuple[int, ...]], source: int, given: dict[int, int]) -> tuple[int, ...]:
    for ranks in replicas:
        if source in ranks:
            return ranks
    return min(replicas, key=lambda ranks: (given[ranks[0]], ranks[0]))


def _unit(entry: Entry) -> str:
    """What one source sends as a whole: a parameter, or all experts of a layer."""
    return entry.name.partition("local_experts.")[0] if entry.expert else entry.name


def _check_divisible(weight: Weight, layout: Layout) -> None:
    entry = weight.entry
    shards = layout.etp if entry.expert else layout.tp
    if entry.kind in ("replicated", "vocab") or shards == 1:
        return
    dim = 1 if entry.kind == "row" else 0
    if any(shape[dim] % shards for shape in weight.shapes) or (entry.kind == "qkv" and weight.groups % shards):
        name = "parallel.etp" if entry.expert else "parallel.tp"
        raise ConfigError(f"{name} = {shards} does not divide {entry.name} (Hugging Face shapes {weight.shapes})")


@dataclass(frozen=True)
class Traffic:
    """What a push costs, in bytes.

    Attributes:
        gathered: each rank sends to sources, by rank.
        sent: each source sends to engines, by rank.
        received: each rank of an engine receives.
    """

    gathered: dict[int, int]
    sent: dict[int, int]
    received: list[int]

    def lower_bound(self, trainer_bandwidth: float, engine_bandwidth: float) -> tuple[float, str]:
        """Seconds that no schedule can beat at the given bytes/s per rank, and the link that sets them."""
        links = {f"out of trainer rank {rank}": n / trainer_bandwidth for rank, n in self._out().items()}
        links["into a rank of an engine"] = max(self.received) / engine_bandwidth
        busiest = max(links, key=links.__getitem__)
        return links[busiest], busiest

    def _out(self) -> dict[int, int]:
        return {r: self.gathered.get(r, 0) + self.sent.get(r, 0) for r in self.gathered.keys() | self.sent.keys()}


def broadcast_traffic(plan: Plan, engine_tps: Sequence[int]) -> Traffic:
    """As stock SGLang receives: full tensors, broadcast from a source to all ranks of an engine. The bytes out of a
    source are the least that a broadcast needs, one copy per engine, which its first rank passes on."""
    gathered: dict[int, int] = defaultdict(int)
    sent: dict[int, int] = defaultdict(int)
    total = 0
    for transfer in plan.transfers:
        nbytes = transfer.weight.nbytes
        for rank in transfer.holders:
            gathered[rank] += 0 if rank == transfer.source else nbytes // len(transfer.holders)
        sent[transfer.source] += nbytes * len(engine_tps)
        total += nbytes
    return Traffic(gathered, sent, [total for tp in engine_tps for _ in range(tp)])


def p2p_traffic(plan: Plan, engine_tps: Sequence[int]) -> Traffic:
    """As a receiver that takes slices would: each shard goes from one of the ranks that hold it straight to the engine
    ranks that need it, nothing is gathered, and the load is spread over all replicas."""
    sent: dict[int, int] = defaultdict(int)
    received = [0] * sum(engine_tps)
    for transfer in plan.transfers:
        weight, shards = transfer.weight, len(transfer.holders)
        whole = weight.entry.kind == "replicated"
        replicas, need, first = plan.layout.replicas(weight.entry), 0, 0
        for tp in engine_tps:
            share = weight.nbytes if whole else weight.nbytes // tp
            need += share * tp
            for rank in range(first, first + tp):
                received[rank] += share
            first += tp
        ranks = min(replicas, key=lambda ranks: sent[ranks[0]])
        for rank in ranks:
            sent[rank] += need // shards
    return Traffic({}, sent, received)
