"""From a run config to what every rank holds, whether that is the whole model, and whether it fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import batched

from megatron.core.models.gpt.gpt_model import GPTModel

from megatron_sao.config import RunConfig
from megatron_sao.models.hf import HFModel, read_hf_model
from megatron_sao.plan.activations import activations
from megatron_sao.plan.coverage import Coverage, Holdings, coverage
from megatron_sao.plan.layout import check_layout
from megatron_sao.plan.memory import GB, RankMemory, rank_memory
from megatron_sao.plan.oracle import tensors_on_disk
from megatron_sao.plan.simulate import (
    Place,
    SimulatedModel,
    State,
    build_simulated,
    native_config,
    simulated_policy,
    simulated_rank,
    simulated_state,
)


@dataclass(frozen=True)
class RankPlan:
    """One rank: where it is, its parameters by kind, how many layers it has, and its memory."""

    place: Place
    parameters: Counter[str]
    layers: int
    memory: RankMemory


@dataclass(frozen=True)
class Plan:
    config: RunConfig
    model: HFModel
    coverage: Coverage
    ranks: list[RankPlan]

    @property
    def worst(self) -> RankPlan:
        return max(self.ranks, key=lambda rank: rank.memory.peak)

    @property
    def fits(self) -> bool:
        return self.coverage.exact and fits_cluster(self.config, self.ranks)


def make_plan(config: RunConfig) -> Plan:
    """Build every rank. Needs ``prepare_process``.

    Raises:
        ConfigError: the model is not supported, or cannot be divided as the config says.
    """
    model = read_hf_model(config.model.path)
    check_layout(config, model)
    megatron = native_config(config, model)
    on_disk = tensors_on_disk(config.model.path)
    holdings = Holdings(model, megatron)
    ranks: list[RankPlan] = []
    for plan, policy in plan_ranks(config, model, range(config.parallel.world_size)):
        holdings.add(plan.place, policy.tensors)
        ranks.append(plan)
    return Plan(config, model, coverage(holdings, model, megatron, config.parallel, on_disk), ranks)


def plan_ranks(config: RunConfig, model: HFModel, ranks: Iterable[int]) -> Iterator[tuple[RankPlan, SimulatedModel]]:
    """Build the given ranks, in ascending order.

    A model is built once for all ranks that hold the same modules, and named anew where they hold other experts; its
    training state is built once for all whose tensors have the same shapes: for the first of a stage, which has the
    fullest share of a distributed optimizer's state.
    """
    built: dict[tuple[int, ...], list[GPTModel]] = {}
    policies: dict[tuple[int, ...], SimulatedModel] = {}
    states: dict[object, dict[str, State]] = {}
    memories: dict[object, RankMemory] = {}
    for rank in ranks:
        with simulated_rank(config.parallel, rank) as place:
            if place.structure not in built:
                built[place.structure] = build_simulated(config, model)
            chunks = built[place.structure]
            if place.content not in policies:
                policies[place.content] = simulated_policy(chunks)
            policy = policies[place.content]
            kind = place.pp, tuple(shape for _, shape in policy.tensors)
            if kind not in states:
                states[kind] = simulated_state(config, model, chunks)
            sends = _sends(config, rank)
            if (kind, sends) not in memories:
                memories[kind, sends] = _memory(config, model, place, policy, states[kind], sends)
        memory = memories[kind, sends]
        yield RankPlan(place, policy.parameters, len(policy.layers), memory), policy


def fits_cluster(config: RunConfig, ranks: list[RankPlan]) -> bool:
    """Whether the GPU of each of the ranks, and the host memory of their nodes, are large enough."""
    gpu = max(rank.memory.peak for rank in ranks) <= config.cluster.gpu_memory_gb * GB
    return gpu and max(host_memory(config, ranks)) <= config.cluster.host_memory_gb * GB


def host_memory(config: RunConfig, ranks: list[RankPlan]) -> list[int]:
    """Bytes that the ranks of each node need, where ``ranks`` are all of them; else those of nodes full of ranks like
    the given ones."""
    per_node = config.parallel.nproc_per_node
    if len(ranks) < config.parallel.world_size:
        return [per_node * rank.memory.host for rank in ranks]
    return [sum(rank.memory.host for rank in node) for node in batched(ranks, per_node)]


def _memory(
    config: RunConfig, model: HFModel, place: Place, policy: SimulatedModel, states: dict[str, State], sends: bool
) -> RankMemory:
    megatron = native_config(config, model)
    acts = activations(config, model, megatron, place.pp, policy)
    largest = max(model.vocab_size, model.raw["intermediate_size"]) * model.raw["hidden_size"]
    return rank_memory(config, policy, states, acts, largest * megatron.params_dtype.itemsize, sends)


def _sends(config: RunConfig, rank: int) -> bool:
    """Whether the rank is one of those that send weights to the engines (weights/reshard.py)."""
    stage = config.parallel.world_size // config.parallel.pp
    return rank % max(1, stage // config.weights.sources_per_stage) == 0
