"""Child processes that cannot outlive their parent, and that can be stopped within a bounded time.

Three mechanisms together leave no process behind:

* the kernel kills a child when its parent dies (``PR_SET_PDEATHSIG``), even when the parent is killed with -9;
* every child leads a session of its own, so that one signal reaches what it started;
* the launcher adopts orphaned descendants (``PR_SET_CHILD_SUBREAPER``), finds them and kills them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

EXIT_CONFIG = 2  # a part that ends with it would end the same way again
EXIT_ALARM = 3  # the trainer after an alarm; starting it again is a person's decision
EXIT_STOPPED = 75  # the trainer after a signal: checkpointed at a step boundary, to be started again

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process with SIGKILL when its parent dies; survives ``exec``.

    The signal is sent when the parent's *thread* that forked this process ends, so parents fork from a thread that
    lives as long as they do.

    Args:
        parent: the parent's process id where known; a parent that died before this call then ends the process too.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Make this process the new parent of every descendant whose own parent dies (instead of init)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_descendants(spare: set[int] = frozenset()) -> None:
    """Kill and reap this process's children outside ``spare``, with all their descendants."""
    for _ in range(5):  # what a killed process leaves behind becomes a child of this one, so look again
        doomed = [child for child in psutil.Process().children() if child.pid not in spare]
        if not doomed:
            return
        for child in doomed:
            for process in (*_children(child), child):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        psutil.wait_procs(doomed, timeout=2)


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def signal_name(number: int) -> str:
    """``SIGKILL``; ``signal 35`` for a real-time one, which has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class SupervisedProcess:
    """A command in a session of its own that writes to a log file and is restarted a bounded number of times.

    Args:
        name: what messages and the log file call it.
        argv: the command.
        env: its whole environment.
        log_dir: gets ``<name>.log``, appended to by every start.
        max_restarts: how often :meth:`restart` may be called.
    """

    def __init__(
        self,
        name: str,
        argv: list[str],
        env: dict[str, str],
        log_dir: Path,
        max_restarts: int = 0,
    ) -> None:
        self.name = name
        self.argv = argv
        self.env = env
        self.log = log_dir / f"{name}.log"
        self.max_restarts = max_restarts
        self.restarts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0  # where this start's output begins

    def start(self) -> None:
        """Start the command; call it from the main thread (see :func:`die_with_parent`)."""
        launcher = os.getpid()
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                self.argv,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(launcher),
            )

    def restart(self) -> None:
        """Start again after an exit. The caller checks ``restarts < max_restarts`` first."""
        self.kill()
        self.restarts += 1
        self.start()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def exit_code(self) -> int | None:
        """None while it runs (or was never started); negative is the number of the signal that ended it."""
        return self._process.poll() if self._process else None

    def terminate(self) -> None:
        """Ask the command alone to stop: it knows in which order to stop what it started."""
        if self._process and self._process.poll() is None:
            self._process.terminate()

    def stop_at_checkpoint(self) -> None:
        """Ask a trainer to end at its next step boundary, with a checkpoint."""
        if self._process and self._process.poll() is None:
            self._process.send_signal(signal.SIGUSR1)

    def wait(self, deadline: float) -> bool:
        """Whether it has exited, waiting until ``deadline`` on ``time.monotonic``'s clock."""
        if self._process is None:
            return True
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """Kill the whole session's process group, also when its leader has exited already."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):  # the group is empty
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def last_words(self, lines: int = 20) -> str:
        """The last non-empty lines this start wrote."""
        return "\n".join([line for line in self._output().splitlines() if line.strip()][-lines:])

    def _output(self, limit: int = 20_000) -> str:
        """The end of what this start wrote."""
        with self.log.open("rb") as log:
            log.seek(max(self._log_start, log.seek(0, os.SEEK_END) - limit))
            return log.read().decode(errors="replace")

    def describe_exit(self) -> str:
        """``exit code 3`` or ``killed by SIGTERM``."""
        code = self.exit_code()
        if code is None or code >= 0:
            return f"exit code {code}"
        kernel = " (by the kernel if memory ran out: see dmesg)" if -code == signal.SIGKILL else ""
        return f"killed by {signal_name(-code)}{kernel}"


class SupervisedRanks(SupervisedProcess):
    """A torchrun with several ranks on this machine. Its end is that of the rank that failed first: torchrun itself
    always exits with 1, ends the other ranks, and closes with a report that says nothing about the cause.

    Args:
        ranks: how many.
        argv: what each rank runs, without the interpreter.
        Others: as SupervisedProcess's; ``logs/ranks`` gets each rank's output apart.
    """

    _failure = re.compile(r"torch/distributed/elastic/.* failed \(exitcode: (-?\d+)\) local_rank: (\d+) ")

    def __init__(
        self, name: str, ranks: int, argv: list[str], env: dict[str, str], log_dir: Path, max_restarts: int = 0
    ) -> None:
        apart = ["--tee=3", f"--log-dir={log_dir / 'ranks'}"]  # also marks each rank's lines in the common log
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *apart]
        super().__init__(name, [sys.executable, *torchrun, *argv], env, log_dir, max_restarts)

    def stop_at_checkpoint(self) -> None:
        """Ask the ranks themselves: torchrun would give them half a minute."""
        if self._process and self._process.poll() is None:
            for rank in _children(psutil.Process(self._process.pid)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if rank.ppid() == self._process.pid:
                        rank.send_signal(signal.SIGUSR1)

    def exit_code(self) -> int | None:
        code, failure = super().exit_code(), self._first_failure()
        return int(failure[1]) if code and failure else code

    def last_words(self, lines: int = 20) -> str:
        failure = self._first_failure()
        if failure is None:
            return super().last_words(lines)
        mark = f"[default{failure[2]}]:"
        own = [line for line in self._output(1_000_000).splitlines() if line.startswith(mark)]
        own = [line.removeprefix(mark) for line in own]
        return "\n".join([line for line in own if line.strip()][-lines:])

    def describe_exit(self) -> str:
        failure = self._first_failure()
        return f"rank {failure[2]} {super().describe_exit()}" if failure else super().describe_exit()

    def _first_failure(self) -> re.Match[str] | None:
        """What torchrun says of it, once it has ended."""
        return self._failure.search(self._output()) if super().exit_code() else None
