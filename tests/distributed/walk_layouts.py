"""Run under torchrun with two ranks: the same recorded training under every layout of two ranks, one after another.

torchrun --nproc-per-node 2 -m tests.distributed.walk_layouts MODEL BATCHES OUT
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_sao.trainer.main import Run
from megatron_sao.trainer.runtime import set_layout, start_runtime, stop_runtime
from tests.distributed.gradients import lopsided_batch, mixed_batch, one_step
from tests.distributed.offline import short_config

LAYOUTS = {
    "dp2": {},
    "tp2": {"tp": 2, "sequence_parallel": True},
    "pp2": {"pp": 2},
    "ep2": {"ep": 2},
}
DP2_STEPS = {"mixed": mixed_batch, "lopsided": lopsided_batch}


def main(model: Path, batches: Path, out: Path) -> None:
    backend = None
    for name, layout in LAYOUTS.items():
        parallel = {"world_size": 2, "nproc_per_node": 2, "max_tokens_per_microbatch": 64} | layout
        config = short_config(model, parallel=parallel)
        if backend is None:
            backend = start_runtime(config.model, config.parallel, config.seed, deterministic=True)
        else:
            set_layout(config.parallel, config.seed)
        if dist.get_rank() == 0:
            (out / name).mkdir(parents=True)
        dist.barrier()
        Run(config, out / name, batches, backend).run()
        if name == "dp2":
            for step, batch in DP2_STEPS.items():
                result = one_step(model, batch(), out / f"step-{step}", backend, parallel=parallel)
                if dist.get_rank() == 0:
                    torch.save(result, out / f"dp2-{step}.pt")
    stop_runtime()


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:]))
