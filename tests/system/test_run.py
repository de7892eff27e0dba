"""The whole system on this machine: real Megatron-Core, real SGLang, the buffer, workers, weight pushes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_sao.config import load_config
from megatron_sao.models.backend import Backend
from tests.system.replay import Offline, assert_every_trajectory_was_trained_once, recorded
from tests.system.runs import EVAL_PROMPTS, STEPS, evaluations, read_events, steps_done, write_config
from tools.make_tiny_model import main as make_tiny_model

pytestmark = [pytest.mark.system, pytest.mark.timeout(1200)]

START_SECONDS = 600  # half a minute of imports in each of six processes, on cores that others may use as well


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model and data."""
    path = tmp_path_factory.mktemp("demo") / "tiny"
    make_tiny_model(["--out", str(path)])
    return path


def start(config: Path, run_dir: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "megatron_sao.cli", "run", str(config), "--run-dir", str(run_dir)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(condition: Any, launcher: subprocess.Popen[str], seconds: float, what: str, every: float = 0.1) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert launcher.poll() is None, f"the run ended while waiting for {what}:\n{launcher.stdout.read()[-3000:]}"
        assert time.monotonic() < deadline, f"no {what} within {seconds} s"
        time.sleep(every)


def descendants(launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(launcher.pid).children(recursive=True)


def running(name: str, launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    """Descendants whose command line (or title, as SGLang's children set it) has ``name`` as a word."""
    found = []
    for process in descendants(launcher):
        try:
            if name in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def documented_metrics(section: str) -> set[str]:
    """The names in the tables of a section of docs/metrics.md, but for the patterns (``env/NAME``)."""
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    (part,) = (part for part in text.split("\n## ") if part.startswith(section))
    rows = [line.split("|")[1] for line in part.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([a-z_/]+)`", row)}


def test_a_run_trains_evaluates_and_serves_exactly_what_it_trained(tiny: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    launcher = start(write_config(tmp_path, tiny, routing_replay=True, max_staleness=2), run_dir)
    wait_for(lambda: steps_done(run_dir), launcher, START_SECONDS, "first step")
    family = descendants(launcher)
    output, _ = launcher.communicate(timeout=240)
    assert launcher.returncode == 0, output[-3000:]
    assert not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    assert steps_done(run_dir) == list(range(STEPS))
    assert sorted(evaluations(run_dir)) == [0, 3, STEPS]
    for evaluation in evaluations(run_dir).values():
        assert evaluation["eval/prompts"] == EVAL_PROMPTS
        assert evaluation["mismatch/tokens"] >= 1000
        assert evaluation["mismatch/mean_abs_logprob_diff"] < 1e-5
    steps = [e for e in read_events(run_dir) if e["stage"] == "rl" and "train/policy_loss" in e]
    assert max(e["staleness/max"] for e in steps) <= 2
    assert max(e["staleness/max"] for e in steps) >= 1, "rollouts must run ahead of training"
    assert max(e["version/spans_max"] for e in steps) >= 2, "weights must change while trajectories are in flight"
    patterns = ("env/", "staleness/count_", "dis/rho_bin_")
    event_keys = {"time", "stage", "step"}
    for section, events in (("Every step", steps), ("Evaluations", evaluations(run_dir).values())):
        timing = {"time/step", "idle_fraction"}  # documented with the steps, logged with every event
        for event in events:
            logged = {name for name in event if not name.startswith(patterns)} - event_keys
            assert logged - timing == documented_metrics(section) - timing
    assert (run_dir / "hf" / "model.safetensors").is_file()
    assert list((run_dir / "tensorboard").iterdir())

    again = start(run_dir.parent / "config.yaml", run_dir)
    output, _ = again.communicate(timeout=START_SECONDS)
    assert again.returncode == 0, output[-3000:]
    assert "is complete" in output
    assert len([e for e in read_events(run_dir) if "train/policy_loss" in e]) == STEPS, "a finished run does no step"


def test_kill_9_of_any_process_is_survived_or_leaves_nothing_behind(tiny: Path, tmp_path: Path, world: Backend) -> None:
    """Worker, buffer, SGLang and trainer are replaced, the trainer twice; the launcher takes all others with it and the
    run resumes. What the trainer did in its four lives is what it does offline, without a break, on the same batches.
    """
    run_dir = tmp_path / "run"
    config = write_config(tmp_path, tiny, max_staleness=3, steps=60, keep=1000)
    launcher = start(config, run_dir)

    def kill(name: str) -> None:
        (process, *_) = running(name, launcher)
        process.kill()
        done = len(read_events(run_dir))
        wait_for(lambda: len(read_events(run_dir)) > done + 1, launcher, 180, f"events after killing {name}")

    try:
        wait_for(lambda: steps_done(run_dir), launcher, START_SECONDS, "first step")
        for victim in ("rollout", "buffer", "sglang::scheduler", "train"):
            kill(victim)
        wait_for(lambda: any((run_dir / "checkpoints").glob("*.tmp")), launcher, 180, "save", every=0.002)
        kill("train")
        family = descendants(launcher)
        assert len(family) >= 6
    finally:
        os.kill(launcher.pid, 9)
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not [p.cmdline() for p in alive if p.status() != psutil.STATUS_ZOMBIE]

    done = steps_done(run_dir)
    launcher = start(config, run_dir)
    wait_for(
        lambda: max(steps_done(run_dir)) > max(done), launcher, START_SECONDS, "step after the restart of everything"
    )
    launcher.send_signal(signal.SIGINT)
    stopped = time.monotonic()
    output, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == 130, output[-3000:]
    assert time.monotonic() - stopped < 60  # 11 s by themselves, however little the parts heed it
    assert steps_done(run_dir) == list(range(max(steps_done(run_dir)) + 1)), "no step is left out"
    assert all(e["mismatch/mean_abs_logprob_diff"] < 1e-5 for e in evaluations(run_dir).values())

    settings = load_config(run_dir / "config.yaml")
    found = recorded(run_dir, settings)
    assert_every_trajectory_was_trained_once(found)
    offline = Offline(settings, found, tmp_path / "offline", world)
    offline.assert_versions_name_the_weights(found)
    offline.assert_same_weights_and_metrics(run_dir)
