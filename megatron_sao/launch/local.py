"""``megatron-sao run``: buffer, engines, workers and trainer on this machine, supervised until the trainer ends.

Everything that can be checked is checked before the first process starts. Afterwards a process that dies is started
again a bounded number of times; when the bound is reached, all the others are stopped and its last words are printed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_sao.config import ConfigError, RunConfig, dump_config, load_config
from megatron_sao.data.routing import replayed_routing
from megatron_sao.data.tasks import load_tasks
from megatron_sao.launch.process import SupervisedProcess, SupervisedRanks, adopt_orphans, kill_descendants
from megatron_sao.launch.progress import Progress

MAX_RESTARTS = 3  # buffer, each engine sidecar, each worker
MAX_TRAINER_RESTARTS = 2  # it resumes from its checkpoint
STOP_SECONDS = 8.0  # for everything but the buffer, which goes last
STOP_BUFFER_SECONDS = 3.0
POLL_SECONDS = 0.2
MIN_FREE_BYTES = 10**9
EXIT_CONFIG = 2  # a child that ends with it would end the same way again


def main(config: RunConfig, run_dir: Path) -> int:
    """Run everything; returns the exit code: 0, 1 when a process died for good, 128 + n when stopped by signal n.

    Raises:
        ConfigError: something is missing or taken; nothing was started.
    """
    check_inputs(config)
    check_run_dir(config, run_dir)
    if is_complete(config, run_dir):
        print(f"megatron-sao: the run in {run_dir} is complete; its policy is in {run_dir / 'hf'}")
        return 0
    ports = choose_ports(config)
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    with exclusive(run_dir):
        return Launcher(config, run_dir, ports).run()


def check_inputs(config: RunConfig) -> None:
    """Raises ConfigError for a missing model directory or data file, for routing replay of a model without experts, and
    for ranks meant for other machines."""
    if not config.model.path.is_dir():
        raise ConfigError(f"model.path = {config.model.path} is not a directory; make or download the model first")
    if not (config.model.path / "config.json").is_file():
        raise ConfigError(f"model.path = {config.model.path} holds no config.json, so it is no Hugging Face model")
    if config.model.megatron_path is not None and not config.model.megatron_path.is_dir():
        raise ConfigError(
            f"model.megatron_path = {config.model.megatron_path} is not a directory; make it with "
            "tools/convert_hf_to_megatron.py, or leave it out"
        )
    for name, path in config.data:
        if path is not None and not path.is_file():
            raise ConfigError(f"data.{name} = {path} is not a file; make it or correct the path")
    if config.data.eval is not None:
        held_out = len(load_tasks(config.data.eval))
        if held_out < config.eval.prompts:
            raise ConfigError(
                f"eval.prompts = {config.eval.prompts}, but data.eval = {config.data.eval} holds {held_out} tasks; "
                "lower it or add tasks"
            )
    if config.sft.steps and config.data.sft is None:
        raise ConfigError(f"sft.steps = {config.sft.steps} needs demonstrations: set data.sft, or sft.steps to 0")
    replayed_routing(config)
    parallel = config.parallel
    if parallel.nproc_per_node != parallel.world_size:
        raise ConfigError(
            f"parallel.nproc_per_node = {parallel.nproc_per_node} and world_size = {parallel.world_size}: run starts "
            "all ranks on this machine, so both must be equal"
        )


def check_run_dir(config: RunConfig, run_dir: Path) -> None:
    """Raises ConfigError unless ``run_dir`` is new, empty, or holds a run of just this config; and on a full disk."""
    saved = run_dir / "config.yaml"
    if saved.is_file():
        name, before, now = next(differences(load_config(saved).model_dump(), config.model_dump()), (None, None, None))
        if name is not None:
            raise ConfigError(
                f"{name} = {now} now, but {before} in {saved}: a run is resumed with the settings it began with; "
                "restore the value or choose another --run-dir"
            )
    elif run_dir.exists() and not run_dir.is_dir():
        raise ConfigError(f"--run-dir {run_dir} is a file; choose another")
    elif run_dir.is_dir() and any(run_dir.iterdir()):
        raise ConfigError(f"--run-dir {run_dir} is not empty and holds no config.yaml, so no run; choose another")
    existing = next(parent for parent in (run_dir, *run_dir.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < MIN_FREE_BYTES:
        raise ConfigError(f"--run-dir {run_dir}: {free / 1e9:.2f} GB of disk are free and a run needs 1 GB at least")


def is_complete(config: RunConfig, run_dir: Path) -> bool:
    """Whether nothing is left to do: the trainer exports its policy and then makes its last checkpoint, unless there is
    no RL step to make one after."""
    exported = (run_dir / "hf" / "config.json").is_file()
    if config.rl.steps == 0:
        return exported
    latest = run_dir / "checkpoints" / "latest"
    return exported and latest.is_file() and latest.read_text().strip() == f"rl-{config.rl.steps}"


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Fields that differ as (dotted name, old, new)."""
    for key in {**old, **new}:
        before, now = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(now, dict):
            yield from differences(before, now, f"{prefix}{key}.")
        elif before != now:
            yield f"{prefix}{key}", before, now


