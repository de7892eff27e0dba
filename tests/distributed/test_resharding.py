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
from tests.distributed.offline import assert_same_checkpoint, saved_tensors
from tests.distributed.walk_resharding import IN_BFLOAT16, RESHARDED, TO_ONE_RANK, resume, train
from tests.tiny_models import VOCAB_SIZE, write_glm4_moe

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As many dense layers as MoE layers, so that the first of two pipeline stages has no experts."""
    return write_glm4_moe(tmp_path_factory.mktemp("model"), first_k_dense_replace=2)


@pytest.fixture(scope="module")
def walked(world: Backend, model: Path, batches: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """What the walk on two ranks, begun from the checkpoint of a single rank, has left, and that rank's next step."""
    out = tmp_path_factory.mktemp("walked")
    expected = train(model, batches, out / "single", world, "single", 0, 2)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    walk = [*torchrun, "-m", "tests.distributed.walk_resharding", str(model), str(batches), str(out)]
    done = subprocess.run(walk, capture_output=True, text=True, timeout=560, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return out, expected


def test_the_step_after_a_change_of_layout_is_that_of_an_uninterrupted_single_rank(
    world: Backend, model: Path, batches: Path, walked: tuple[Path, Result]
) -> None:
    out, expected = walked
    results: dict[str, Result] = {}
    for saved, loaded in RESHARDED:
        results[f"{saved} to {loaded}"] = torch.load(out / f"{saved}-{loaded}.pt", weights_only=True)
    for saved, loaded in TO_ONE_RANK:
        run_dir = resume(out / saved, out / f"{saved}-{loaded}")
        results[f"{saved} to {loaded}"] = train(model, batches, run_dir, world, loaded, 1, 2)
    wrong, last_bits = {}, rounding(model)
    for name, result in results.items():
        try:
            assert_same(result, expected, tolerance=1e-5, rounding=last_bits)
        except AssertionError as difference:
            wrong[name] = str(difference)
    assert not wrong


@pytest.mark.parametrize(("saved", "loaded"), IN_BFLOAT16)
def test_in_bfloat16_another_layout_saves_what_it_has_loaded_main_weights_and_moments_included(
    saved: str, loaded: str, walked: tuple[Path, Result]
) -> None:
    """Layouts round a bfloat16 step differently, so that what is compared is the checkpoint, saved again."""
    first, second = (walked[0] / name / "checkpoints" / "rl-1" for name in (f"bf16-{saved}", f"bf16-{saved}-{loaded}"))
    assert_same_checkpoint(second, first, VOCAB_SIZE)
    tensors = saved_tensors(first)
    assert {str(tensor.dtype) for tensor in tensors.values()} == {"torch.bfloat16", "torch.float32"}
    assert any("fp32_param" in name for name in tensors)


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
