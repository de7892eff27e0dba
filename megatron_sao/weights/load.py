"""Hugging Face weights into Megatron parameters: each rank reads its own slices, strictly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from safetensors import safe_open

from megatron_sao.config import ConfigError
from megatron_sao.models.build import padded_vocab_size
from megatron_sao.models.hf import HFModel
from megatron_sao.models.mapping import Entry, entries, global_name, shard


class WeightError(ConfigError):
    """Weights that do not match the model; the message lists the tensors."""


class HFTensors:
    """Lazy access to the tensors of a safetensors directory, sharded or not."""

    def __init__(self, path: Path) -> None:
        self._path = path
        index = path / "model.safetensors.index.json"
        if index.exists():
            self._files = dict(json.loads(index.read_text())["weight_map"])
        elif (path / "model.safetensors").exists():
            with safe_open(path / "model.safetensors", "pt") as file:
                self._files = dict.fromkeys(file.keys(), "model.safetensors")
        else:
            raise WeightError(f"{path} holds neither model.safetensors nor model.safetensors.index.json")
        self._open: dict[str, safe_open] = {}

    def names(self) -> set[str]:
        return set(self._files)

    def __getitem__(self, name: str) -> torch.Tensor:
        file = self._files[name]
        if file not in self._open:
            self._open[file] = safe_open(self._path / file, "pt")
        return self._open[file].get_tensor(name)


def local_tensors(chunks: list[GPTModel], config: TransformerConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Global name and tensor of everything this rank holds that is part of the model's weights.

    Expert biases are buffers and included. On the last of several pipeline stages a tied head is a second copy of the
    embedding and comes under the embedding's name.
    """
    for chunk in chunks:
        layer_offset = get_transformer_layer_offset(config, vp_stage=chunk.vp_stage)
        experts = (config.num_moe_experts or 0) // parallel_state.get_expert_model_parallel_world_size()
        expert_offset = experts * parallel_state.get_expert_model_parallel_rank()
        biases = ((n, b) for n, b in chunk.named_buffers() if n.endswith("router.expert_bias"))
        for local, tensor in (*chunk.named_parameters(), *biases):
            name = global_name(local, layer_offset, expert_offset)
            tied = name == "output_layer.weight" and chunk.share_embeddings_and_output_weights
            yield "embedding.word_embeddings.weight" if tied else name, tensor


@torch.no_grad()
def load_hf_weights(
    chunks: list[GPTModel], model: HFModel, config: TransformerConfig, head: Literal["policy", "critic"]
) -> None:
    """Fill a policy or a critic from ``model.path``. A critic's value head keeps its initialisation.

    Raises:
        WeightError: a tensor is missing, unexpected or mis-shaped, or a parameter would stay unset.
    """
    source = HFTensors(model.path)
    table = {entry.name: entry for entry in entries(model, config, head)}
    expected = {name for entry in entries(model, config) for name in entry.hf}
    redundant = {"lm_head.weight"} if model.tied else set()  # a copy that some writers store
    missing, unexpected = expected - source.names(), source.names() - expected - redundant
    if missing or unexpected:
        raise WeightError(
            f"{model.path} does not hold the tensors of a {model.model_type} with this config.json: "
            f"missing {sorted(missing)[:8]}, unexpected {sorted(unexpected)[:8]}"
        )
    for name, parameter in local_tensors(chunks, config):
        if head == "critic" and name.startswith("output_layer."):
            continue
        if name not in table:
            raise WeightError(f"no rule says which HF tensors fill the parameter {name!r}")
        tensors = [source[hf] for hf in table[name].hf]
        value = _local_slice(table[name], tensors, model, config)
        if value.shape != parameter.shape:
            raise WeightError(
                f"{', '.join(table[name].hf)} give shape {tuple(value.shape)}, but {name} needs "
                f"{tuple(parameter.shape)}; the weights do not match config.json"
            )
        parameter.copy_(value)


def _local_slice(entry: Entry, tensors: list[torch.Tensor], model: HFModel, config: TransformerConfig) -> torch.Tensor:
    if entry.kind == "vocab":
        padding = padded_vocab_size(model.vocab_size) - tensors[0].shape[0]
        tensors = [torch.nn.functional.pad(tensors[0], (0, 0, 0, padding))]
    if entry.expert:
        rank = parallel_state.get_expert_tensor_parallel_rank()
        size = parallel_state.get_expert_tensor_parallel_world_size()
    else:
        rank = parallel_state.get_tensor_model_parallel_rank()
        size = parallel_state.get_tensor_model_parallel_world_size()
    return shard(entry.kind, tensors, config, rank, size)
