"""A tool's processes: one command starts as many ranks as it needs, unless something else has started it as a rank."""

from __future__ import annotations

import argparse
import logging
import math
import os
import subprocess
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_sao.config import ConfigError, ParallelConfig
from megatron_sao.distributed import all_gather_json
from megatron_sao.launch.process import die_with_parent
from megatron_sao.weights.hf_files import WeightError


def smallest_world(tp: int, pp: int, ep: int, etp: int) -> ParallelConfig:
    """The layout on as few ranks as it takes."""
    world = pp * math.lcm(tp, ep * etp)
    return ParallelConfig(
        tp=tp, pp=pp, ep=ep, etp=etp, world_size=world, nproc_per_node=world, sequence_parallel=tp > 1
    )


def byte_size(text: str) -> int:
    """``5GB``, ``300MB`` or a plain number → bytes, as an argparse type."""
    number, factor = text, 1
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if text.upper().endswith(unit):
            number, factor = text[:-2], size
    if not number.isdigit() or int(number) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write e.g. 5GB or 300MB")
    return int(number) * factor


def run_ranks(count: int, work: Callable[[], int]) -> int:
    """``work`` on ``count`` ranks; returns the exit code.

    A process that torchrun or srun has started (RANK is set) is one of them. Any other becomes the only one, or starts
    this same command under torchrun. A :class:`ConfigError` becomes its sentence and exit code 1.
    """
    if "RANK" not in os.environ and count > 1:
        launcher = os.getpid()
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        return subprocess.call([*torchrun, *sys.argv], preexec_fn=lambda: die_with_parent(launcher))
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()
    logging.getLogger("megatron").setLevel(logging.ERROR)
    try:
        return work()
    except ConfigError as error:
        print(f"{os.path.basename(sys.argv[0])}: {error}", file=sys.stderr, flush=True)
        return 1


def stop_on(problem: str) -> None:
    """End all ranks, if any of them has a problem, with the lowest such rank's sentence. Collective.

    Raises:
        WeightError: on rank 0; the others exit without a word.
    """
    problems = [p for p in all_gather_json(problem, torch.device("cpu")) if p]
    if problems and dist.get_rank() == 0:
        raise WeightError(problems[0])
    if problems:
        raise SystemExit(1)
