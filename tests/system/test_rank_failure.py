"""Two ranks under torchrun as the launcher starts them, on recorded batches: one dies, hangs, or loses its files."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from megatron_sao.config import dump_config
from megatron_sao.data.batches import write_batch
from megatron_sao.launch.process import SupervisedRanks
from tests.distributed.offline import offline_config, random_trajectory, read_metrics
from tests.tiny_models import write_qwen3

pytestmark = [pytest.mark.system, pytest.mark.timeout(500)]

STEPS, BATCH = 16, 4
MANY_STEPS = 400  # it is not through with them when its checkpoint is seen, however late


def start(directory: Path) -> SupervisedRanks:
    run_dir = directory / "run"
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    options = ["--run-dir", str(run_dir), "--batches", str(directory / "batches")]
    trainer = SupervisedRanks(
        "trainer", 2, ["-m", "megatron_sao.cli", "train", str(directory / "run.yaml"), *options],
        os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}, run_dir / "logs",
    )  # fmt: skip
    trainer.start()
    return trainer


def rank_process(trainer: SupervisedRanks, rank: int) -> psutil.Process:
    ranks = psutil.Process(trainer.pid).children()
    return next(process for process in ranks if process.environ().get("RANK") == str(rank))


def write_inputs(directory: Path, steps: int = STEPS, **parallel: Any) -> None:
    """Recorded batches and the config of two pipeline stages: each has files of its own."""
    rng = np.random.default_rng(3)
    for step in range(steps):
        batch = [random_trajectory(rng, f"{step}-{i}", int(rng.integers(3, 60))) for i in range(BATCH)]
        write_batch(directory / "batches", "rl", step, batch)
    config = offline_config(
        write_qwen3(directory / "qwen3"),
        parallel={"world_size": 2, "nproc_per_node": 2, "pp": 2} | parallel,
        value={"steps": 0},
        rl={"steps": steps, "batch_size": BATCH},
    )
    (directory / "run.yaml").write_text(dump_config(config))


def wait_for_checkpoint(trainer: SupervisedRanks, run_dir: Path, name: str) -> None:
    deadline = time.monotonic() + 300
    while not (run_dir / "checkpoints" / name / "meta.json").exists():
        assert trainer.exit_code() is None and time.monotonic() < deadline, trainer.last_words()
        time.sleep(0.01)


def test_a_rank_killed_in_a_step_ends_the_job_and_is_named(tmp_path: Path) -> None:
    write_inputs(tmp_path, MANY_STEPS)
    trainer = start(tmp_path)
    wait_for_checkpoint(trainer, tmp_path / "run", "rl-4")
    rank_process(trainer, 1).kill()
    assert trainer.wait(time.monotonic() + 120), "the job outlives its rank"
    assert trainer.describe_exit().startswith("rank 1 killed by SIGKILL")


@pytest.mark.slow
def test_a_lost_file_of_one_rank_is_found_by_all_and_training_goes_on_from_the_checkpoint_before(
    tmp_path: Path,
) -> None:
    write_inputs(tmp_path)
    trainer = start(tmp_path)
    assert trainer.wait(time.monotonic() + 300) and trainer.exit_code() == 0, trainer.last_words()
    run_dir = tmp_path / "run"
    (lost,) = (run_dir / "checkpoints" / f"rl-{STEPS}").glob("__1_*.distcp")
    lost.unlink()
    (run_dir / "metrics.jsonl").unlink()
    again = start(tmp_path)
    assert again.wait(time.monotonic() + 300) and again.exit_code() == 0, again.last_words()
    log = again.log.read_text()
    assert f"{lost} cannot be read" in log and log.count("FALLS BACK") == 1, "rank 0 alone says so"
    assert set(read_metrics(run_dir)) == {("rl", STEPS - 2), ("rl", STEPS - 1)}


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_job_when_the_other_has_waited_long_enough(tmp_path: Path) -> None:
    write_inputs(tmp_path, MANY_STEPS, collective_timeout=30)
    trainer = start(tmp_path)
    wait_for_checkpoint(trainer, tmp_path / "run", "rl-4")
    rank_process(trainer, 1).suspend()
    assert trainer.wait(time.monotonic() + 30 + 30 + 60), "the timeout, then what torchrun gives the hung rank to stop"
    assert trainer.describe_exit() == "rank 0 exit code 1"
    assert "Timed out waiting" in trainer.last_words()
