"""Ranks of a training world that does not exist: the real Megatron models on the meta device, under process groups that
only know who would be in them."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_sao.config import OptimizerConfig, ParallelConfig, RunConfig
from megatron_sao.models.adam import bind_adam
from megatron_sao.models.build import build_critic, build_policy
from megatron_sao.models.cpu import adapt_megatron
from megatron_sao.models.hf import HFModel, transformer_config
from megatron_sao.models.spec import prepare_native_layers
from megatron_sao.trainer.critic import freeze_all_but
from megatron_sao.trainer.runtime import set_layout
from megatron_sao.trainer.trainable import Trainable
from megatron_sao.weights.load import local_tensors

META = torch.device("meta")
LAYERS = "native"  # the layers of Transformer Engine hold the same parameters, but need a GPU to be built

# The first pattern that occurs in a parameter's global name says of which kind it is.
_KINDS = {
    "indexer": r"\.indexer\.",
    "norms": r"layernorm",
    "attention": r"\.self_attention\.",
    "router": r"\.router\.",
    "shared_experts": r"\.shared_experts\.",
    "experts": r"\.experts\.",
    "dense": r"\.mlp\.",
    "embedding": r"^embedding\.",
    "head": r"^output_layer\.",
}


@dataclass(frozen=True)
class Place:
    """Coordinates of a rank. ``dp`` counts the replicas of its dense parameters, context-parallel ranks among them,
    ``edp`` those of its experts."""

    rank: int
    tp: int
    pp: int
    ep: int
    etp: int
    dp: int
    edp: int

    @property
    def content(self) -> tuple[int, int, int, int]:
        """Ranks with an equal one hold the same parameters."""
        return self.pp, self.tp, self.ep, self.etp

    @property
    def structure(self) -> tuple[int, int, int]:
        """Ranks with an equal one hold the same modules, if not the same experts in them."""
        return self.pp, self.tp, self.etp


@dataclass(frozen=True)
class State:
    """Bytes of a model and of what its training keeps between steps.

    Attributes:
        optimizer: main weights, where the model's own are not float32, and Adam's moments.
        trained: the elements that this rank's optimizer updates, in its dtype.
    """

    weights: int
    gradients: int
    optimizer: int
    trained: int


@dataclass(frozen=True)
class LayerKind:
    """Attributes:
    moe: whether it has experts.
    indexer: whether it chooses keys, for itself and the layers that share its choice.
    """

    moe: bool
    indexer: bool


@dataclass(frozen=True)
class SimulatedModel:
    """The policy that one rank holds.

    Attributes:
        tensors: global name and shape of every tensor on the rank, as often as it is there.
        parameters: their number by kind.
        layers: of all its pipeline stages.
        last: whether the head is here.
    """

    tensors: list[tuple[str, tuple[int, ...]]]
    parameters: Counter[str]
    layers: list[LayerKind]
    last: bool


def prepare_process() -> None:
    """Let Megatron build on the meta device and take any process group for a fake one. Once per process, which can do
    nothing else afterwards. Raises RuntimeError where CUDA is visible."""
    adapt_megatron(META)
    bind_adam()
    prepare_native_layers()
    create = parallel_state.create_group

    def create_fake(ranks: list[int], *args: Any, **kwargs: Any) -> dist.ProcessGroup | None:
        if dist.get_rank() not in ranks:
            return None  # there are thousands of these, and nobody in them
        return create(ranks, *args, **kwargs | {"backend": None})  # of the world's kind; some ask for gloo

    parallel_state.create_group = create_fake


@contextlib.contextmanager
def simulated_rank(parallel: ParallelConfig, rank: int) -> Iterator[Place]:
    """Be ``rank`` of a world of ``parallel.world_size``, in Megatron's groups."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=parallel.world_size)
    try:
        set_layout(parallel, seed=0)
        yield Place(
            rank=rank,
            tp=parallel_state.get_tensor_model_parallel_rank(),
            pp=parallel_state.get_pipeline_model_parallel_rank(),
            ep=parallel_state.get_expert_model_parallel_rank(),
            etp=parallel_state.get_expert_tensor_parallel_rank(),
            dp=parallel_state.get_data_parallel_rank(with_context_parallel=True),
            edp=parallel_state.get_expert_data_parallel_rank(),
        )
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def native_config(config: RunConfig, model: HFModel) -> TransformerConfig:
    """The Megatron config of the layers that are built. Raises ConfigError where the layout does not suit the model."""
    return transformer_config(model, config.model.model_copy(update={"layers": LAYERS}), config.parallel)


