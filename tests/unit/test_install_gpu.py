"""The GPU installation over stand-ins for Python, nvcc and nvidia-smi, and doctor's look at the driver."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from megatron_sao import doctor

ROOT = Path(__file__).parents[2]


def command(folder: Path, name: str, body: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def install(tmp_path: Path, driver: str, *options: str) -> tuple[int, str, list[str]]:
    """(exit code, errors, calls of Python)"""
    calls = tmp_path / "calls"
    calls.touch()
    python = command(tmp_path, "python", f'echo "$*" | head -n1 >> {calls}')
    command(tmp_path, "nvidia-smi", f"echo {driver}")
    command(tmp_path, "nvcc", "true")
    env = os.environ | {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "PYTHON": str(python),
        "TMPDIR": str(tmp_path),
    }
    script = [ROOT / "tools" / "install_gpu.sh", *options]
    done = subprocess.run(script, env=env, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr, calls.read_text().splitlines()


def test_torch_comes_before_transformer_engine_which_is_compiled_against_it(tmp_path):
    code, errors, calls = install(tmp_path, "580.65.06")
    assert code == 0, errors
    installs = [call for call in calls if "pip install" in call]
    assert "megatron-sao-wheels.txt" in installs[0]
    wheels = (tmp_path / "megatron-sao-wheels.txt").read_text()
    assert "\ntorch==" in wheels and "\ntransformer-engine" not in wheels
    assert "--no-build-isolation transformer-engine-torch==" in installs[2]
    assert not any("apex" in call for call in calls), "only on request"
    assert all("--no-deps" in call for call in installs), "the pins are complete"
    assert calls[calls.index(installs[0]) + 1].startswith("-c import torch"), "a check after each step"


def test_apex_never_comes_from_the_index(tmp_path):
    _, _, calls = install(tmp_path, "580.65.06", "--with-apex")
    calls = [call.replace(str(tmp_path), "") for call in calls]
    (apex,) = [call for call in calls if "pip install" in call and "apex" in call]
    assert "apex @ git+" in apex


def test_an_old_driver_is_refused_before_anything_is_installed(tmp_path):
    code, errors, calls = install(tmp_path, "570.133.20")
    assert code == 1
    assert "driver 570.133.20; CUDA 13 needs 580 or newer" in errors
    assert not any("pip install" in call for call in calls)


@pytest.mark.parametrize(("driver", "state"), [("580.65.06", "ok"), ("570.133.20", "FAIL")])
def test_doctor_judges_the_driver(tmp_path, monkeypatch, driver, state):
    command(tmp_path, "nvidia-smi", f"echo {driver}")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert doctor.check_driver()[0] == state
