"""tools/reshard_weights.py without engines: the plan it prints, and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.tiny_models import write_glm4_moe
from tools.reshard_weights import main

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_glm4_moe(tmp_path_factory.mktemp("model") / "glm4_moe")


def test_plan_counts_the_bytes_of_the_model_and_names_sources_and_bounds(model: Path, capsys) -> None:
    sizes = ["--world-size", "8", "--tp", "2", "--pp", "2", "--ep", "2", "--engines", "3", "--engine-tp", "2"]
    assert main(["plan", "--hf", str(model), *sizes, "--bucket-bytes", "20KB", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    tensors = load_file(model / "model.safetensors")
    nbytes = sum(t.numel() * (4 if name.endswith("correction_bias") else 2) for name, t in tensors.items())
    assert report["weights_gb"] == pytest.approx(nbytes / 1e9)
    assert report["sources"] == [0, 4]
    assert report["broadcast"]["received_gb_per_engine_rank"] == pytest.approx(nbytes / 1e9)
    assert 0.5 < report["p2p"]["received_gb_per_engine_rank"] / report["weights_gb"] < 0.6  # norms and router whole
    assert report["p2p"]["lower_bound_seconds"] < report["broadcast"]["lower_bound_seconds"]


def test_plan_prints_a_page_by_default(model: Path, capsys) -> None:
    assert main(["plan", "--hf", str(model), "--world-size", "2", "--ep", "2"]) == 0
    printed = capsys.readouterr().out
    assert "1 of 2 ranks send: [0]" in printed and "broadcast, as stock SGLang receives: at least" in printed


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["plan", "--world-size", "2", "--sources-per-stage", "3"],
            "sources_per_stage = 3 does not divide the 2 ranks",
        ),
        (["verify", "--engine", "http://127.0.0.1:9"], "MEGATRON_SAO_TOKEN is not set"),
        (["push", "--engine", "http://127.0.0.1:9", "--version", "1.1", "--tp", "0"], "greater than 0"),
    ],
)
def test_what_cannot_be_done_is_one_sentence_and_exit_code_2(
    arguments: list[str], sentence: str, model: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MEGATRON_SAO_TOKEN", raising=False)
    monkeypatch.setattr(sys, "argv", ["reshard_weights.py"])
    command, *rest = arguments
    assert main([command, "--hf", str(model), *rest]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("command", ["plan", "push", "verify", "reshard"])
def test_help_shows_an_example(command: str, capsys) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    assert f"python tools/reshard_weights.py {command} --" in capsys.readouterr().out
