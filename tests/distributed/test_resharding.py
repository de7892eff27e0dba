"""A checkpoint goes on under another layout as it would have under its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_sao.models.backend import Backend
from megatron_sao.trainer.checkpoint import CheckpointError
from tests.distributed.gradients import Result, assert_same, rounding
from tests.distributed.offline import write_batches
from tests.distributed.walk_resharding import RESHARDED, TO_ONE_RANK, resume, train
from tests.tiny_models import write_glm4_moe

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One dense and one MoE layer, so that the first of two pipeline stages has no experts."""
    return write_glm4_moe(tmp_path_factory.mktemp("model"), layers=2)


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_batches(tmp_path_factory.mktemp("batches"))


def test_the_step_after_a_change_of_layout_is_that_of_an_uninterrupted_single_rank(
    world: Backend, model: Path, batches: Path, tmp_path: Path
) -> None:
    expected = train(model, batches, tmp_path / "single", world, "single", 0, 2)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    walk = [*torchrun, "-m", "tests.distributed.walk_resharding", str(model), str(batches), str(tmp_path)]
    done = subprocess.run(walk, capture_output=True, text=True, timeout=560, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    results: dict[str, Result] = {}
    for saved, loaded in RESHARDED:
        results[f"{saved} to {loaded}"] = torch.load(tmp_path / f"{saved}-{loaded}.pt", weights_only=True)
    for saved, loaded in TO_ONE_RANK:
        run_dir = resume(tmp_path / saved, tmp_path / f"{saved}-{loaded}")
        results[f"{saved} to {loaded}"] = train(model, batches, run_dir, world, loaded, 1, 2)
    wrong, last_bits = {}, rounding(model)
    for name, result in results.items():
        try:
            assert_same(result, expected, tolerance=1e-5, rounding=last_bits)
        except AssertionError as difference:
            wrong[name] = str(difference)
    assert not wrong


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("saved", "loaded"), [("single", "single_distributed"), ("single_distributed", "single")])
def test_one_rank_goes_on_alike_when_the_distributed_optimizer_is_turned_on_or_off(
    saved: str, loaded: str, dtype: str, world: Backend, model: Path, batches: Path, tmp_path: Path
) -> None:
    expected = train(model, batches, tmp_path / "whole", world, saved, 0, 2, dtype)
    run_dir = resume(tmp_path / "whole", tmp_path / "resumed")
    result = train(model, batches, run_dir, world, loaded, 1, 2, dtype)
    assert_same(result, expected, tolerance=1e-6)  # the two add up the gradient's norm in another order


def test_sgd_goes_on_bit_for_bit_and_is_not_taken_for_adam(
    world: Backend, model: Path, batches: Path, tmp_path: Path
) -> None:
    sgd = {"name": "sgd", "lr": 1e-2}
    expected = train(model, batches, tmp_path / "whole", world, "single", 0, 2, optimizer=sgd)
    run_dir = resume(tmp_path / "whole", tmp_path / "resumed")
    assert_same(train(model, batches, run_dir, world, "single", 1, 2, optimizer=sgd), expected, tolerance=0)
    with pytest.raises(CheckpointError, match=r"cannot load .*rl-1 .*the optimizer's name"):
        train(model, batches, resume(tmp_path / "whole", tmp_path / "adam"), world, "single", 1, 2)
