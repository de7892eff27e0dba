"""Run under torchrun with two ranks: every model's logits and exported weights under every layout of two, one after
another, and SAO steps of models with latent attention.

torchrun --nproc-per-node 2 -m tests.distributed.walk_models MODELS OUT
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from megatron_sao.config import ModelConfig, ParallelConfig
from megatron_sao.models import attention
from megatron_sao.models.backend import Backend
from megatron_sao.trainer.runtime import start_runtime, stop_runtime
from megatron_sao.weights.export import HFExporter
from tests.distributed.change_layout import change_layout
from tests.distributed.gradients import SGD, mixed_batch, step_and_change
from tests.distributed.parity import VARIANTS, build, logits

LAYOUTS = {
    "tp2": ParallelConfig(world_size=2, tp=2, sequence_parallel=True),
    "pp2": ParallelConfig(world_size=2, pp=2),
    "pp2 from the second layer": ParallelConfig(world_size=2, pp=2, pp_first_layers=1),
    "ep2": ParallelConfig(world_size=2, ep=2),
    "cp2": ParallelConfig(world_size=2, cp=2),
}
UNEVEN = "glm_moe_dsa shared indices"  # its third layer takes over the choice of the second
STEPS = {
    "deepseek_v3 YaRN, all sparse, wide values": ("tp2", "cp2"),
    "glm_moe_dsa shared indices": ("tp2", "pp2 from the second layer", "ep2", "cp2"),
    "glm_moe_dsa shared once, YaRN, three dense, tied": ("pp2",),
}


def walks() -> Iterator[tuple[str, str]]:
    """(layout, model) of every step of the walk."""
    for name in VARIANTS:
        yield "tp2", name
        yield "pp2 from the second layer" if name == UNEVEN else "pp2", name
        if name.split()[0] not in ("llama", "qwen3"):
            yield "ep2", name


def main(models: Path, out: Path) -> None:
    attention.QUERIES = 4  # so that sparse attention goes through sequences in several blocks
    backend = start_runtime(ModelConfig(path="unused"), ParallelConfig(world_size=2), 0, deterministic=True)
    for layout, name in walks():
        change_layout(LAYOUTS[layout])
        model, config, chunks = build(models / name, LAYOUTS[layout])
        result = logits(model, chunks, LAYOUTS[layout], backend.device)
        if dist.get_rank() == 1:  # the last pipeline stage, or one of two equals
            torch.save(result, out / f"{layout}-{name}.pt")
        weights = {name: tensor.clone() for name, tensor in HFExporter(chunks, model, config).tensors()}
        if dist.get_rank() == 0:
            save_file(weights, out / f"{layout}-{name}.safetensors")
    for name, layouts in STEPS.items():
        for layout in layouts:
            change_layout(LAYOUTS[layout])
            step(models / name, LAYOUTS[layout], out / f"{layout}-{name}-step", backend)
    stop_runtime()


def step(model: Path, layout: ParallelConfig, out: Path, backend: Backend) -> None:
    """Layers are recomputed: those that share an indexer's choice must then find it again."""
    parallel = layout.model_dump() | {"nproc_per_node": 2, "max_tokens_per_microbatch": 64}
    sections = {"parallel": parallel, "model": {"path": str(model), "recompute": "full"}}
    result = step_and_change(model, mixed_batch(), out, backend, SGD, **sections)
    if dist.get_rank() == 0:
        torch.save(result, out.with_suffix(".pt"))


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:]))
