"""The real ``megatron-sao run`` supervising stand-in parts (fake_parts/sitecustomize.py)."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml

ROOT = Path(__file__).parents[2]
FAKES = Path(__file__).parent / "fake_parts"


class Run:
    """One launcher over stand-ins; ``behaviour`` is e.g. {"trainer": "succeed"}."""

    def __init__(self, folder: Path, behaviour: dict[str, str], **parallel: int) -> None:
        self.run_dir = folder / "run"
        self.pids = folder / "pids"
        self.pids.mkdir(exist_ok=True)
        (folder / "model").mkdir(exist_ok=True)
        (folder / "model" / "config.json").write_text("{}")
        (folder / "tasks.jsonl").write_text('{"prompt": "1+1="}')
        config = {
            "name": "fake",
            "model": {"path": str(folder / "model"), "device": "cpu"},
            "data": {"train": str(folder / "tasks.jsonl")},
            "rollout": {"environment": "none:None"},
            "parallel": parallel,
        }
        (folder / "fake.yaml").write_text(yaml.safe_dump(config))
        env = {**os.environ, "PYTHONPATH": f"{FAKES}{os.pathsep}{ROOT}", "FAKE_PIDS": str(self.pids)}
        env |= {f"FAKE_{name.upper()}": words for name, words in behaviour.items()}
        command = [sys.executable, "-m", "megatron_sao.cli", "run", "fake.yaml", "--run-dir", str(self.run_dir)]
        self.process = subprocess.Popen(
            command, cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def started(self, name: str) -> list[int]:
        return [int(path.suffix[1:]) for path in self.pids.glob(f"{name}.*")]

    def wait_for(self, **counts: int) -> None:
        deadline = time.monotonic() + 90
        while any(len(self.started(name.replace("_", "-"))) < count for name, count in counts.items()):
            assert time.monotonic() < deadline, f"{counts} did not start: {self.process.poll()}"
            time.sleep(0.05)

    def finish(self, timeout: float = 90) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=timeout)
        return self.process.returncode, errors

    def alive(self) -> list[str]:
        return [path.name for path in self.pids.iterdir() if is_running(int(path.suffix[1:]))]


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def launch(tmp_path: Path) -> Iterator:
    runs: list[Run] = []

    def start(behaviour: dict[str, str], **parallel: int) -> Run:
        runs.append(Run(tmp_path, behaviour, **parallel))
        return runs[-1]

    yield start
    for run in runs:
        run.process.kill()
        run.process.communicate()
        for path in run.pids.iterdir():
            if is_running(int(path.suffix[1:])):
                os.kill(int(path.suffix[1:]), signal.SIGKILL)


def test_the_trainers_success_ends_the_run_and_every_process(launch):
    run = launch({"trainer": "succeed", "engine": "detach", "after": "buffer engine engine-child worker"})
    code, errors = run.finish()
    assert code == 0, errors
    assert all(len(run.started(name)) == 1 for name in ("buffer", "engine", "engine-child", "worker", "trainer"))
    assert run.alive() == []
    endpoint = json.loads((run.run_dir / "endpoint.json").read_text())
    assert endpoint["buffer"].startswith("http://127.0.0.1:") and len(endpoint["engines"]) == 1
    assert (run.run_dir / "token").stat().st_mode & 0o777 == 0o600
    assert {path.name for path in (run.run_dir / "logs").iterdir()} == {
        "buffer.log", "engine-0.log", "worker-0.log", "trainer.log",
    }  # fmt: skip


def test_a_worker_is_restarted_three_times_and_then_the_run_ends_with_its_last_words(launch):
    run = launch({"worker": "fail"})
    code, errors = run.finish()
    assert code == 1
    assert len(run.started("worker")) == 4
    assert "restart 3 of 3" in errors
    assert errors.rstrip().endswith("ArithmeticError: the worker has had enough")
    assert "worker-0 died for good (exit code 1, 3 restarts)" in (run.run_dir / "logs" / "launcher.log").read_text()
    assert run.alive() == []


def test_a_trainer_is_restarted_twice(launch):
    run = launch({"trainer": "fail"})
    code, errors = run.finish()
    assert (code, len(run.started("trainer"))) == (1, 3)
    assert "the trainer has had enough" in errors
    assert run.alive() == []


def test_a_part_that_cannot_run_its_config_is_not_tried_again(launch):
    run = launch({"buffer": "misconfigured"})
    code, errors = run.finish()
    assert (code, len(run.started("buffer"))) == (1, 1)
    assert "megatron-sao: the buffer cannot run this" in errors
    assert run.alive() == []


def test_a_killed_engine_is_replaced_and_what_it_started_is_killed(launch):
    run = launch({"engine": "detach"})
    run.wait_for(engine_child=1, trainer=1)
    old = run.alive()
    [engine], [child] = run.started("engine"), run.started("engine-child")
    os.kill(engine, signal.SIGKILL)
    run.wait_for(engine_child=2)
    deadline = time.monotonic() + 60
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.05)  # it has been killed, and dies when it gets its turn on a core
    gone = [name for name in old if name not in run.alive()]
    assert sorted(name.split(".")[0] for name in gone) == ["engine", "engine-child"]


@pytest.mark.parametrize(
    ("number", "expected", "word"), [(signal.SIGINT, 130, "stubborn"), (signal.SIGTERM, 143, "sleep")]
)
def test_a_signal_stops_everything_within_seconds_even_what_ignores_it(launch, number, expected, word):
    run = launch({"buffer": word, "engine": f"detach {word}", "trainer": word})
    run.wait_for(buffer=1, engine_child=1, trainer=1, worker=1)
    began = time.monotonic()
    run.process.send_signal(number)
    code, errors = run.finish()
    assert code == expected, errors
    assert time.monotonic() - began < 60  # 11 s by themselves; the parts would go on for 300
    assert run.alive() == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_sigusr1_ends_the_run_when_the_trainer_has_its_checkpoint(launch, ranks):
    run = launch({"trainer": "stoppable"}, world_size=ranks, nproc_per_node=ranks)
    run.wait_for(buffer=1, engine=1, worker=1, trainer=ranks)
    run.process.send_signal(signal.SIGUSR1)
    code, errors = run.finish()
    assert code == 75, errors
    assert "stopped at a checkpoint" in errors
    assert len(run.started("trainer")) == ranks, "it is not started again"
    assert run.alive() == []


def test_a_run_directory_in_use_or_with_other_settings_is_refused(launch):
    first = launch({})
    first.wait_for(trainer=1, worker=1)
    code, errors = launch({}).finish()
    assert code == 2 and "belongs to a run in progress" in errors
    first.process.terminate()
    first.finish()
    (first.run_dir / "metrics.jsonl").write_text("{}\n")  # else nothing has come of it, and its settings may change
    before = len(list(first.pids.iterdir()))
    code, errors = launch({}, max_tokens_per_microbatch=7).finish()
    assert code == 2 and "parallel.max_tokens_per_microbatch = 7 now, but 8192 in" in errors
    assert len(list(first.pids.iterdir())) == before


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_process_outlives_a_launcher_killed_with_9(launch, ranks):
    run = launch({}, world_size=ranks, nproc_per_node=ranks)
    run.wait_for(buffer=1, engine=1, worker=1, trainer=ranks)
    children = psutil.Process(run.process.pid).children(recursive=True)
    assert len(children) >= 4
    run.process.kill()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert [process for process in alive if is_running(process.pid)] == []


@pytest.mark.slow  # torchrun imports torch three times over, for each of three starts
def test_a_failed_ranks_last_words_are_its_own_and_not_torchruns(launch):
    run = launch({"trainer": "fail"}, world_size=2, nproc_per_node=2)
    code, errors = run.finish(150)
    assert code == 1
    assert re.search(r"trainer died for good \(rank [01] exit code 1, 2 restarts\)", errors)
    assert errors.rstrip().endswith("ArithmeticError: the trainer has had enough")


@pytest.mark.slow
def test_ranks_that_cannot_run_their_config_are_not_tried_again(launch):
    run = launch({"trainer": "misconfigured"}, world_size=2, nproc_per_node=2)
    code, errors = run.finish(150)
    assert (code, len(run.started("trainer"))) == (1, 2)
    assert errors.rstrip().endswith("megatron-sao: the trainer cannot run this")
