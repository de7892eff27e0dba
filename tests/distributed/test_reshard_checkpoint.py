"""A converted checkpoint rewritten for another layout is the same model, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_sao.config import ParallelConfig
from megatron_sao.convert import hf_to_megatron, megatron_to_hf
from megatron_sao.models.backend import Backend

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

SHARD_BYTES = 10**9


def test_a_checkpoint_resharded_for_two_ranks_is_the_same_model(world: Backend, glm4_moe: Path, tmp_path: Path) -> None:
    before, after, back = tmp_path / "before", tmp_path / "after", tmp_path / "back"
    hf_to_megatron.convert(glm4_moe, before, ParallelConfig(), SHARD_BYTES)
    command = [sys.executable, "tools/reshard_weights.py", "reshard", "--megatron", before, "--out", after, "--ep", "2"]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(path.name for path in after.glob("__*_0.distcp")) == ["__0_0.distcp", "__1_0.distcp"]
    assert not list(tmp_path.glob("*.hf"))
    megatron_to_hf.convert(after, back, None, "source", SHARD_BYTES)
    expected, found = (load_file(directory / "model.safetensors") for directory in (glm4_moe, back))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
