"""Run under torchrun with two ranks: a step and a checkpoint under some layouts, and a step from it under others.

torchrun --nproc-per-node 2 -m tests.distributed.walk_resharding MODEL BATCHES OUT
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_sao.models.backend import Backend
from megatron_sao.trainer.loop import run_rl
from megatron_sao.trainer.main import Run
from megatron_sao.trainer.runtime import set_layout, start_runtime, stop_runtime
from tests.distributed.gradients import Result, weight_changes
from tests.distributed.offline import offline_config, read_metrics

DISTRIBUTED = {"distributed_optimizer": True}
LAYOUTS = {
    "single": {},
    "single_distributed": DISTRIBUTED,
    "dp2": {"world_size": 2},
    "dp2_distributed": {"world_size": 2} | DISTRIBUTED,
    "tp2": {"world_size": 2, "tp": 2, "sequence_parallel": True},
    "tp2_distributed": {"world_size": 2, "tp": 2, "sequence_parallel": True} | DISTRIBUTED,
    "pp2": {"world_size": 2, "pp": 2},
    "pp2_distributed": {"world_size": 2, "pp": 2} | DISTRIBUTED,
    "ep2": {"world_size": 2, "ep": 2},
    "ep2_distributed": {"world_size": 2, "ep": 2} | DISTRIBUTED,
}
RESHARDED = [  # saved under, loaded under
    ("tp2", "pp2"),
    ("tp2", "dp2_distributed"),
    ("tp2_distributed", "pp2"),
    ("tp2_distributed", "pp2_distributed"),
    ("ep2", "dp2"),
    ("ep2_distributed", "dp2_distributed"),
    ("single", "ep2_distributed"),
]
TO_ONE_RANK = [("dp2_distributed", "single"), ("ep2", "single"), ("ep2_distributed", "single_distributed")]
# An eps of the gradients' size: both moments count, and the update does not hang on the sign of noise.
ADAM = {"lr": 1e-2, "eps": 1e-2, "weight_decay": 0.1, "decay": "linear", "clip_grad": 1e9}


def train(
    model: Path, batches: Path, run_dir: Path, backend: Backend, layout: str, first: int, last: int,
    dtype: str = "float32", optimizer: dict = ADAM,
) -> Result:  # fmt: skip
    """The RL steps from ``first`` to before ``last``, of two, with a checkpoint after each; metrics of the last of them
    and what the weights have come to."""
    parallel = LAYOUTS[layout] | {"max_tokens_per_microbatch": 64}
    parallel["nproc_per_node"] = parallel.get("world_size", 1)
    config = offline_config(
        model,
        model={"path": str(model), "dtype": dtype},
        parallel=parallel,
        rl={"steps": 2, "batch_size": 6, "policy_optimizer": optimizer, "critic_optimizer": optimizer},
        checkpoint={"save_interval": 1},
    )
    stage = Run(config, run_dir, batches, backend)._rl_stage(first)
    run_rl(stage, last, first)
    metrics = read_metrics(run_dir)["rl", last - 1]
    metrics.pop("stage")
    return metrics, weight_changes(stage, model)


def resume(saved: Path, run_dir: Path) -> Path:
    """A run directory with nothing but the checkpoint that ``saved`` has after its first step."""
    if dist.get_rank() == 0:
        shutil.copytree(saved / "checkpoints" / "rl-1", run_dir / "checkpoints" / "rl-1")
        (run_dir / "checkpoints" / "latest").write_text("rl-1\n")
    dist.barrier()
    return run_dir


def main(model: Path, batches: Path, out: Path) -> None:
    backend = None
    steps = [(saved, None) for saved in dict.fromkeys(s for s, _ in RESHARDED + TO_ONE_RANK if s != "single")]
    for saved, loaded in steps + RESHARDED:
        layout = saved if loaded is None else loaded
        config = offline_config(model, parallel=LAYOUTS[layout] | {"nproc_per_node": 2})
        if backend is None:
            backend = start_runtime(config.model, config.parallel, config.seed, deterministic=True)
        else:
            set_layout(config.parallel, config.seed)
        if loaded is None:
            train(model, batches, out / saved, backend, layout, 0, 1)
            continue
        result = train(model, batches, resume(out / saved, out / f"{saved}-{loaded}"), backend, layout, 1, 2)
        if dist.get_rank() == 0:
            torch.save(result, out / f"{saved}-{loaded}.pt")
    stop_runtime()


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:]))
