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
from megatron_sao.trainer.loop import Stage, run_rl
from megatron_sao.trainer.main import Run
from megatron_sao.trainer.runtime import start_runtime, stop_runtime
from tests.distributed.change_layout import change_layout
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
    "pp2_interleaved": {"world_size": 2, "pp": 2, "vpp": 2},
    "cp2": {"world_size": 2, "cp": 2},
    "cp2_distributed": {"world_size": 2, "cp": 2} | DISTRIBUTED,
    "ep2": {"world_size": 2, "ep": 2},
    "ep2_distributed": {"world_size": 2, "ep": 2} | DISTRIBUTED,
}
RESHARDED = [  # saved under, loaded under
    ("tp2", "pp2"),
    ("tp2", "dp2_distributed"),
    ("tp2_distributed", "pp2"),
    ("tp2_distributed", "pp2_distributed"),
    ("pp2_interleaved", "pp2"),
    ("pp2_distributed", "cp2"),
    ("cp2_distributed", "pp2_interleaved"),
    ("ep2", "dp2"),
    ("ep2_distributed", "dp2_distributed"),
    ("single", "ep2_distributed"),
]
TO_ONE_RANK = [
    ("dp2_distributed", "single"),
    ("cp2", "single"),
    ("ep2", "single"),
    ("ep2_distributed", "single_distributed"),
]
IN_BFLOAT16 = [("tp2_distributed", "pp2"), ("ep2", "dp2_distributed")]
# An eps of the gradients' size: both moments count, and the update does not hang on the sign of noise.
ADAM = {"lr": 1e-2, "eps": 1e-2, "weight_decay": 0.1, "decay": "linear", "clip_grad": 1e9}


def stage(
    model: Path, batches: Path, run_dir: Path, backend: Backend, layout: str, first: int, dtype: str = "float32",
    optimizer: dict = ADAM,
) -> Stage:  # fmt: skip
    """A stage of two RL steps, before step ``first``, with a checkpoint after each."""
    parallel = LAYOUTS[layout] | {"max_tokens_per_microbatch": 64}
    parallel["nproc_per_node"] = parallel.get("world_size", 1)
    config = offline_config(
        model,
        model={"path": str(model), "dtype": dtype},
        parallel=parallel,
        rl={"steps": 2, "batch_size": 6, "policy_optimizer": optimizer, "critic_optimizer": optimizer},
        checkpoint={"save_interval": 1},
    )
    return Run(config, run_dir, batches, backend)._rl_stage(first)


def train(
    model: Path, batches: Path, run_dir: Path, backend: Backend, layout: str, first: int, last: int,
    dtype: str = "float32", optimizer: dict = ADAM,
) -> Result:  # fmt: skip
    """The steps from ``first`` to before ``last``; metrics of the last of them and what the weights have come to."""
    trained = stage(model, batches, run_dir, backend, layout, first, dtype, optimizer)
    run_rl(trained, last, first)
    metrics = read_metrics(run_dir)["rl", last - 1]
    metrics.pop("stage")
    return metrics, weight_changes(trained, model)


def resume(saved: Path, run_dir: Path) -> Path:
    """A run directory with nothing but the checkpoint that ``saved`` has after its first step."""
    if dist.get_rank() == 0:
        shutil.copytree(saved / "checkpoints" / "rl-1", run_dir / "checkpoints" / "rl-1")
        (run_dir / "checkpoints" / "latest").write_text("rl-1\n")
    dist.barrier()
    return run_dir


def main(model: Path, batches: Path, out: Path) -> None:
    backend = None

    def under(layout: str) -> Backend:
        nonlocal backend
        config = offline_config(model, parallel=LAYOUTS[layout] | {"nproc_per_node": 2})
        if backend is None:
            backend = start_runtime(config.model, config.parallel, config.seed, deterministic=True)
        else:
            change_layout(config.parallel, config.seed)
        return backend

    for saved in dict.fromkeys(saved for saved, _ in RESHARDED + TO_ONE_RANK if saved != "single"):
        train(model, batches, out / saved, under(saved), saved, 0, 1)
    for saved, loaded in RESHARDED:
        run_dir = resume(out / saved, out / f"{saved}-{loaded}")
        result = train(model, batches, run_dir, under(loaded), loaded, 1, 2)
        if dist.get_rank() == 0:
            torch.save(result, out / f"{saved}-{loaded}.pt")
    for saved, loaded in IN_BFLOAT16:
        train(model, batches, out / f"bf16-{saved}", under(saved), saved, 0, 1, "bfloat16")
        run_dir = resume(out / f"bf16-{saved}", out / f"bf16-{saved}-{loaded}")
        stage(model, batches, run_dir, under(loaded), loaded, 1, "bfloat16").save("rl", 1)
    stop_runtime()


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:]))
