"""Whatever the layout, the sources together hold every HF tensor once, bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.walk_gather import LAYOUTS

HEADERS = 1024  # bytes of whatever is no tensor's content

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def gathered(glm4_moe: Path, llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One torchrun of four ranks walks through all layouts."""
    out = tmp_path_factory.mktemp("gathered")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    walk = [*torchrun, "-m", "tests.distributed.walk_gather", str(glm4_moe), str(llama), str(out)]
    done = subprocess.run(walk, capture_output=True, text=True, timeout=560, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return out


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_sources_together_hold_every_tensor_once_bit_for_bit(
    name: str, gathered: Path, request: pytest.FixtureRequest
) -> None:
    model, _, per_stage = LAYOUTS[name]
    expected = load_file(request.getfixturevalue(model) / "model.safetensors")
    parts = [load_file(gathered / f"{name}-source{rank}.safetensors") for rank in range(4)]
    assert Counter(key for part in parts for key in part) == Counter(list(expected))
    assert sum(bool(part) for part in parts) == per_stage * LAYOUTS[name][1].get("pp", 1)
    assert_equal({key: tensor for part in parts for key, tensor in part.items()}, expected)


@pytest.mark.parametrize("name", [name for name in LAYOUTS if LAYOUTS[name][0] == "glm4_moe"])
def test_a_source_holds_two_buckets_and_the_shards_of_one_weight(name: str, gathered: Path) -> None:
    for rank in range(4):
        held = json.loads((gathered / f"{name}-memory{rank}.json").read_text())
        most = 2 * held["bucket"] + held["weight"] + HEADERS
        assert held["buckets"] == 0 or held["buckets"] > 2, "two buckets must not be all"
        assert held["weight"] < held["bucket"] or not held["bucket"], "a third bucket must be seen"
        assert held["bucket"] <= held["peak"] <= most, (rank, held)


@pytest.mark.parametrize("name", LAYOUTS)
def test_rank_0_exports_policy_and_critic_bit_for_bit(
    name: str, gathered: Path, request: pytest.FixtureRequest
) -> None:
    expected = load_file(request.getfixturevalue(LAYOUTS[name][0]) / "model.safetensors")
    assert_equal(load_file(gathered / f"{name}-policy.safetensors"), expected)
    expected.pop("lm_head.weight", None)
    assert_equal(load_file(gathered / f"{name}-critic.safetensors"), expected)


def assert_equal(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name
