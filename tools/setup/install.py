"""Make .venv: pinned dependencies, then this project, then a stamp that lets the next run return at once.

Run by tools/setup.sh under Python 3.12 or 3.13; uses the standard library only. The CPU set is installed unless an
NVIDIA device file is present. Every failure is one sentence on stderr and exit code 2, and leaves neither the stamp
nor the ``megatron-sao`` command behind.

Environment: SETUP_MIN_DISK_GB and SETUP_MIN_MEMORY_GB replace the thresholds below.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
STAMP = VENV / "setup-stamp"
COMMAND = VENV / "bin" / "megatron-sao"
FULL = ROOT / "requirements.txt"
CPU = ROOT / "tools" / "setup" / "requirements-cpu.txt"
MIN_DISK_GB = {"cpu": 9.0, "gpu": 16.0}  # installed packages, the download cache, one run
MIN_MEMORY_GB = 12.0  # two SGLang servers, the trainer and a worker of the demo
# Compiled in part, against a CUDA toolkit (see requirements.txt); half an installation breaks imports of Megatron.
COMPILED = re.compile(r"^transformer-engine")
UNREACHABLE = re.compile(
    r"(?i)failed to fetch|connection|connect error|dns|name resolution|timed out|unreachable|no matching distribution"
)


class SetupError(Exception):
    """Set-up cannot go on; the message is the sentence for the user."""


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    if VENV.is_symlink():
        raise SetupError(f"{VENV} is a link to {VENV.resolve()}, an environment of something else; remove the link")
    # One set-up at a time: a second `make` waits here and then finds the stamp.
    lock = os.open(ROOT, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    kind = "gpu" if list(Path("/dev").glob("nvidia[0-9]*")) else "cpu"
    check_memory()
    fingerprint = inputs(kind)
    if STAMP.is_file() and STAMP.read_text() == fingerprint and COMMAND.is_file():
        return
    check_disk(kind)
    began = time.monotonic()
    resumed = STAMP.is_file()
    STAMP.unlink(missing_ok=True)
    COMMAND.unlink(missing_ok=True)
    if not resumed:
        run([sys.executable, "-m", "venv", "--clear", str(VENV)], "creating .venv")
    pins = pinned(kind)
    uv = next(pin for pin in pins if pin.startswith("uv=="))
    print(f"set-up: installing {len(pins)} pinned packages for {kind} (a few minutes the first time)", flush=True)
    python = str(VENV / "bin" / "python")
    run([python, "-m", "pip", "install", "--quiet", "--no-deps", "--retries", "1", uv], f"installing {uv}")
    selected = VENV / "requirements.txt"
    selected.write_text("\n".join(pins) + "\n")
    uv_pip = [str(VENV / "bin" / "uv"), "pip"]
    # `sync` takes the pins as the complete set, so what the CPU set leaves out is not pulled in again.
    run([*uv_pip, "sync", "--python", python, "--no-build", str(selected)], "installing the pinned packages")
    project = ["install", "--python", python, "--no-deps", "--no-build-isolation", "--offline", "--editable", str(ROOT)]
    run([*uv_pip, *project], "installing megatron-sao itself")
    temporary = STAMP.with_suffix(".new")
    temporary.write_text(fingerprint)
    temporary.replace(STAMP)
    print(f"set-up: .venv is ready after {time.monotonic() - began:.0f} s", flush=True)


def inputs(kind: str) -> str:
    """A hash of all that decides what .venv holds; the path is in it because a moved environment does not work."""
    digest = hashlib.sha256(f"{kind} {sys.version_info[:2]} {ROOT}".encode())
    for path in (FULL, CPU, ROOT / "pyproject.toml", Path(__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def pinned(kind: str) -> list[str]:
    """The pins to install on this machine, one requirement each."""
    lines = (CPU if kind == "cpu" else FULL).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#") and not COMPILED.match(line)]


def check_memory() -> None:
    needed = float(os.environ.get("SETUP_MIN_MEMORY_GB", MIN_MEMORY_GB))
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    cgroup = Path("/sys/fs/cgroup/memory.max")
    if cgroup.is_file() and (limit := cgroup.read_text().strip()) != "max":
        total = min(total, int(limit) / 1e9)
    if total < needed:
        raise SetupError(f"this machine has {total:.1f} GB of memory and the demo needs {needed:g} GB")


def check_disk(kind: str) -> None:
    needed = float(os.environ.get("SETUP_MIN_DISK_GB", MIN_DISK_GB[kind]))
    free = shutil.disk_usage(ROOT).free / 1e9
    if free < needed:
        raise SetupError(f"{ROOT} has {free:.1f} GB of free disk and the environment needs {needed:g} GB")


def run(command: list[str], doing: str) -> None:
    """Run one step with its output on stdout.

    Raises:
        SetupError: the step failed; the message says whether the network, the disk or something else was at fault.
    """
    environment = {**os.environ, "UV_NO_PROGRESS": "1", "UV_PYTHON_DOWNLOADS": "never", "PIP_NO_INPUT": "1"}
    environment.pop("PYTHONPATH", None)
    tail: list[str] = []
    with subprocess.Popen(
        command, env=environment, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            tail = [*tail[-40:], line.strip()]
    if not process.returncode:
        return
    output = "\n".join(tail)
    if "No space left" in output:
        raise SetupError(f"the disk filled up while {doing}; free some space and run this again")
    if UNREACHABLE.search(output):
        raise SetupError(
            f"no network: {doing} could not reach the package index; check the connection (a mirror is named by "
            "UV_DEFAULT_INDEX and PIP_INDEX_URL) and run this again"
        )
    last = next((line for line in reversed(tail) if line), "no output")
    raise SetupError(f"{doing} failed with exit code {process.returncode}: {last}")


if __name__ == "__main__":
    try:
        main()
    except SetupError as error:
        print(f"set-up: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        print(f"set-up: {error.filename or 'the system'}: {error.strerror}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
