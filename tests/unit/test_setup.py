"""The set-up: what is pinned, and what it says when it cannot go on."""

import importlib.util
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FULL = ROOT / "requirements.txt"
CPU = ROOT / "tools" / "setup" / "requirements-cpu.txt"


def pins(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("==", 1) for line in lines)


def test_the_cpu_set_is_a_part_of_the_full_set_with_the_same_pins():
    full, cpu = pins(FULL), pins(CPU)
    assert len(full) > len(cpu) > 100
    assert {name: full.get(name) for name in cpu} == cpu


def test_the_cpu_set_holds_nothing_that_is_listed_as_cuda_only():
    listed = (ROOT / "tools" / "setup" / "cuda-only.txt").read_text().splitlines()
    names = {line.split(" ;")[0] for line in listed}
    assert names and not names & set(pins(CPU))
    assert names <= set(pins(FULL))


@pytest.mark.parametrize("path", [FULL, CPU], ids=lambda path: path.name)
def test_the_package_apex_is_never_installed(path):
    assert "apex" not in pins(path)
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", name) for name in pins(path))


@pytest.mark.parametrize("path", [FULL, CPU, ROOT / "requirements.in"], ids=lambda path: path.name)
def test_no_file_names_a_download_host(path):
    assert not re.search(r"https?://|index-url|find-links", path.read_text())


def test_another_checkouts_environment_is_never_changed_and_help_changes_nothing(clone, tmp_path):
    environment = tmp_path / "other"
    environment.mkdir()
    (clone / ".venv").symlink_to(environment)
    install = [sys.executable, str(clone / "tools" / "setup" / "install.py")]
    done = subprocess.run([*install, "--help"], capture_output=True, text=True, check=True)
    assert "SETUP_MIN_DISK_GB" in done.stdout
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "is a link to" in done.stderr
    assert list(environment.iterdir()) == []


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What set-up needs of a checkout, without an environment."""
    shutil.copytree(ROOT / "tools", tmp_path / "clone" / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("requirements.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / "clone")
    (tmp_path / "bin").mkdir()
    return tmp_path / "clone"


def executable(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def set_up(clone: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run tools/setup.sh where only tmp_path/bin is on PATH and the home directory is tmp_path."""
    base = {"PATH": str(clone.parent / "bin"), "HOME": str(clone.parent), "PIP_CONFIG_FILE": os.devnull}
    command = ["/bin/sh", "tools/setup.sh"]
    return subprocess.run(command, cwd=clone, env=base | env, capture_output=True, text=True, timeout=200, check=False)


def assert_one_sentence(done: subprocess.CompletedProcess[str], words: str) -> None:
    assert done.returncode == 2, done
    assert done.stderr.startswith("set-up: ") and done.stderr.count("\n") == 1, done.stderr
    assert words in done.stderr


def test_without_a_usable_python_it_says_so(clone):
    executable(clone.parent / "bin" / "python3.12", "echo 'pyenv: python3.12: command not found'; exit 127")
    executable(clone.parent / "bin" / "python3", "exit 1")
    assert_one_sentence(set_up(clone), "found no Python 3.12 or 3.13")
    assert not (clone / ".venv").exists()


def test_a_python_under_pyenv_is_found_behind_a_broken_shim(clone):
    executable(clone.parent / "bin" / "python3.12", "exit 127")
    executable(clone.parent / ".pyenv/versions/3.12.9/bin/python3", f'exec "{sys.executable}" "$@"')
    assert_one_sentence(set_up(clone, SETUP_MIN_DISK_GB="1e9"), "GB of free disk and the environment needs 1e+09 GB")
    assert not (clone / ".venv").exists()


def test_too_little_memory_is_said(clone):
    executable(clone.parent / "bin" / "python3", f'exec "{sys.executable}" "$@"')
    assert_one_sentence(set_up(clone, SETUP_MIN_MEMORY_GB="1e6"), "GB of memory and the demo needs 1e+06 GB")


def test_without_a_network_it_says_so_and_leaves_nothing_that_looks_complete(clone):
    executable(clone.parent / "bin" / "python3.13", f'exec "{sys.executable}" "$@"')
    nowhere = "http://127.0.0.1:9/simple"
    done = set_up(clone, PIP_INDEX_URL=nowhere, UV_DEFAULT_INDEX=nowhere, SETUP_MIN_DISK_GB="0")
    assert_one_sentence(done, "no network: installing uv==")
    assert not (clone / ".venv" / "setup-stamp").exists()
    assert not (clone / ".venv" / "bin" / "megatron-sao").exists()


def test_a_finished_environment_is_left_alone_until_a_pin_changes(clone):
    executable(clone / ".venv" / "bin" / "python", f'exec "{sys.executable}" "$@"')
    executable(clone / ".venv" / "bin" / "megatron-sao", "")
    spec = importlib.util.spec_from_file_location("install", clone / "tools" / "setup" / "install.py")
    install = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(install)
    kind = "gpu" if list(Path("/dev").glob("nvidia[0-9]*")) else "cpu"
    install.STAMP.write_text(install.inputs(kind))
    done = set_up(clone, SETUP_MIN_DISK_GB="1e9")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    for path in (install.FULL, install.CPU):
        path.write_text(path.read_text() + "one-more==1\n")
    assert_one_sentence(set_up(clone, SETUP_MIN_DISK_GB="1e9"), "GB of free disk")


def test_what_is_compiled_is_not_installed_on_a_gpu_machine(clone):
    spec = importlib.util.spec_from_file_location("install", clone / "tools" / "setup" / "install.py")
    install = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(install)
    left_out = set(FULL.read_text().splitlines()) - set(install.pinned("gpu"))
    assert sorted(line.split("==")[0] for line in left_out if line[:1] not in ("#", "")) == [
        "transformer-engine",
        "transformer-engine-cu13",
    ]
    assert len(install.pinned("cpu")) == len(pins(CPU))
