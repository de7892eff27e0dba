"""Many ranks compute what one rank computes, however the work is divided between them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_sao.models.backend import Backend
from tests.distributed.gradients import Result, assert_same, rounding, step_and_change, worst
from tests.distributed.layout_table import LAYOUT_TABLE
from tests.distributed.walk_layouts import KINDS, steps

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1200)]

WORLD_SIZES = [2, 4, pytest.param(8, marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def single(world: Backend, glm4_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    out = tmp_path_factory.mktemp("single")
    return {
        kind: step_and_change(glm4_moe, batch(), out / kind, world, optimizer, **sections)
        for kind, (batch, optimizer, sections) in KINDS.items()
    }


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_metrics_and_gradient_and_change_of_every_parameter_equal_those_of_a_single_rank(
    world_size: int, single: dict[str, Result], glm4_moe: Path, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """One torchrun per world size walks through all its layouts."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    walk = [*torchrun, "-m", "tests.distributed.walk_layouts", str(glm4_moe), str(tmp_path)]
    done = subprocess.run(walk, capture_output=True, text=True, timeout=1100, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    wrong, last_bits = {}, rounding(glm4_moe)
    rows = pytestconfig.stash.setdefault(LAYOUT_TABLE, [])
    for layout, kind in steps(world_size):
        try:
            result = torch.load(tmp_path / f"{layout}-{kind}.pt", weights_only=True)
            rows.append((world_size, layout, kind, *worst(result, single[kind])))
            assert_same(result, single[kind], tolerance=1e-5, rounding=last_bits)
        except AssertionError as difference:
            wrong[layout, kind] = str(difference)
    assert not wrong
