"""A real pretrained model through the conversion: the same logits, and the same greedy texts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_sao.config import ParallelConfig
from megatron_sao.convert import hf_to_megatron, megatron_to_hf
from megatron_sao.convert.parity import compare
from megatron_sao.models.backend import Backend
from tests.conversion import assert_same_tensors, tensors_of

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
PROMPTS = [
    "The capital of France is", "Water boils at", "Once upon a time", "def add(a, b):", "The opposite of hot is",
    "Monday, Tuesday,", "A triangle has", "My name is", "The sun rises in the", "2 + 2 =", "Roses are red,",
    "In the beginning", "She opened the door and", "The largest planet is", "To be or not", "Photosynthesis is",
    "Dear Sir,", "He said that", "1, 2, 3,", "The end of the",
]  # fmt: skip


def test_smollm2_writes_the_same_texts_after_conversion_and_comes_back_bit_for_bit(
    world: Backend, tmp_path: Path
) -> None:
    model = ROOT / "runs" / "models" / "smollm2_135m"  # where `make demo-smollm2` keeps it, since it is 0.5 GB
    subprocess.run([sys.executable, ROOT / "tools" / "fetch_smollm2.py", "--out", model], check=True, timeout=300)
    hf_to_megatron.convert(model, tmp_path / "megatron", ParallelConfig(), 10**8)
    parity = compare(model, tmp_path / "megatron", ParallelConfig(), world.device, (1, 1), (PROMPTS, 8))
    assert parity.texts == parity.equal_texts == 20
    assert parity.top1_agreement == 1
    assert parity.relative_difference <= 1e-4
    megatron_to_hf.convert(tmp_path / "megatron", tmp_path / "back", None, "source", 10**8)
    assert_same_tensors(tensors_of(tmp_path / "back"), tensors_of(model))
    names = {path.name for path in model.iterdir() if path.name != "model.safetensors"}
    assert names <= {path.name for path in (tmp_path / "back").iterdir()}
