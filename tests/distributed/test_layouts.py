"""Two ranks compute what one rank computes, however the work is divided between them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_sao.models.backend import Backend
from megatron_sao.trainer.main import Run
from megatron_sao.weights.load import HFTensors
from tests.distributed.gradients import assert_same, one_step
from tests.distributed.offline import read_metrics, short_config, write_batches
from tests.distributed.walk_layouts import DP2_STEPS, LAYOUTS

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(480)]


@pytest.fixture(scope="module")
def runs(world: Backend, glm4_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directories: ``single`` and one per layout."""
    out = tmp_path_factory.mktemp("layouts")
    batches = write_batches(out / "batches")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    walk = [*torchrun, "-m", "tests.distributed.walk_layouts", str(glm4_moe), str(batches), str(out)]
    done = subprocess.run(walk, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (out / "single").mkdir()
    Run(short_config(glm4_moe), out / "single", batches, world).run()
    return out


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_gradient_norms_equal_those_of_a_single_rank(layout: str, runs: Path) -> None:
    expected, actual = read_metrics(runs / "single"), read_metrics(runs / layout)
    assert actual.keys() == expected.keys()
    for key in (("value", 0), ("rl", 0)):
        for name in ("train/policy_loss", "train/value_loss", "train/policy_grad_norm", "train/critic_grad_norm"):
            if name in expected[key]:
                # the RL stage starts after Adam steps, which amplify rounding
                tolerance = 1e-5 if key == ("value", 0) else 1e-3
                assert actual[key][name] == pytest.approx(expected[key][name], rel=tolerance), (key, name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_exported_weights_equal_those_of_a_single_rank(layout: str, runs: Path) -> None:
    expected, actual = HFTensors(runs / "single" / "hf"), HFTensors(runs / layout / "hf")
    assert actual.names() == expected.names()
    for name in expected.names():
        torch.testing.assert_close(actual[name], expected[name], rtol=0, atol=2e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("step", DP2_STEPS)
def test_two_data_parallel_ranks_have_the_metrics_and_gradients_of_one(
    step: str, runs: Path, world: Backend, glm4_moe: Path, tmp_path: Path
) -> None:
    expected = one_step(glm4_moe, DP2_STEPS[step](), tmp_path, world)
    assert all(gradient.any() for name, gradient in expected[1].items() if "local_experts" not in name)
    assert_same(torch.load(runs / f"dp2-{step}.pt"), expected)
