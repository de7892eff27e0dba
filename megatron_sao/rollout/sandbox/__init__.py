"""Runs Python that a policy wrote: bounded in time, memory, output and processes, without network, in a directory of
its own."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from megatron_sao.rollout.sandbox import jail

GRACE = 1.0  # seconds beyond the limit before the process is killed from outside


class SandboxUnavailable(RuntimeError):
    """This machine cannot contain foreign code; nothing was run."""


@dataclass(frozen=True)
class Limits:
    """Of one run.

    Attributes:
        seconds: of wall time, and of CPU time.
        memory_bytes: of address space.
        output_bytes: of stdout and stderr together; the rest is cut off.
        file_bytes: of one file it writes.
        disk_bytes: of all files in its directory, looked at ten times a second; not seen are those that it removed and
            keeps open, at most 64.
    """

    seconds: float = 10.0
    memory_bytes: int = 1 << 30
    output_bytes: int = 8192
    file_bytes: int = 1 << 24
    disk_bytes: int = 1 << 26


@dataclass(frozen=True)
class Result:
    """What a run wrote, and how it ended: "ok", "error" (an exception, a refused operation), "timeout" or "killed"."""

    output: str
    outcome: str


async def run_python(code: str, limits: Limits = Limits()) -> Result:
    """Run ``code`` as a script. Whatever it does comes back as a Result.

    Raises:
        SandboxUnavailable: seccomp or Landlock is missing here, so that it was not run.
    """
    top = Path(tempfile.mkdtemp(prefix="sandbox-"))
    (top / "0").mkdir()
    try:
        return await _run(code, top / "0", limits)
    finally:
        await asyncio.to_thread(_remove, top)  # a second for thousands of directories


async def _run(code: str, directory: Path, limits: Limits) -> Result:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", "-B", jail.__file__,
        str(limits.seconds), str(limits.memory_bytes), str(limits.file_bytes), *map(str, _import_paths()),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        cwd=directory, env={"HOME": str(directory), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
        start_new_session=True,
    )  # fmt: skip
    timed_out = False
    output = bytearray()
    watch = asyncio.create_task(_watch_disk(process, directory, limits.disk_bytes))
    try:
        async with asyncio.timeout(limits.seconds + GRACE):
            process.stdin.write(code.encode(errors="surrogatepass"))
            with contextlib.suppress(ConnectionError):
                await process.stdin.drain()
            process.stdin.close()
            while chunk := await process.stdout.read(65536):
                output += chunk[: limits.output_bytes + 1 - len(output)]  # read on: a full pipe would stop it
            await process.wait()
    except TimeoutError:
        timed_out = True
    finally:
        watch.cancel()
        _kill(process)
        while await process.stdout.read(65536):  # wait() returns only once the pipe has been emptied
            pass
        await process.wait()
    if process.returncode == jail.UNAVAILABLE:
        raise SandboxUnavailable(output.decode(errors="replace").strip())
    text = output[: limits.output_bytes].decode(errors="replace")
    if len(output) > limits.output_bytes:
        text += f"\n[output cut off after {limits.output_bytes} bytes]"
    if timed_out or process.returncode == -signal.SIGXCPU:
        return Result(f"{text}\n[stopped after {limits.seconds:g} s]".lstrip(), "timeout")
    if process.returncode < 0:
        return Result(f"{text}\n[killed by {signal.Signals(-process.returncode).name}]".lstrip(), "killed")
    return Result(text, "ok" if process.returncode == 0 else "error")


async def _watch_disk(process: asyncio.subprocess.Process, directory: Path, most: int) -> None:
    """Kill the process once what lies in its directory exceeds the limit."""
    while True:
        await asyncio.sleep(0.1)
        if await asyncio.to_thread(_used, directory) > most:
            _kill(process)


def _used(directory: Path) -> float:
    """The bytes of its files; an empty one counts as 4096, what cannot be looked at (nested too deep) as too many."""
    used = 0.0

    def unseen(error: OSError) -> None:
        nonlocal used
        if not isinstance(error, FileNotFoundError | NotADirectoryError):  # gone since it was listed
            used = math.inf

    for parent, directories, files in os.walk(directory, onerror=unseen):
        for name in directories + files:
            try:
                used += max(4096, os.lstat(os.path.join(parent, name)).st_size)
            except OSError as error:
                unseen(error)
    return used


def _remove(top: Path) -> None:
    """Remove ``top`` and the tree ``0`` in it, of any depth: what is in a directory is moved up before it goes."""
    number, count = 0, 1
    with contextlib.suppress(OSError):
        while number < count:
            with os.scandir(top / str(number)) as entries:
                for entry in list(entries):
                    if entry.is_dir(follow_symlinks=False):
                        os.rename(entry.path, top / str(count))
                        count += 1
                    else:
                        os.unlink(entry.path)
            (top / str(number)).rmdir()
            number += 1
        top.rmdir()


def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:  # else its number may be another's by now
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _import_paths() -> list[Path]:
    """Where the code may import from besides the standard library: this environment's packages, such as sympy."""
    return [Path(path) for path in sys.path if path.endswith("site-packages")]
