"""Many ranks compute what one rank computes, however the work is divided between them."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from megatron_sao.models.backend import Backend
from tests.distributed.gradients import Result, assert_same, rounding, worst
from tests.distributed.layout_table import LAYOUT_TABLE
from tests.distributed.walk_layouts import KINDS, steps

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(3700)]

LIMITS = {"quick": 1100, "rest": 3600}  # seconds
WALKS = [(ranks, "quick") for ranks in (2, 4, 8)]
WALKS += [pytest.param(ranks, "rest", marks=pytest.mark.slow) for ranks in (2, 4, 8)]


@pytest.fixture(scope="module")
def single(world: Backend, glm4_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    out = tmp_path_factory.mktemp("single")
    return {name: kind.take(glm4_moe, out / name, world) for name, kind in KINDS.items()}


@pytest.mark.parametrize(("world_size", "part"), WALKS)
def test_metrics_and_gradient_and_change_of_every_parameter_equal_those_of_a_single_rank(
    world_size: int,
    part: str,
    single: dict[str, Result],
    glm4_moe: Path,
    tmp_path: Path,
    pytestconfig: pytest.Config,
) -> None:
    """One torchrun per world size walks through all its layouts."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    walk = [*torchrun, "-m", "tests.distributed.walk_layouts", str(glm4_moe), str(tmp_path), part]
    done = subprocess.run(walk, capture_output=True, text=True, timeout=LIMITS[part], check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    wrong, last_bits = {}, rounding(glm4_moe)
    table = pytestconfig.stash.setdefault(LAYOUT_TABLE, {})
    for layout, kind in steps(world_size, part):
        result = torch.load(tmp_path / f"{layout}-{kind}.pt", weights_only=True)
        table[world_size, layout, kind] = worst(result, single[kind], last_bits)
        try:
            assert_same(result, single[kind], tolerance=1e-5, rounding=last_bits)
        except AssertionError as difference:
            wrong[layout, kind] = str(difference)
    assert not wrong


def test_a_change_of_layout_leaves_no_threads_of_the_old_one() -> None:
    changes = """
        import os
        from megatron_sao.config import ModelConfig, ParallelConfig
        from megatron_sao.trainer.runtime import set_layout, start_runtime, stop_runtime

        start_runtime(ModelConfig(path="unused"), ParallelConfig(), seed=0, deterministic=True)
        for _ in range(3):
            print(len(os.listdir("/proc/self/task")))
            set_layout(ParallelConfig(), seed=0)
        stop_runtime()
    """
    command = [sys.executable, "-c", textwrap.dedent(changes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    first, *later = map(int, done.stdout.split())
    assert later == [first, first]
