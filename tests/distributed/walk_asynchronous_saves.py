"""Run under torchrun with two ranks: a run whose second rank dies in a save, or its resumption and one without a break.

torchrun --nproc-per-node 2 -m tests.distributed.walk_asynchronous_saves MODEL BATCHES OUT die|go_on
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch.distributed as dist

from megatron_sao.trainer import checkpoint, checkpoint_files
from megatron_sao.trainer.main import Run
from megatron_sao.trainer.runtime import start_runtime, stop_runtime
from tests.distributed.offline import offline_config


def die_in_the_save_of(name: str) -> None:
    """Have this rank killed when it has written its files of the checkpoint, before it can say so."""
    write = checkpoint._Writing._write

    def deadly(writing: checkpoint._Writing) -> None:
        if str(writing.position) == name:
            checkpoint_files.checksum = lambda _path: os.kill(os.getpid(), signal.SIGKILL)
        write(writing)

    checkpoint._Writing._write = deadly


def main(model: Path, batches: Path, out: Path, what: str) -> None:
    parallel = {"world_size": 2, "nproc_per_node": 2, "pp": 2, "distributed_optimizer": True}
    config, synchronous = (
        offline_config(model, parallel=parallel, checkpoint={"save_interval": 2, "asynchronous": asynchronous})
        for asynchronous in (True, False)
    )
    backend = start_runtime(config.model, config.parallel, config.seed, deterministic=True)
    if what == "die" and dist.get_rank() == 1:
        die_in_the_save_of("rl-2")
    Run(config, out / "killed", batches, backend).run()
    Run(synchronous, out / "whole", batches, backend).run()
    stop_runtime()


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:4]), sys.argv[4])
