"""The second recipe, on a real pretrained model: HF to Megatron to SGLang, two steps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.runs import evaluations, steps_done

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]


def test_two_sao_steps_on_smollm2_serve_what_they_train(tmp_path: Path) -> None:
    model = ROOT / "runs" / "models" / "smollm2_135m"  # where `make demo-smollm2` keeps it, since it is 0.5 GB
    subprocess.run([sys.executable, ROOT / "tools" / "fetch_smollm2.py", "--out", model], check=True, timeout=300)
    settings = {
        "model.path": model,
        "data.train": model / "train.jsonl",
        "data.eval": model / "eval.jsonl",
        "value.steps": 0,
        "rl.steps": 2,
        "rl.batch_size": 2,
        "eval.prompts": 8,
        "eval.mismatch_min_tokens": 60,
    }
    command = [sys.executable, "-m", "megatron_sao.cli", "run", "model_configs/smollm2_135m.yaml"]
    command += ["--run-dir", str(tmp_path / "run")]
    for name, value in settings.items():
        command += ["--set", f"{name}={value}"]
    env = os.environ | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert steps_done(tmp_path / "run") == [0, 1]
    for evaluation in evaluations(tmp_path / "run").values():
        assert evaluation["mismatch/mean_abs_logprob_diff"] < 1e-4
