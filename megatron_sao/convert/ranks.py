"""A tool's processes: one command starts as many ranks as it needs, unless something else has started it as a rank."""

from __future__ import annotations

import argparse
import logging
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from pydantic import ValidationError

from megatron_sao.config import ConfigError, ModelConfig, ParallelConfig
from megatron_sao.distributed import all_gather_json
from megatron_sao.launch.process import EXIT_CONFIG, die_with_parent
from megatron_sao.models.backend import Backend
from megatron_sao.trainer.runtime import start_runtime, stop_runtime
from megatron_sao.weights.hf_files import WeightError

_REFUSED = "MEGATRON_SAO_TOOL_REFUSED"  # names the file that a rank fills when it ends with EXIT_CONFIG


def add_layout(parser: argparse.ArgumentParser) -> None:
    """The options that :func:`layout_of` reads."""
    for size, meaning in (("tp", "tensor"), ("pp", "pipeline"), ("ep", "expert"), ("etp", "expert-tensor")):
        parser.add_argument(f"--{size}", type=int, default=1, help=f"{meaning}-parallel size (default 1)")
    for stage in ("first", "last"):
        parser.add_argument(f"--pp-{stage}-layers", type=int, help=f"layers of the {stage} pipeline stage, if uneven")


def layout_of(options: argparse.Namespace) -> ParallelConfig:
    """The layout on as few ranks as it takes. Raises ConfigError where it is none."""
    world = options.pp * math.lcm(options.tp, options.ep * options.etp)
    fields = {name: getattr(options, name) for name in ("tp", "pp", "ep", "etp", "pp_first_layers", "pp_last_layers")}
    try:
        return ParallelConfig(**fields, world_size=world, nproc_per_node=world, sequence_parallel=options.tp > 1)
    except ValidationError as error:
        raise ConfigError("; ".join(problem["msg"] for problem in error.errors())) from error


def byte_size(text: str) -> int:
    """``5GB``, ``300MB`` or a plain number → bytes, as an argparse type."""
    number, factor = text, 1
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if text.upper().endswith(unit):
            number, factor = text[:-2], size
    if not number.isdigit() or int(number) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write e.g. 5GB or 300MB")
    return int(number) * factor


def run_tool(
    parallel: Callable[[], ParallelConfig], model: Path, work: Callable[[ParallelConfig, Backend], int]
) -> int:
    """``work`` on every rank of a layout; returns the exit code.

    A process that torchrun or srun has started (RANK is set) is one of them. Any other becomes the only one, or starts
    this same command under torchrun. A :class:`ConfigError` becomes its sentence and exit code 2.
    """
    logging.getLogger("megatron").setLevel(logging.ERROR)
    try:
        layout = parallel()
        if "RANK" not in os.environ and layout.world_size > 1:
            launcher = os.getpid()
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command = [*torchrun, f"--nproc-per-node={layout.world_size}", *sys.argv]
            with tempfile.NamedTemporaryFile("r") as refused:  # torchrun itself ends with 1, whatever a rank said
                env = os.environ | {_REFUSED: refused.name}
                code = subprocess.call(command, env=env, preexec_fn=lambda: die_with_parent(launcher))
                return EXIT_CONFIG if refused.read() else code
        if "TORCHELASTIC_RUN_ID" in os.environ:
            die_with_parent()
        backend = start_runtime(ModelConfig(path=model), layout, seed=0, deterministic=True)
        code = work(layout, backend)
        stop_runtime()
        return code
    except ConfigError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr, flush=True)
        if _REFUSED in os.environ:
            Path(os.environ[_REFUSED]).write_text("refused")
        return EXIT_CONFIG


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


def on_rank_0(action: Callable[[], None]) -> None:
    """``action`` on rank 0, while the others wait. Its :class:`ConfigError` ends all of them. Collective."""
    problem = ""
    if dist.get_rank() == 0:
        try:
            action()
        except ConfigError as error:
            problem = str(error)
    stop_on(problem)
