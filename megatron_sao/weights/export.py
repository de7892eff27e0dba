"""Megatron's shards to full Hugging Face tensors on rank 0, one parameter at a time."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors.torch import save_file

from megatron_sao.distributed import all_gather_json
from megatron_sao.models.hf import HFModel
from megatron_sao.models.mapping import Entry, entries, unshard
from megatron_sao.weights.load import WeightError, local_tensors


class HFExporter:
    """Exports the current weights as HF tensors, a critic's without its value head, for which Hugging Face has no name.
    Every method is collective over all trainer ranks.

    Which rank owns what is agreed once, at construction: of all ranks that hold a parameter the lowest one sends it.
    """

    def __init__(
        self,
        chunks: list[GPTModel],
        model: HFModel,
        config: TransformerConfig,
        head: Literal["policy", "critic"] = "policy",
    ) -> None:
        self._chunks, self._model, self._config = chunks, model, config
        self._entries = entries(model, config, head)
        self._device = next(chunks[0].parameters()).device
        held = all_gather_json([name for name, _ in local_tensors(chunks, config)], self._device)
        self._owner: dict[str, int] = {}
        for rank, names in enumerate(held):
            for name in names:
                self._owner.setdefault(name, rank)
        value_head = {"output_layer.weight", "output_layer.bias"} if head == "critic" else set()
        unknown = self._owner.keys() - {entry.name for entry in self._entries} - value_head
        unheld = {entry.name for entry in self._entries} - self._owner.keys()
        if unknown or unheld:
            raise WeightError(
                f"parameters without an export rule: {sorted(unknown)[:8]}; rules without a parameter: "
                f"{sorted(unheld)[:8]}"
            )

    @torch.no_grad()
    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and full tensor of every HF weight, in model order: on rank 0; other ranks get nothing but must iterate.

        The tensors are copies or views of the live parameters: use them before the next optimizer step.
        """
        local = dict(local_tensors(self._chunks, self._config))
        for entry in self._entries:
            shards = self._gather(entry, local.get(entry.name))
            if shards is None:
                continue
            for name, tensor in zip(entry.hf, unshard(entry.kind, shards, self._config), strict=True):
                if entry.kind == "vocab":
                    tensor = tensor[: self._model.vocab_size]
                yield name, tensor.contiguous()

    def _gather(self, entry: Entry, local: torch.Tensor | None) -> list[torch.Tensor] | None:
        """All tensor-parallel shards of one parameter on rank 0, None elsewhere."""
        rank, owner = dist.get_rank(), self._owner[entry.name]
        group = (
            parallel_state.get_expert_tensor_parallel_group()
            if entry.expert
            else parallel_state.get_tensor_model_parallel_group()
        )
        members = dist.get_process_group_ranks(group)
        shards = None
        if local is not None and owner in members:
            local = local.detach().contiguous()
            if entry.kind == "replicated" or len(members) == 1:
                shards = [local]
            else:
                shards = [torch.empty_like(local) for _ in members]
                dist.all_gather(shards, local, group=group)
        if owner == 0:
            return shards if rank == 0 else None
        return self._bring_to_rank_0(shards, owner)

    def _bring_to_rank_0(self, shards: list[torch.Tensor] | None, owner: int) -> list[torch.Tensor] | None:
        rank = dist.get_rank()
        header = torch.zeros(4, dtype=torch.int64, device=self._device)  # count, float32?, rows, columns
        if rank == owner:
            shape = shards[0].shape
            header[:] = torch.tensor([len(shards), shards[0].dtype == torch.float32, shape[0], shape[1:].numel()])
            header[3] *= 1 if len(shape) > 1 else -1  # a vector
            dist.send(header, 0)
            for shard in shards:
                dist.send(shard, 0)
        elif rank == 0:
            dist.recv(header, owner)
            count, is_float, rows, columns = header.tolist()
            shape = (rows,) if columns < 0 else (rows, columns)
            dtype = torch.float32 if is_float else self._config.params_dtype
            received = [torch.empty(shape, dtype=dtype, device=self._device) for _ in range(count)]
            for shard in received:
                dist.recv(shard, owner)
            return received
        return None


def save_hf(exporter: HFExporter, model: HFModel, out: Path) -> None:
    """Write an HF directory that ``transformers`` and SGLang load: weights, config, tokenizer. Collective.

    The directory appears complete or not at all.
    """
    weights = {name: tensor.cpu().clone() for name, tensor in exporter.tensors()}
    if dist.get_rank() == 0:
        temporary = out.with_name(out.name + ".tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        save_file(weights, temporary / "model.safetensors", metadata={"format": "pt"})
        for file in model.path.iterdir():
            if file.is_file() and ".safetensors" not in file.name:
                shutil.copy2(file, temporary)
        shutil.rmtree(out, ignore_errors=True)
        temporary.rename(out)
    dist.barrier()
