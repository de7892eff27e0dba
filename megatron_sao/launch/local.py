"""``megatron-sao run``: buffer, engines, workers and trainer on this machine, supervised until the trainer ends.

Everything that can be checked is checked before the first process starts; ``launch.supervise`` has what comes then.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_sao.config import ConfigError, RunConfig, load_config
from megatron_sao.data.routing import replayed_routing
from megatron_sao.data.tasks import TaskError, load_tasks
from megatron_sao.launch.ports import port_of, reserve_port
from megatron_sao.launch.process import SupervisedProcess, SupervisedRanks
from megatron_sao.launch.supervise import (
    MAX_RESTARTS,
    MAX_TRAINER_RESTARTS,
    Parts,
    Supervisor,
    part_arguments,
    part_environment,
    write_endpoint,
)

MIN_FREE_BYTES = 10**9
_LOCK_SECONDS = 0.5  # `status` looks at the lock by taking it, for a moment
OBSERVING = ("logging", "alarms")  # sections that a resumed run may change: they do not touch what is trained


def main(config: RunConfig, run_dir: Path) -> int:
    """Run everything; returns the supervisor's exit code.

    Raises:
        ConfigError: something is missing or taken; nothing was started.
    """
    check_inputs(config)
    check_one_machine(config)
    check_environment(config)
    check_run_dir(config, run_dir)
    if is_complete(config, run_dir):
        print(f"megatron-sao: the run in {run_dir} is complete; its policy is in {run_dir / 'hf'}")
        return 0
    ports = choose_ports(config)
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    hosts = [config.buffer.host, *[config.engine.host] * config.engine.count]
    with exclusive(run_dir), contextlib.ExitStack() as reserved:  # the ports, until the servers on them have ended
        for host, port in zip(hosts, ports, strict=True):
            reserved.enter_context(reserve_port(host, port))
        return Supervisor(config, run_dir, _parts(config, run_dir, ports)).run()


def check_inputs(config: RunConfig) -> None:
    """Raises ConfigError for a missing model directory or data file, and for routing replay of a model without
    experts."""
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
    _count_tasks("train", config.data.train)
    if config.data.eval is not None:
        held_out = _count_tasks("eval", config.data.eval)
        if held_out < config.eval.prompts:
            raise ConfigError(
                f"eval.prompts = {config.eval.prompts}, but data.eval = {config.data.eval} holds {held_out} tasks; "
                "lower it or add tasks"
            )
    if config.sft.steps and config.data.sft is None:
        raise ConfigError(f"sft.steps = {config.sft.steps} needs demonstrations: set data.sft, or sft.steps to 0")
    replayed_routing(config)


def _count_tasks(name: str, path: Path) -> int:
    try:
        return len(load_tasks(path))
    except TaskError as error:
        raise ConfigError(f"data.{name}: {error}; correct it and start again") from error


def check_one_machine(config: RunConfig) -> None:
    """Raises ConfigError for ranks meant for other machines."""
    parallel = config.parallel
    if parallel.nproc_per_node != parallel.world_size:
        raise ConfigError(
            f"parallel.nproc_per_node = {parallel.nproc_per_node} and world_size = {parallel.world_size}: run starts "
            "all ranks on this machine, so both must be equal; `megatron-sao slurm` starts them on several"
        )


def check_environment(config: RunConfig) -> None:
    """Raises ConfigError for an environment or a reward that is not there."""
    from megatron_sao.rollout.loading import load_object  # with packages that a node that only submits jobs lacks

    load_object(config.rollout.environment, "rollout.environment")
    if config.rollout.reward is not None:
        load_object(config.rollout.reward, "rollout.reward")


def check_run_dir(config: RunConfig, run_dir: Path) -> None:
    """Raises ConfigError unless ``run_dir`` is new, empty, or holds a run of just this config, or of any that has not
    produced anything; and on a full disk. Logs alone are none: an evaluation leaves them."""
    saved = run_dir / "config.yaml"
    if saved.is_file() and _has_begun(run_dir):
        sections = (set_up.model_dump(exclude=set(OBSERVING)) for set_up in (load_config(saved), config))
        name, before, now = next(differences(*sections), (None, None, None))
        if name is not None:
            raise ConfigError(
                f"{name} = {now} now, but {before} in {saved}: a run is resumed with the settings it began with; "
                "restore the value or choose another --run-dir"
            )
    elif run_dir.exists() and not run_dir.is_dir():
        raise ConfigError(f"--run-dir {run_dir} is a file; choose another")
    elif run_dir.is_dir() and not saved.is_file() and any(entry.name != "logs" for entry in run_dir.iterdir()):
        raise ConfigError(f"--run-dir {run_dir} is not empty and holds no config.yaml, so no run; choose another")
    existing = next(parent for parent in (run_dir, *run_dir.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < MIN_FREE_BYTES:
        raise ConfigError(f"--run-dir {run_dir}: {free / 1e9:.2f} GB of disk are free and a run needs 1 GB at least")


def _has_begun(run_dir: Path) -> bool:
    """Whether a start got as far as a rollout or a step; before that a mistake in the config may be corrected."""
    made = (run_dir / "metrics.jsonl", run_dir / "checkpoints" / "latest", *run_dir.glob("buffer/segments/*.seg"))
    return any(path.is_file() and path.stat().st_size > 0 for path in made)


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
        return [_listen(held, *want) for want in wanted]


def _listen(held: contextlib.ExitStack, field: str, host: str, port: int) -> int:
    try:
        listener = held.enter_context(reserve_port(host, port))
        listener.listen(1)
    except OSError as error:
        raise ConfigError(
            f"{field} = {port}: cannot listen on {host}:{port} ({error.strerror}); stop what uses it or set another "
            "port (0: any free one)"
        ) from error
    return port_of(listener)


@contextlib.contextmanager
def exclusive(run_dir: Path) -> Iterator[None]:
    """Own ``run_dir`` until this process ends in whatever way. Raises ConfigError while another launcher owns it."""
    with (run_dir / "launcher.lock").open("a") as lock:
        give_up = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up:
                    message = f"--run-dir {run_dir} belongs to a run in progress; stop it or choose another"
                    raise ConfigError(message) from None
            time.sleep(0.05)
        yield


def is_owned(run_dir: Path) -> bool:
    """Whether a launcher owns ``run_dir``."""
    try:
        with (run_dir / "launcher.lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # there never was one, or the file system cannot tell
    return False


def visible_gpus() -> list[str]:
    """Ids of the NVIDIA devices this process may use, found without loading CUDA."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [device for device in chosen.split(",") if device]
    return sorted((path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*")), key=int)


def _parts(config: RunConfig, run_dir: Path, ports: list[int]) -> Parts:
    """The processes of the run, not started yet. ``ports``: the buffer's, then each engine's."""
    buffer_port, *engine_ports = ports
    host = "127.0.0.1" if config.buffer.host in ("0.0.0.0", "::") else config.buffer.host
    buffer_url = f"http://{host}:{buffer_port}"
    engine_urls = [f"http://{config.engine.host}:{port}" for port in engine_ports]
    token = write_endpoint(config, run_dir, buffer_url, engine_urls)
    env = part_environment(buffer_url, token)

    def part(name: str, *command: str, extra: dict[str, str] | None = None) -> SupervisedProcess:
        argv = [sys.executable, *part_arguments(run_dir, *command)]
        return SupervisedProcess(name, argv, env | (extra or {}), run_dir / "logs", MAX_RESTARTS)

    trainer_gpus, *engine_gpus = gpu_shares(config)
    engines = [
        part(f"engine-{index}", "engine", "--index", str(index), "--port", str(port), extra=engine_gpus[index])
        for index, port in enumerate(engine_ports)
    ]
    workers = [
        part(f"worker-{index}", "rollout", "--worker-id", f"worker-{index}") for index in range(config.rollout.workers)
    ]
    buffer = part("buffer", "buffer", "--host", config.buffer.host, "--port", str(buffer_port))
    return Parts(buffer, _trainer(config, run_dir, env | trainer_gpus), engines, workers)


def _trainer(config: RunConfig, run_dir: Path, env: dict[str, str]) -> SupervisedProcess:
    ranks, arguments = config.parallel.world_size, part_arguments(run_dir, "train")
    if ranks > 1:
        return SupervisedRanks("trainer", ranks, arguments, env, run_dir / "logs", MAX_TRAINER_RESTARTS)
    # the variables torchrun would set, without the seconds it takes to start
    env = env | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    # port 0: whichever is free when it is opened, since nobody else has to find it
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    return SupervisedProcess("trainer", [sys.executable, *arguments], env, run_dir / "logs", MAX_TRAINER_RESTARTS)


def gpu_shares(config: RunConfig) -> list[dict[str, str]]:
    """The environment that gives the trainer, then each engine, devices of its own; all devices to everyone where there
    are too few."""
    needs = [config.parallel.world_size, *[config.engine.tp] * config.engine.count]
    gpus = visible_gpus()
    if config.model.device == "cpu" or sum(needs) > len(gpus):
        return [{} for _ in needs]
    pool = iter(gpus)
    return [{"CUDA_VISIBLE_DEVICES": ",".join(next(pool) for _ in range(need))} for need in needs]
