"""The parts of a run as processes to watch, on one machine or on many: what the end of each one means.

A part that dies is started again a bounded number of times. When the bound is reached the others are stopped and its
last words are printed last, except that a run goes on without an engine as long as it has another.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_sao.config import RunConfig, dump_config
from megatron_sao.launch.process import (
    EXIT_ALARM,
    EXIT_CONFIG,
    EXIT_STOPPED,
    SupervisedProcess,
    adopt_orphans,
    kill_descendants,
)
from megatron_sao.launch.progress import Progress

MAX_RESTARTS = 3  # buffer, each engine sidecar, each worker
MAX_TRAINER_RESTARTS = 2  # it resumes from its checkpoint
STOP_SECONDS = 8.0  # for everything but the buffer, which goes last
STOP_BUFFER_SECONDS = 3.0
POLL_SECONDS = 0.2
FINAL_EXITS = (EXIT_CONFIG, EXIT_ALARM)  # nothing starts a part again after these
CHECKPOINT_SECONDS = 300.0  # that the trainer has to reach its checkpoint after SIGUSR1, unless told otherwise


@dataclass(frozen=True)
class Parts:
    """The processes of one run, not started yet."""

    buffer: SupervisedProcess
    trainer: SupervisedProcess
    engines: list[SupervisedProcess]
    workers: list[SupervisedProcess]

    def all(self) -> list[SupervisedProcess]:
        """In the order of starting: the buffer first, since the others talk to it."""
        return [self.buffer, self.trainer, *self.engines, *self.workers]


def part_arguments(run_dir: Path, command: str, *options: str) -> list[str]:
    """What the interpreter is called with to be a part of the run in ``run_dir``."""
    return ["-m", "megatron_sao.cli", command, str(run_dir / "config.yaml"), "--run-dir", str(run_dir), *options]


def part_environment(buffer_url: str, token: str) -> dict[str, str]:
    """The whole environment of a part: this process's, and how the parts find and trust each other."""
    env = {
        **os.environ,
        "MEGATRON_SAO_TOKEN": token,
        "MEGATRON_SAO_BUFFER": buffer_url,
        "PYTHONUNBUFFERED": "1",
    }
    # Many processes share the cores; without a bound each takes all of them, and gloo ranks wait for each other.
    env.setdefault("OMP_NUM_THREADS", "1")
    # PyTorch asks for huge pages for tensors in host memory: weights reach an engine on a CPU the faster.
    env.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    return env


def write_endpoint(
    config: RunConfig, run_dir: Path, buffer_url: str, engine_urls: list[str], job: str | None = None
) -> str:
    """Write down the run's settings and where it can be reached; returns a new token for its endpoints.

    ``<run_dir>/config.yaml``, ``endpoint.json`` ({"pid", "job", "buffer", "engines"}) and, readable by the owner alone,
    ``token``.
    """
    value = secrets.token_urlsafe(32)
    (run_dir / "config.yaml").write_text(dump_config(config))
    token = run_dir / "token"
    token.touch(mode=0o600)
    token.write_text(value)
    endpoint = {"pid": os.getpid(), "job": job, "buffer": buffer_url, "engines": engine_urls}
    (run_dir / "endpoint.json").write_text(json.dumps(endpoint, indent=2) + "\n")
    return value