def build_simulated(config: RunConfig, model: HFModel) -> list[GPTModel]:
    """The model chunks of the policy of the rank that this process is at the moment."""
    with META:
        return build_policy(model, native_config(config, model), LAYERS)


def simulated_policy(chunks: list[GPTModel]) -> SimulatedModel:
    """What ``chunks``, of a rank with the same structure, are on the rank that this process is at the moment."""
    tensors = [(name, tuple(tensor.shape)) for name, tensor in local_tensors(chunks, chunks[0].config)]
    parameters: Counter[str] = Counter()
    for name, shape in tensors:
        parameters[kind_of(name)] += torch.Size(shape).numel()
    layers = [
        LayerKind(
            moe=isinstance(layer.mlp, MoELayer),
            indexer=any(".indexer." in name for name, _ in layer.self_attention.named_parameters()),
        )
        for chunk in chunks
        for layer in chunk.decoder.layers
    ]
    return SimulatedModel(tensors, parameters, layers, last=any(chunk.post_process for chunk in chunks))


def kind_of(name: str) -> str:
    """Of a parameter's global name. Raises ValueError for one that no kind claims."""
    for kind, pattern in _KINDS.items():
        if re.search(pattern, name):
            return kind
    raise ValueError(f"the parameter {name!r} is of no known kind")


def simulated_state(config: RunConfig, model: HFModel, policy: list[GPTModel]) -> dict[str, State]:
    """Bytes of ``policy``, which gets gradient buffers and optimizer by this, and of the critic beside it in the RL
    stage, if the run has one."""
    states = {"policy": _state(policy, policy[0].config, config.rl.policy_optimizer, config.parallel)}
    if config.algorithm.advantage == "critic":
        megatron = native_config(config, model)
        with META:
            critic = build_critic(model, megatron, LAYERS, config.algorithm.value_head_bias, config.seed)
        freeze_all_but(critic, config.algorithm.critic_trainable)
        states["critic"] = _state(critic, megatron, config.rl.critic_optimizer, config.parallel)
    return states


def _state(
    chunks: list[GPTModel], config: TransformerConfig, optimizer: OptimizerConfig, parallel: ParallelConfig
) -> State:
    with META:  # the model as it is at work
        whole = parallel.model_copy(update={"offload_idle_model": False})
        trainable = Trainable(chunks, config, optimizer, 1, whole)
    weights = {*_storages(t for chunk in chunks for t in (*chunk.parameters(), *chunk.buffers()))}
    buffers = [buffer for m in trainable.modules for buffer in (*m.buffers, *m.expert_parallel_buffers)]
    gradients = {*_storages(buffer.grad_data for buffer in buffers)}
    trained = [
        parameter
        for part in trainable.optimizer.chained_optimizers
        for group in part.optimizer.param_groups
        for parameter in group["params"]
    ]
    main_weights = {*_storages(trained)} - weights  # in float32 they are the model's own
    moments = 2 if optimizer.name == "adam" else 0
    updated = sum(parameter.nbytes for parameter in trained)
    return State(
        weights=sum(storage.nbytes() for storage in weights),
        gradients=sum(storage.nbytes() for storage in gradients),
        optimizer=sum(storage.nbytes() for storage in main_weights) + moments * updated,
        trained=updated,
    )


def _storages(tensors: Iterator[torch.Tensor]) -> Iterator[torch.UntypedStorage]:
    return (tensor.untyped_storage() for tensor in tensors)
