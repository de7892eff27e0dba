"""Hugging Face weights into Megatron parameters: each rank reads what it needs, strictly."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_sao.models.build import padded_vocab_size
from megatron_sao.models.hf import HFModel
from megatron_sao.models.mapping import Entry, entries, global_name, mtp_tensors, shard, unshard
from megatron_sao.weights.hf_files import HFTensors, WeightError

AWAY = "this model's weights wait in host memory; use them inside Trainable.resident()"


@dataclass(frozen=True)
class LocalTensor:
    """One of the model's weights, as this rank holds it.

    Attributes:
        chunk: index of the model chunk.
        local_name: what the chunk calls it.
        name: its global name.
    """

    chunk: int
    local_name: str
    name: str
    tensor: torch.Tensor


def weights_of(chunks: list[GPTModel], config: TransformerConfig) -> Iterator[LocalTensor]:
    """Everything this rank holds that is part of the model's weights.

    Expert biases are buffers and included. On the last of several pipeline stages a tied head is a second copy of the
    embedding and comes under the embedding's name.

    Raises:
        RuntimeError: the weights are not there to be read, but wait in host memory.
    """
    if any(p.numel() and not p.untyped_storage().nbytes() for chunk in chunks for p in chunk.parameters()):
        raise RuntimeError(AWAY)
    for index, chunk in enumerate(chunks):
        layer_offset = get_transformer_layer_offset(config, vp_stage=chunk.vp_stage)
        experts = (config.num_moe_experts or 0) // parallel_state.get_expert_model_parallel_world_size()
        expert_offset = experts * parallel_state.get_expert_model_parallel_rank()
        biases = ((n, b) for n, b in chunk.named_buffers() if n.endswith("router.expert_bias"))
        for local, tensor in (*chunk.named_parameters(), *biases):
            name = global_name(local, layer_offset, expert_offset)
            tied = name == "output_layer.weight" and chunk.share_embeddings_and_output_weights
            yield LocalTensor(index, local, "embedding.word_embeddings.weight" if tied else name, tensor)


def local_tensors(chunks: list[GPTModel], config: TransformerConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Global name and tensor of :func:`weights_of`."""
    return ((weight.name, weight.tensor) for weight in weights_of(chunks, config))


@torch.no_grad()
def load_hf_weights(
    chunks: list[GPTModel], model: HFModel, config: TransformerConfig, head: Literal["policy", "critic"]
) -> None:
    """Fill a policy or a critic from ``model.path``. A critic's value head keeps its initialisation.

    Raises:
        WeightError: a tensor is missing, unexpected or mis-shaped, or a parameter would stay unset.
    """
    source = HFTensors(model.path, model.fp8_block)
    table = {entry.name: entry for entry in entries(model, config, head)}
    own = [
        (name, tensor)
        for name, tensor in local_tensors(chunks, config)
        if head == "policy" or not name.startswith("output_layer.")
    ]
    check_hf_tensors(source, own, model, config)
    for name, parameter in own:
        parameter.copy_(local_slice(table[name], [source[hf] for hf in table[name].hf], model, config))


def check_hf_tensors(
    source: HFTensors, own: Iterable[tuple[str, torch.Tensor]], model: HFModel, config: TransformerConfig
) -> None:
    """Compare the whole directory's names, and the shapes of what this rank's tensors ``own`` are made of. Nothing but
    headers is read.

    Raises:
        WeightError: lists what is missing, unexpected or mis-shaped.
    """
    problems = hf_problems(source, own, model, config)
    if problems:
        raise WeightError(
            f"{model.path} does not hold the tensors of a {model.model_type} with this config.json: {problems}"
        )


def hf_problems(
    source: HFTensors, own: Iterable[tuple[str, torch.Tensor]], model: HFModel, config: TransformerConfig
) -> str:
    """What :func:`check_hf_tensors` raises about, "" if nothing."""
    table = {entry.name: entry for entry in entries(model, config)}
    expected = {name for entry in table.values() for name in entry.hf}
    redundant = {"lm_head.weight"} if model.tied else set()  # a copy that some writers store
    missing = expected - source.names()
    unexpected = source.names() - expected - redundant - mtp_tensors(model, source.names())
    mis_shaped = []
    for name, tensor in own:
        if name not in table:
            raise WeightError(f"no rule says which HF tensors fill the parameter {name!r}")
        for hf, shape in zip(table[name].hf, hf_shapes(table[name], tensor.shape, model, config), strict=True):
            if hf not in missing and source.spec(hf).shape != shape:
                mis_shaped.append(f"{hf} {source.spec(hf).shape} instead of {shape}")
    found = (("missing", missing), ("unexpected", unexpected), ("mis-shaped", mis_shaped))
    return ", ".join(f"{what} {sorted(names)}" for what, names in found if names)


def hf_shapes(
    entry: Entry, local_shape: torch.Size, model: HFModel, config: TransformerConfig
) -> list[tuple[int, ...]]:
    """Shapes of the full HF tensors of a parameter of which a rank holds ``local_shape``."""
    _, size = tensor_parallel(entry)
    shards = [torch.empty(local_shape, device="meta")] * size
    return [tuple(tensor.shape) for tensor in hf_tensors(entry, shards, model, config)]


def hf_tensors(
    entry: Entry, shards: list[torch.Tensor], model: HFModel, config: TransformerConfig
) -> list[torch.Tensor]:
    """The full HF tensors of a parameter, without vocabulary padding, from all its tensor-parallel shards."""
    tensors = unshard(entry.kind, shards, config)
    return [tensor[: model.vocab_size] for tensor in tensors] if entry.kind == "vocab" else tensors


def local_slice(entry: Entry, tensors: list[torch.Tensor], model: HFModel, config: TransformerConfig) -> torch.Tensor:
    """What this rank holds of a parameter, from its full HF tensors."""
    if entry.kind == "vocab":
        padding = padded_vocab_size(model.vocab_size) - tensors[0].shape[0]
        tensors = [torch.nn.functional.pad(tensors[0], (0, 0, 0, padding))]
    return shard(entry.kind, tensors, config, *tensor_parallel(entry))


def tensor_parallel(entry: Entry) -> tuple[int, int]:
    """Rank and size of the group over which the parameter is sharded."""
    if entry.expert:
        return (
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )
    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