class Supervisor:
    """Starts the parts of one run, watches them, stops them.

    Args:
        checkpoint_seconds: how long the trainer may take to checkpoint after SIGUSR1; asked when the signal comes.

    Attributes:
        stop_requested: whether SIGUSR1 has come.
    """

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        parts: Parts,
        checkpoint_seconds: Callable[[], float] = lambda: CHECKPOINT_SECONDS,
    ) -> None:
        self._run_dir, self._parts, self._checkpoint_seconds = run_dir, parts, checkpoint_seconds
        self._processes = parts.all()
        self._progress = Progress(config, run_dir)
        self._signal: int | None = None
        self.stop_requested = False
        self._stop_by: float | None = None  # when the trainer's time for a checkpoint is up

    def run(self) -> int:
        """Start, supervise, stop. SIGINT, SIGTERM and SIGHUP stop everything at once; SIGUSR1 lets the trainer
        checkpoint at its next step boundary first.

        Returns:
            0 when the trainer succeeded, 1 when a part died for good, 128 + n after signal n, and EXIT_STOPPED when
            the run stopped so that it can be resumed later.
        """
        adopt_orphans()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGUSR1, self._on_stop_request)
        ended = None
        try:
            for process in self._processes:
                process.start()
            ended = self._supervise()
        finally:
            self._stop()
            self._progress.close()
        return self._conclude(ended)

    def _conclude(self, ended: SupervisedProcess | None) -> int:
        if self._signal is not None:
            self.say(f"stopped by {signal.Signals(self._signal).name}; the same command resumes it")
            return 128 + self._signal
        code = ended.exit_code() if ended is self._parts.trainer else None
        if code == EXIT_STOPPED:
            self.say("stopped at a checkpoint")
            return EXIT_STOPPED
        if code != 0 and self.stop_requested and ended in (None, self._parts.trainer):
            why = ended.describe_exit() if ended else "still at work"
            self.say(f"stopped at the last checkpoint, since the trainer made no other in time ({why})")
            return EXIT_STOPPED
        if code != 0:
            self.say(
                f"{ended.name} died for good ({ended.describe_exit()}, {ended.restarts} restarts); its last words "
                f"({ended.log}):\n{ended.last_words()}"
            )
            return 1
        print(self._progress.summary({process.name: process.restarts for process in self._processes}), flush=True)
        return 0

    def _supervise(self) -> SupervisedProcess | None:
        """Watch until the trainer ends in a way that ends the run or another part dies for good (returns that process),
        or until a signal comes or the trainer's time for a checkpoint is up (None)."""
        while self._signal is None and not self._late():
            for process in list(self._processes):
                code = process.exit_code()
                if code is None:
                    continue
                if process is self._parts.trainer and (code in (0, EXIT_STOPPED) or self.stop_requested):
                    return process
                if process.restarts < process.max_restarts and code not in FINAL_EXITS:
                    self._restart(process)
                elif code not in FINAL_EXITS and self._can_do_without(process):
                    self._processes.remove(process)
                    self.say(f"{process.name} died for good ({process.describe_exit()}); the run goes on without it")
                else:
                    return process
            self._progress.update()
            time.sleep(POLL_SECONDS)
        return None

    def _restart(self, process: SupervisedProcess) -> None:
        kill_descendants(spare={other.pid for other in self._processes if other.pid})
        ended = process.describe_exit()
        process.restart()
        self.say(f"{process.name} ended ({ended}); restart {process.restarts} of {process.max_restarts}")

    def _can_do_without(self, process: SupervisedProcess) -> bool:
        others = [engine for engine in self._parts.engines if engine is not process and engine in self._processes]
        return process in self._parts.engines and bool(others)

    def _late(self) -> bool:
        """Pass a stop request on to the trainer once; whether it has had its time for it."""
        if self.stop_requested and self._stop_by is None:
            seconds = self._checkpoint_seconds()
            self.say(f"SIGUSR1: the trainer has {seconds:.0f} s for a checkpoint")
            self._parts.trainer.stop_at_checkpoint()
            self._stop_by = time.monotonic() + seconds
        return self._stop_by is not None and time.monotonic() > self._stop_by

    def _stop(self) -> None:
        """Stop everything within STOP_SECONDS + STOP_BUFFER_SECONDS; the buffer last, since the others talk to it."""
        others = [process for process in self._processes if process is not self._parts.buffer]
        for processes, seconds in ((others, STOP_SECONDS), ([self._parts.buffer], STOP_BUFFER_SECONDS)):
            for process in processes:
                process.terminate()
            deadline = time.monotonic() + seconds
            for process in processes:
                process.wait(deadline)
            for process in processes:
                process.kill()
        kill_descendants()

    def _on_signal(self, number: int, _frame: object) -> None:
        self._signal = number

    def _on_stop_request(self, _number: int, _frame: object) -> None:
        self.stop_requested = True

    def say(self, message: str) -> None:
        """Show a message and keep it in the launcher's log."""
        self._progress.note(f"megatron-sao: {message}")
        with (self._run_dir / "logs" / "launcher.log").open("a") as log:
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message.replace('\n', '\\n')}\n")  # one line per event
