"""Run under torchrun with two ranks: conversions of models under layouts, and what the trainer makes of some.

torchrun --nproc-per-node 2 -m tests.distributed.walk_conversion MODELS OUT
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from megatron_sao.config import ModelConfig, ParallelConfig
from megatron_sao.convert.hf_to_megatron import convert
from megatron_sao.models.backend import Backend
from megatron_sao.models.build import build_policy
from megatron_sao.models.hf import read_hf_model, transformer_config
from megatron_sao.trainer.checkpoint import Checkpoints, Position
from megatron_sao.trainer.runtime import start_runtime, stop_runtime
from megatron_sao.weights.export import HFExporter, save_hf
from tests import tiny_models
from tests.conversion import write_bfloat16_with_mtp, write_fp8
from tests.distributed.change_layout import change_layout

MODELS: dict[str, Callable[[Path], Path]] = {
    "llama_tied": tiny_models.write_llama,
    "qwen3": tiny_models.write_qwen3,
    "qwen3_moe": tiny_models.write_qwen3_moe,
    "glm4_moe": tiny_models.write_glm4_moe,
    "glm4_moe_bfloat16_mtp": write_bfloat16_with_mtp,
    "deepseek_v3": tiny_models.write_deepseek_v3,
    "deepseek_v3_fp8": write_fp8,
    "glm_moe_dsa": tiny_models.write_glm_moe_dsa,
}
DENSE = ("llama_tied", "qwen3")
LAYOUTS = {"tp2": {"tp": 2, "sequence_parallel": True}, "pp2": {"pp": 2}, "ep2": {"ep": 2}}
TRAINED = [  # converted under, loaded by the trainer under
    ("glm4_moe_bfloat16_mtp", "tp2", "pp2"),
    ("glm4_moe_bfloat16_mtp", "ep2", "tp2"),
    ("deepseek_v3_fp8", "pp2", "ep2"),
    ("llama_tied", "tp2", "pp2"),
]
SHARD_BYTES = 30_000  # several files each


def layouts(name: str) -> list[str]:
    return [layout for layout in LAYOUTS if not (layout == "ep2" and name in DENSE)]


def parallel_config(name: str, layout: str) -> ParallelConfig:
    # the third of its layers has no indexer of its own
    uneven = {"pp_first_layers": 3, "pp_last_layers": 1} if (name, layout) == ("glm_moe_dsa", "pp2") else {}
    return ParallelConfig(world_size=2, nproc_per_node=2, **LAYOUTS[layout] | uneven)


def save_from_trainer(models: Path, out: Path, name: str, saved: str, loaded: str, backend: Backend) -> None:
    """Load a converted directory as the trainer loads its checkpoints, and export what that gives."""
    model = read_hf_model(models / name)
    dtype = "float32" if name == "llama_tied" else "bfloat16"
    config = transformer_config(model, ModelConfig(path=model.path, dtype=dtype), parallel_config(name, loaded))
    chunks = build_policy(model, config, "native")
    run = out / f"{name}-{saved}-{loaded}"
    if dist.get_rank() == 0:
        run.mkdir()
        (run / "sft-0").symlink_to(out / f"{name}-{saved}")
    dist.barrier()
    checkpoints = Checkpoints(run, model.raw, keep=1, device=backend.device, asynchronous=False)
    assert checkpoints.find_newest() == Position.of("sft", 0)
    checkpoints.load(Position.of("sft", 0), {"policy": chunks}, {})
    save_hf(HFExporter(chunks, model, config), model, run / "hf", SHARD_BYTES)


def main(models: Path, out: Path) -> None:
    backend = None
    for layout in LAYOUTS:
        for name in (name for name in MODELS if layout in layouts(name)):
            parallel = parallel_config(name, layout)
            if backend is None:
                backend = start_runtime(ModelConfig(path=models), parallel, seed=0, deterministic=True)
            else:
                change_layout(parallel)
            convert(models / name, out / f"{name}-{layout}", parallel, SHARD_BYTES)
    for name, saved, loaded in TRAINED:
        change_layout(parallel_config(name, loaded))
        save_from_trainer(models, out, name, saved, loaded, backend)
    stop_runtime()


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:]))
