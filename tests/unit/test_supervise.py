"""What the supervisor makes of the ends of its parts, over parts whose exit codes are written down beforehand."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_sao.config import RunConfig, parse_config
from megatron_sao.launch import supervise
from megatron_sao.launch.process import EXIT_CONFIG, EXIT_STOPPED, SupervisedProcess
from megatron_sao.launch.supervise import Parts, Supervisor


class Scripted(SupervisedProcess):
    """Ends with each of ``codes`` in turn, one start after the other, and then runs on."""

    def __init__(self, name: str, folder: Path, codes: list[int], max_restarts: int = 1) -> None:
        super().__init__(name, [], {}, folder, max_restarts)
        self.codes, self.starts, self.asked = codes, 0, []

    def start(self) -> None:
        self.starts += 1
        self.log.touch()

    def exit_code(self) -> int | None:
        return self.codes[self.starts - 1] if 0 < self.starts <= len(self.codes) else None

    def terminate(self) -> None:
        self.asked.append("terminate")

    def stop_at_checkpoint(self) -> None:
        self.asked.append("checkpoint")
        self.codes = [EXIT_STOPPED] * self.starts


class Slow(Scripted):
    """Makes no checkpoint, whoever asks."""

    def stop_at_checkpoint(self) -> None:
        self.asked.append("checkpoint")


@pytest.fixture
def config() -> RunConfig:
    sections = {"model": {"path": "m"}, "data": {"train": "t"}, "rollout": {"environment": "none:None"}}
    return parse_config({"name": "run", **sections})


@pytest.fixture(autouse=True)
def contained(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The test process is nobody's launcher: it neither adopts nor kills processes, and gets its handlers back."""
    monkeypatch.setattr(supervise, "adopt_orphans", lambda: None)
    monkeypatch.setattr(supervise, "kill_descendants", lambda spare=(): None)
    monkeypatch.setattr(supervise, "POLL_SECONDS", 0.001)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    handlers = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., Parts]:
    (tmp_path / "logs").mkdir()

    def parts(
        trainer: list[int], engines: tuple[list[int], ...] = ([],), kind: type[Scripted] = Scripted, **others: list[int]
    ) -> Parts:
        logs = tmp_path / "logs"
        return Parts(
            Scripted("buffer", logs, others.get("buffer", [])),
            kind("trainer", logs, trainer),
            [Scripted(f"engine-{index}", logs, codes) for index, codes in enumerate(engines)],
            [Scripted("worker-0", logs, others.get("worker", []))],
        )

    return parts


def test_the_run_goes_on_without_an_engine_but_not_without_the_last(config, build, tmp_path, capsys):
    parts = build([], ([1, 1], [1] * 2))
    assert Supervisor(config, tmp_path, parts).run() == 1
    errors = capsys.readouterr().err
    assert errors.count("the run goes on without it") == 1
    assert errors.count("died for good") == 2
    assert [engine.starts for engine in parts.engines] == [2, 2]


def test_an_engine_that_cannot_run_its_config_ends_the_run(config, build, tmp_path, capsys):
    parts = build([], ([EXIT_CONFIG], []))
    assert Supervisor(config, tmp_path, parts).run() == 1
    assert parts.engines[0].starts == 1
    assert "the run goes on" not in capsys.readouterr().err


def test_a_stopped_trainer_is_not_started_again_and_the_buffer_is_stopped_last(config, build, tmp_path, monkeypatch):
    order: list[str] = []
    monkeypatch.setattr(Scripted, "terminate", lambda self: order.append(self.name))
    parts = build([EXIT_STOPPED])
    assert Supervisor(config, tmp_path, parts).run() == EXIT_STOPPED
    assert parts.trainer.starts == 1
    assert order[-1] == "buffer" and set(order) == {process.name for process in parts.all()}


def test_sigusr1_asks_the_trainer_once_for_a_checkpoint(config, build, tmp_path):
    parts = build([])
    supervisor = Supervisor(config, tmp_path, parts, lambda: send(signal.SIGUSR1) or 60.0)
    assert run_and(supervisor, signal.SIGUSR1) == EXIT_STOPPED
    assert parts.trainer.asked[0] == "checkpoint" and parts.trainer.asked.count("checkpoint") == 1
    assert supervisor.stop_requested


def test_a_trainer_that_makes_no_checkpoint_in_time_is_stopped_all_the_same(config, build, tmp_path, capsys):
    parts = build([], kind=Slow)
    assert run_and(Supervisor(config, tmp_path, parts, lambda: 0.05), signal.SIGUSR1) == EXIT_STOPPED
    assert "the trainer made no other in time (still at work)" in capsys.readouterr().err


def test_a_trainer_that_dies_of_the_stop_request_is_not_started_again(config, build, tmp_path):
    parts = build([], kind=Slow)
    parts.trainer.stop_at_checkpoint = lambda: setattr(parts.trainer, "codes", [-signal.SIGUSR1])
    assert run_and(Supervisor(config, tmp_path, parts), signal.SIGUSR1) == EXIT_STOPPED
    assert parts.trainer.starts == 1


def test_sigterm_stops_at_once_even_while_a_checkpoint_is_awaited(config, build, tmp_path):
    parts = build([], kind=Slow)
    supervisor = Supervisor(config, tmp_path, parts, lambda: send(signal.SIGTERM) or 60.0)
    assert run_and(supervisor, signal.SIGUSR1) == 128 + signal.SIGTERM


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def run_and(supervisor: Supervisor, number: int) -> int:
    """Run, and have the signal arrive when everything has been started."""
    trainer = supervisor._parts.trainer
    start = trainer.start
    trainer.start = lambda: (start(), send(number))
    return supervisor.run()


@pytest.mark.parametrize("chosen", [None, "0"])
def test_tensors_of_every_part_are_on_huge_pages_unless_the_user_says_otherwise(
    chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not offered.is_file() or "[madvise]" not in offered.read_text():
        pytest.skip("this kernel gives huge pages to all programs or to none, whatever they ask for")
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    if chosen is not None:
        monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", chosen)
    look = (
        "import torch; held = torch.ones(64 * 2**20, dtype=torch.uint8)\n"
        "print(next(l for l in open('/proc/self/smaps_rollup') if l.startswith('AnonHugePages')).split()[1])"
    )
    shown = subprocess.run(
        [sys.executable, "-c", look], env=supervise.part_environment("unused", "unused"),
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert (int(shown.stdout) >= 32 * 1024) == (chosen is None)
