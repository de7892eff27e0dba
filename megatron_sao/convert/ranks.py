"""A tool's processes: one command starts as many ranks as it needs, unless something else has started it as a rank."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_sao.config import ConfigError, ModelConfig, ParallelConfig
from megatron_sao.distributed import all_gather_json
from megatron_sao.launch.process import EXIT_CONFIG, die_with_parent
from megatron_sao.models.backend import Backend
from megatron_sao.trainer.runtime import start_runtime, stop_runtime
from megatron_sao.weights.hf_files import WeightError

_REFUSED = "MEGATRON_SAO_TOOL_REFUSED"  # names the file that a rank fills when it ends with EXIT_CONFIG


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
