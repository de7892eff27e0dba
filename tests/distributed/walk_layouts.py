"""Run under torchrun: one SAO step on the same batch under every layout of that many ranks, one after another.

torchrun --nproc-per-node N -m tests.distributed.walk_layouts MODEL OUT
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_sao.trainer.runtime import set_layout, start_runtime, stop_runtime
from tests.distributed.gradients import lopsided_batch, mixed_batch, one_step
from tests.distributed.offline import short_config

SP = {"sequence_parallel": True}  # MoE with tensor parallelism needs it
LAYOUTS = {
    "dp2": {"world_size": 2},
    "tp2": {"world_size": 2, "tp": 2} | SP,
    "pp2": {"world_size": 2, "pp": 2},
    "pp2_interleaved": {"world_size": 2, "pp": 2, "vpp": 2},
    "ep2": {"world_size": 2, "ep": 2},
    "tp2_pp2": {"world_size": 4, "tp": 2, "pp": 2} | SP,
    "tp2_ep2": {"world_size": 4, "tp": 2, "ep": 2} | SP,
    "pp2_ep2": {"world_size": 4, "pp": 2, "ep": 2},
    "dp2_ep2": {"world_size": 4, "ep": 2},
    "tp2_pp2_ep2": {"world_size": 8, "tp": 2, "pp": 2, "ep": 2} | SP,
}
BATCHES = {"mixed": mixed_batch, "lopsided": lopsided_batch}
RECOMPUTED = ("tp2", "pp2", "tp2_pp2")


def steps(world_size: int) -> dict[str, tuple[str, str, str]]:
    """Name of every step of a world: its layout, batch and recomputation."""
    out = {}
    for layout, sizes in LAYOUTS.items():
        if sizes["world_size"] != world_size:
            continue
        out[f"{layout}-mixed"] = (layout, "mixed", "none")
        out[f"{layout}-lopsided"] = (layout, "lopsided", "none")
        if layout in RECOMPUTED:
            out[f"{layout}-recompute"] = (layout, "mixed", "full")
    return out


def main(model: Path, out: Path) -> None:
    backend = None
    for name, (layout, batch, recompute) in steps(int(os.environ["WORLD_SIZE"])).items():
        sizes = LAYOUTS[layout]
        parallel = sizes | {"nproc_per_node": sizes["world_size"], "max_tokens_per_microbatch": 64}
        sections = {"parallel": parallel, "model": {"path": str(model), "recompute": recompute}}
        config = short_config(model, **sections)
        if backend is None:
            backend = start_runtime(config.model, config.parallel, config.seed, deterministic=True)
        else:
            set_layout(config.parallel, config.seed)
        result = one_step(model, BATCHES[batch](), out / name, backend, **sections)
        if dist.get_rank() == 0:
            torch.save(result, out / f"{name}.pt")
    stop_runtime()


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:]))