def choose_ports(config: RunConfig) -> list[int]:
    """The buffer's port, then each engine's: the configured ones, or free ones where the config says 0.

    Raises:
        ConfigError: a configured port cannot be listened on.
    """
    wanted = [("buffer.port", config.buffer.host, config.buffer.port)]
    for index in range(config.engine.count):
        port = config.engine.port + index if config.engine.port else 0
        wanted.append(("engine.port" + (f" + {index}" if index else ""), config.engine.host, port))
    with contextlib.ExitStack() as held:  # all at once, so that no two get the same
        return [_listen(held.enter_context(socket.socket()), *want) for want in wanted]


def _listen(listener: socket.socket, field: str, host: str, port: int) -> int:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1)
    except OSError as error:
        raise ConfigError(
            f"{field} = {port}: cannot listen on {host}:{port} ({error.strerror}); stop what uses it or set another "
            "port (0: any free one)"
        ) from error
    return listener.getsockname()[1]


@contextlib.contextmanager
def exclusive(run_dir: Path) -> Iterator[None]:
    """Own ``run_dir`` until this process ends in whatever way. Raises ConfigError while another launcher owns it."""
    with (run_dir / "launcher.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"--run-dir {run_dir} belongs to a run in progress; stop it or choose another") from None
        yield


def visible_gpus() -> list[str]:
    """Ids of the NVIDIA devices this process may use, found without loading CUDA."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [device for device in chosen.split(",") if device]
    return sorted((path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*")), key=int)


class Launcher:
    """The processes of one run and what happens to them."""

    def __init__(self, config: RunConfig, run_dir: Path, ports: list[int]) -> None:
        self.config = config
        self.run_dir = run_dir
        self.progress = Progress(config, run_dir)
        self.signal: int | None = None
        self.token = secrets.token_urlsafe(32)
        self.buffer_port, *self.engine_ports = ports
        host = "127.0.0.1" if config.buffer.host in ("0.0.0.0", "::") else config.buffer.host
        self.buffer_url = f"http://{host}:{self.buffer_port}"
        self.buffer, self.trainer, *others = self._processes()
        self.processes = [self.buffer, self.trainer, *others]

    def run(self) -> int:
        """Start, supervise, stop; returns the exit code."""
        self._write_endpoint()
        adopt_orphans()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        failed = None
        try:
            for process in self.processes:
                process.start()
            failed = self._supervise()
        finally:
            self._stop()
            self.progress.close()
        if self.signal is not None:
            self._say(f"stopped by {signal.Signals(self.signal).name}; the same command resumes it")
            return 128 + self.signal
        if failed is not None:
            self._say(
                f"{failed.name} died for good ({failed.describe_exit()}, {failed.restarts} restarts); its last words "
                f"({failed.log}):\n{failed.last_words()}"
            )
            return 1
        print(self.progress.summary({process.name: process.restarts for process in self.processes}), flush=True)
        return 0

    def _supervise(self) -> SupervisedProcess | None:
        """Watch until the trainer succeeds (None), a signal comes (None) or a process dies for good (that process)."""
        while self.signal is None:
            for process in self.processes:
                code = process.exit_code()
                if code is None:
                    continue
                if process is self.trainer and code == 0:
                    return None
                if process.restarts >= process.max_restarts or code == EXIT_CONFIG:
                    return process
                kill_descendants(spare={other.pid for other in self.processes if other.pid})
                ended = process.describe_exit()
                process.restart()
                self._say(f"{process.name} ended ({ended}); restart {process.restarts} of {process.max_restarts}")
            self.progress.update()
            time.sleep(POLL_SECONDS)
        return None

    def _stop(self) -> None:
        """Stop everything within STOP_SECONDS + STOP_BUFFER_SECONDS; the buffer last, since the others talk to it."""
        for processes, seconds in ((self.processes[1:], STOP_SECONDS), (self.processes[:1], STOP_BUFFER_SECONDS)):
            for process in processes:
                process.terminate()
            deadline = time.monotonic() + seconds
            for process in processes:
                process.wait(deadline)
            for process in processes:
                process.kill()
        kill_descendants()

    def _on_signal(self, number: int, _frame: object) -> None:
        self.signal = number

    def _say(self, message: str) -> None:
        self.progress.note(f"megatron-sao: {message}")
        with (self.run_dir / "logs" / "launcher.log").open("a") as log:
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}\n")

    def _write_endpoint(self) -> None:
        (self.run_dir / "config.yaml").write_text(dump_config(self.config))
        token = self.run_dir / "token"
        token.touch(mode=0o600)
        token.write_text(self.token)
        engines = [f"http://{self.config.engine.host}:{port}" for port in self.engine_ports]
        endpoint = {"pid": os.getpid(), "buffer": self.buffer_url, "engines": engines}
        (self.run_dir / "endpoint.json").write_text(json.dumps(endpoint, indent=2) + "\n")

    def _processes(self) -> list[SupervisedProcess]:
        """Buffer, trainer, engines, workers, not started yet."""
        config, parallel = self.config, self.config.parallel
        gpus = iter(self._gpu_shares([parallel.world_size, *[config.engine.tp] * config.engine.count]))
        buffer = ["buffer", "--host", config.buffer.host, "--port", str(self.buffer_port)]
        processes = [self._process("buffer", buffer, {}), self._trainer(next(gpus))]
        for index, port in enumerate(self.engine_ports):
            command = ["engine", "--index", str(index), "--port", str(port)]
            processes.append(self._process(f"engine-{index}", command, next(gpus)))
        for index in range(config.rollout.workers):
            name = f"worker-{index}"
            processes.append(self._process(name, ["rollout", "--worker-id", name], {}))
        return processes

    def _trainer(self, env: dict[str, str]) -> SupervisedProcess:
        ranks = self.config.parallel.world_size
        if ranks == 1:  # the variables torchrun would set, without the seconds it takes to start
            # port 0: whichever is free when it is opened, since nobody else has to find it
            master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
            rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
            return self._process("trainer", ["train"], env | master | rank, MAX_TRAINER_RESTARTS)
        return self._process("trainer", ["train"], env, MAX_TRAINER_RESTARTS, ranks)

    def _process(
        self,
        name: str,
        command: list[str],
        env: dict[str, str],
        max_restarts: int = MAX_RESTARTS,
        ranks: int = 1,
    ) -> SupervisedProcess:
        subcommand, *options = command
        arguments = [subcommand, str(self.run_dir / "config.yaml"), "--run-dir", str(self.run_dir), *options]
        argv = ["-m", "megatron_sao.cli", *arguments]
        common = {
            **os.environ,
            "MEGATRON_SAO_TOKEN": self.token,
            "MEGATRON_SAO_BUFFER": self.buffer_url,
            "PYTHONUNBUFFERED": "1",
        }
        # Many processes share the cores; without a bound each takes all of them, and gloo ranks wait for each other.
        common.setdefault("OMP_NUM_THREADS", "1")
        logs = self.run_dir / "logs"
        if ranks > 1:
            return SupervisedRanks(name, ranks, argv, common | env, logs, max_restarts)
        return SupervisedProcess(name, [sys.executable, *argv], common | env, logs, max_restarts)

    def _gpu_shares(self, needs: list[int]) -> list[dict[str, str]]:
        """One environment per need, giving each its own devices; all devices to everyone where there are too few."""
        gpus = visible_gpus()
        if self.config.model.device == "cpu" or sum(needs) > len(gpus):
            return [{} for _ in needs]
        pool = iter(gpus)
        return [{"CUDA_VISIBLE_DEVICES": ",".join(next(pool) for _ in range(need))} for need in needs]
