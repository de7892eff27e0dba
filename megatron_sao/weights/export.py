"""Megatron's shards to full Hugging Face tensors on rank 0."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors.torch import save_file

from megatron_sao.models.hf import HFModel
from megatron_sao.weights.gather import Gatherer, collect_weights, trainer_layout
from megatron_sao.weights.reshard import build_plan

BUCKET_BYTES = 256 * 2**20


class HFExporter:
    """Exports the current weights as HF tensors, a critic's without its value head, for which Hugging Face has no name.
    Every method is collective over all trainer ranks.

    Which rank gives what is agreed once, at construction: ``layout`` and ``weights`` say what there is to give.
    """

    def __init__(
        self,
        chunks: list[GPTModel],
        model: HFModel,
        config: TransformerConfig,
        head: Literal["policy", "critic"] = "policy",
    ) -> None:
        self.layout = trainer_layout(model, config, dist.get_world_size(), head)
        self.weights = collect_weights(chunks, model, config, self.layout, head)
        plan = build_plan(self.weights, self.layout, BUCKET_BYTES, sources=(0,))
        self._gatherer = Gatherer(plan, chunks, config)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and full tensor of every HF weight, in model order: on rank 0; other ranks get nothing but must iterate.

        The tensors are copies; up to 256 MiB of them share one block of memory.
        """
        for bucket in self._gatherer.buckets(reuse_memory=False):
            if bucket is not None:
                yield from bucket.tensors


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
