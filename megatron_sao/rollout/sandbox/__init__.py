"""Runs Python that a policy wrote: bounded in time, memory, output, processes and threads, without network, in a
directory of its own."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import select
import signal
import sys
import tempfile
import threading
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from megatron_sao.launch.process import signal_name
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
        threads: at once, looked at a hundred times a second. Code that does nothing else starts some 40 a millisecond:
            several hundred until it is killed, and thousands where busy cores let the look come 100 ms late.
    """

    seconds: float = 10.0
    memory_bytes: int = 1 << 30
    output_bytes: int = 8192
    file_bytes: int = 1 << 24
    disk_bytes: int = 1 << 26
    threads: int = 64


@dataclass(frozen=True)
class Result:
    """What a run wrote, and how it ended: "ok", "error" (an exception, a refused operation), "timeout" or "killed"."""

    output: str
    outcome: str


async def run_python(code: str, limits: Limits = Limits()) -> Result:
    """Run ``code`` as a script. Whatever it does comes back as a Result.

    Raises:
        SandboxUnavailable: seccomp or Landlock is missing here, or its process failed before: it was not run.
    """
    top = Path(tempfile.mkdtemp(prefix="sandbox-"))
    (top / "0").mkdir()
    try:
        with FileIO(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)) as contained:
            return await _run(code, top / "0", limits, contained)
    finally:
        await asyncio.to_thread(_remove, top)  # a second for thousands of directories


async def _run(code: str, directory: Path, limits: Limits, contained: FileIO) -> Result:
    """``contained`` is an eventfd, written before the code is read and closed before it runs: an exit without it is
    not the code's, whatever its exit code and output."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", "-B", jail.__file__,
        str(limits.seconds), str(limits.memory_bytes), str(limits.file_bytes), str(contained.fileno()),
        *map(str, _import_paths()),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        cwd=directory, env={"HOME": str(directory), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
        start_new_session=True, pass_fds=[contained.fileno()],
    )  # fmt: skip
    timed_out = False
    output = bytearray()
    exceeded: list[str] = []
    watch = asyncio.create_task(_watch_disk(process, directory, limits.disk_bytes, exceeded))
    try:
        _watch_threads(process, limits.threads, exceeded)
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
    if process.returncode >= 0 and not contained.read(8):
        raise SandboxUnavailable(output.decode(errors="replace").strip())
    text = output[: limits.output_bytes].decode(errors="replace")
    if len(output) > limits.output_bytes:
        text += f"\n[output cut off after {limits.output_bytes} bytes]"
    if timed_out or process.returncode == -signal.SIGXCPU:
        return Result(f"{text}\n[stopped after {limits.seconds:g} s]".lstrip(), "timeout")
    if process.returncode < 0:
        why = f": {exceeded[0]}" if exceeded else f" by {signal_name(-process.returncode)}"
        return Result(f"{text}\n[killed{why}]".lstrip(), "killed")
    return Result(text, "ok" if process.returncode == 0 else "error")


async def _watch_disk(process: asyncio.subprocess.Process, directory: Path, most: int, exceeded: list[str]) -> None:
    """Kill the process once what lies in its directory exceeds the limit, and say so in ``exceeded``."""
    while True:
        await asyncio.sleep(0.1)
        used = await asyncio.to_thread(_used, directory)
        if used > most:
            exceeded.append("directories nested too deep" if used == math.inf else f"more than {most} bytes of files")
            _kill(process)


def _watch_threads(process: asyncio.subprocess.Process, most: int, exceeded: list[str]) -> None:
    """Kill the process once it has more than ``most`` threads, and say so in ``exceeded``.

    In a thread, which ends with the process: within a second they could take every process number of the machine, and
    the event loop may be busy for as long. No rlimit bounds root's threads, and a cgroup is not everywhere to be had.
    """
    if process.returncode is None:  # else its number may be another's by now
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended; the loop hears of it next
            stat, pidfd = FileIO(f"/proc/{process.pid}/stat"), FileIO(os.pidfd_open(process.pid))
            threading.Thread(target=_kill_above, args=(most, stat, pidfd, exceeded), daemon=True).start()


def _kill_above(most: int, stat: FileIO, pidfd: FileIO, exceeded: list[str]) -> None:
    ended = select.poll()
    ended.register(pidfd, select.POLLIN)
    with stat, pidfd, contextlib.suppress(ProcessLookupError):
        while not ended.poll(10):
            fields = os.pread(stat.fileno(), 4096, 0).rpartition(b")")[2].split()  # what follows the name it may choose
            if int(fields[17]) > most:
                exceeded.append(f"more than {most} threads")
                signal.pidfd_send_signal(pidfd.fileno(), signal.SIGKILL)
                return


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
