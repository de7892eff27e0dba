"""Whether all ranks together hold a checkpoint's tensors: none missing, twice or too many, each in its shape."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_sao.config import ParallelConfig
from megatron_sao.models.hf import HFModel
from megatron_sao.models.mapping import Entry, entries, mtp_tensors, unshard
from megatron_sao.plan.oracle import Shapes
from megatron_sao.plan.simulate import META, Place


@dataclass(frozen=True)
class Coverage:
    """Attributes:
    missing: HF names that some rank should hold a part of and none does.
    duplicate: HF names that are held, or would be exported, more than once.
    unexpected: HF names with a shape that no such checkpoint has; Megatron names that no HF tensor fills.
    tensors: number of HF tensors that the ranks hold.
    carried: number of HF tensors that are not built but carried along, those of multi-token prediction.
    """

    missing: list[str]
    duplicate: list[str]
    unexpected: list[str]
    tensors: int
    carried: int

    @property
    def exact(self) -> bool:
        return not (self.missing or self.duplicate or self.unexpected)


class Holdings:
    """What was seen on the ranks: of every Megatron tensor its shards, and in which places each shard is."""

    def __init__(self, model: HFModel, config: TransformerConfig) -> None:
        self.table = {entry.name: entry for entry in entries(model, config)}
        self.shards: dict[str, dict[int, tuple[int, ...]]] = defaultdict(dict)
        self.misshapen: set[str] = set()
        self.repeated: set[str] = set()  # twice on one rank
        self._owners: dict[str, set[tuple[int, ...]]] = defaultdict(set)

    def add(self, place: Place, tensors: Iterable[tuple[str, tuple[int, ...]]]) -> None:
        """Note the tensors of one rank; of ranks with the same content one is enough."""
        seen: set[str] = set()
        for name, shape in tensors:
            expert = name in self.table and self.table[name].expert
            index = place.etp if expert else place.tp
            if self.shards[name].setdefault(index, shape) != shape:
                self.misshapen.add(name)
            if name in seen:
                self.repeated.add(name)
            seen.add(name)
            self._owners[name].add((place.pp, place.ep) if expert else (place.pp,))

    def scattered(self, name: str, allowed: int) -> bool:
        """Whether ranks that are no replicas of each other hold the same tensor: in more than ``allowed`` pipeline
        stages or groups of experts."""
        return len(self._owners[name]) > allowed


def coverage(
    holdings: Holdings,
    model: HFModel,
    config: TransformerConfig,
    parallel: ParallelConfig,
    on_disk: tuple[Shapes, Shapes],
) -> Coverage:
    """Compare what the ranks hold, put together as an export does, with the tensors on disk.

    Args:
        on_disk: of the model and of its multi-token-prediction layers.
    """
    expected = on_disk[0] | on_disk[1]
    carried = mtp_tensors(model, expected)
    produced: Shapes = {}
    duplicate, unexpected = set(), {f"Megatron's {name}" for name in holdings.misshapen}
    for entry in holdings.table.values():
        allowed = 2 if model.tied and parallel.pp > 1 and entry.kind == "vocab" else 1
        if entry.name in holdings.repeated or holdings.scattered(entry.name, allowed):
            duplicate |= {*entry.hf}
        for name, shape in _assembled(entry, holdings, model, config, parallel).items():
            if name in produced:
                duplicate.add(name)
            produced[name] = shape
    unexpected |= {f"Megatron's {name}" for name in holdings.shards.keys() - holdings.table.keys()}
    unexpected |= produced.keys() - expected.keys() | (carried & on_disk[0].keys())
    for name in produced.keys() & expected.keys():
        if produced[name] != expected[name]:
            unexpected.add(f"{name} {[*produced[name]]}, on disk {[*expected[name]]}")
    missing = expected.keys() - produced.keys() - carried
    return Coverage(sorted(missing), sorted(duplicate), sorted(unexpected), len(produced), len(carried))


def _assembled(
    entry: Entry, holdings: Holdings, model: HFModel, config: TransformerConfig, parallel: ParallelConfig
) -> Shapes:
    """The HF tensors of an entry, none where a shard of it is on no rank."""
    shapes = holdings.shards.get(entry.name, {})
    size = parallel.etp if entry.expert else parallel.tp
    if sorted(shapes) != [*range(size)]:
        return {}
    shards = [torch.empty(shapes[index], device=META) for index in range(size)]
    full = unshard(entry.kind, shards, config)
    rows = model.vocab_size if entry.kind == "vocab" else None
    return {name: tuple(tensor[:rows].shape) for name, tensor in zip(entry.hf, full, strict=True)}
