"""A trainer killed with -9 at every point of its step, against the real buffer: nothing is lost, nothing differs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_sao.buffer.client import Lease
from megatron_sao.config import RunConfig
from megatron_sao.data.batches import write_batch
from megatron_sao.data.trajectory import Trajectory
from tests.distributed.offline import assert_same_checkpoint, offline_config, random_trajectory, read_metrics
from tests.system.buffer_process import TOKEN, Buffer, on_async
from tests.system.killed_trainer import POINTS
from tests.tiny_models import write_llama

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

VALUE_STEPS, RL_STEPS, BATCH = 2, 24, 4
NAMES = list(POINTS)
# The first lives are in the value stage; the last of them ends in the first RL step. Then all points, and those of a
# save once more while it goes on beside the training.
VALUE_STAGE = ["batch assigned, the answer lost", "after the values", "between the critic steps", "before the rename"]
LIVES = [(name, False) for name in (*VALUE_STAGE, "before the policy step", *NAMES)]
LIVES += [(name, True) for name in NAMES[NAMES.index("the shards written") :]]


def make_config(directory: Path) -> RunConfig:
    optimizer = {"lr": 1e-3, "warmup_steps": 1}
    return offline_config(
        write_llama(directory / "llama"),
        name="test",
        data={"train": str(directory / "train.jsonl")},
        value={"steps": VALUE_STEPS, "batch_size": BATCH, "optimizer": optimizer},
        rl={
            "steps": RL_STEPS, "batch_size": BATCH, "max_staleness": RL_STEPS + VALUE_STEPS,
            "policy_optimizer": optimizer, "critic_optimizer": optimizer,
        },
    )  # fmt: skip


def fill(buffer: Buffer) -> dict[str, Trajectory]:
    """Have every trajectory of the run submitted, as played under the first trainer's weights. By id."""
    trainer = buffer.client()
    incarnation = trainer.register_trainer("test", 0)
    on_async(buffer, lambda client: client.register_engine("gone", "http://127.0.0.1:9", 1))
    trainer.mark_engine("gone", "dirty", None, incarnation)
    trainer.mark_engine("gone", "clean", f"{incarnation}.0", incarnation)
    rng = np.random.default_rng(1)
    wanted = (VALUE_STEPS + RL_STEPS) * BATCH

    def played(lease: Lease) -> Trajectory:
        length = int(rng.integers(3, 40))
        return random_trajectory(
            rng, f"v{lease.visit_id}", length, run_id="test", task_id=lease.task["id"], epoch=lease.epoch,
            attempt=lease.attempt,
        )  # fmt: skip

    async def play(client: Any) -> list[Trajectory]:
        leases = await client.lease("w", wanted, 5.0)
        trajectories = [played(lease) for lease in leases]
        for trajectory in trajectories:
            assert await client.submit(trajectory) == "accepted"
        return trajectories

    trajectories = {trajectory.id: trajectory for trajectory in on_async(buffer, play)}
    assert len(trajectories) == wanted
    return trajectories


class Trainer:
    """The lives of one killed_trainer process."""

    def __init__(self, buffer: Buffer, log: Path) -> None:
        self.log = log
        env = os.environ | {"MEGATRON_SAO_BUFFER": buffer.url, "MEGATRON_SAO_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.system.killed_trainer", str(buffer.directory / "run.yaml")]
        with log.open("w") as stderr:
            self.process = subprocess.Popen(
                command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True
            )

    def live(
        self, run_dir: Path, kill: str | None = None, asynchronous: bool = False, batches: Path | None = None
    ) -> dict[str, int]:
        """How the life ended."""
        order = {"run_dir": str(run_dir), "kill": kill, "batches": batches and str(batches)}
        order["asynchronous"] = asynchronous
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, self.log.read_text()[-3000:]
        return json.loads(answer)


@pytest.fixture
def buffer(tmp_path: Path) -> Iterator[Buffer]:
    buffer = Buffer(tmp_path, make_config(tmp_path))
    buffer.start()
    yield buffer
    buffer.kill()


def test_a_trainer_killed_at_any_point_ends_with_the_weights_and_metrics_of_one_that_never_was(
    buffer: Buffer, tmp_path: Path
) -> None:
    """One run through all the points: each life resumes what the one before it left. Whatever the buffer served for a
    step it serves for that step again, and an uninterrupted run over those batches comes to the same bits."""
    trajectories = fill(buffer)
    run_dir = tmp_path / "killed"
    run_dir.mkdir()
    (run_dir / "run_id").write_text("test\n")  # the buffer's
    trainer = Trainer(buffer, tmp_path / "trainer.log")
    try:
        wait_until_down(buffer, "gone")
        resumed_at = []
        for kill, asynchronous in LIVES:
            latest = run_dir / "checkpoints" / "latest"
            resumed_at.append(latest.read_text().strip() if latest.exists() else "the start")
            ended = trainer.live(run_dir, kill, asynchronous)
            assert ended == {"signal": signal.SIGKILL}, f"{kill}, {resumed_at}:\n{trainer.log.read_text()[-3000:]}"
        assert trainer.live(run_dir) == {"code": 0}, trainer.log.read_text()[-3000:]
        served = read_served(run_dir)
        assert sorted(id for ids in served.values() for id in ids) == sorted(trajectories), "each exactly once"
        for (stage, step), ids in served.items():
            write_batch(tmp_path / "batches", stage, step, [trajectories[id] for id in ids])
        assert trainer.live(tmp_path / "whole", batches=tmp_path / "batches") == {"code": 0}
    finally:
        trainer.process.kill()
        trainer.process.wait()
    assert len(set(resumed_at)) >= 10, resumed_at
    assert_same_metrics(run_dir, tmp_path / "whole")
    assert_same_checkpoint(*(d / "checkpoints" / f"rl-{RL_STEPS}" for d in (run_dir, tmp_path / "whole")))


def wait_until_down(buffer: Buffer, engine: str) -> None:
    """The trainer pushes weights to every engine that the registry has heard of lately."""
    while next(e.state for e in buffer.client().engines() if e.id == engine) != "down":
        time.sleep(0.2)


def read_served(run_dir: Path) -> dict[tuple[str, int], list[str]]:
    """Trajectory ids per (stage, step), the same at every time it was asked for."""
    served: dict[tuple[str, int], list[str]] = {}
    for line in (run_dir / "served.jsonl").read_text().splitlines():
        stage, step, ids = json.loads(line)
        assert served.setdefault((stage, step), ids) == ids
    assert list(served) == sorted(served, key=lambda key: (key[0] == "rl", key[1])), "in the order of training"
    return served


def assert_same_metrics(run_dir: Path, whole: Path) -> None:
    """Every line that any life wrote equals the uninterrupted run's for that step; a live run's has more in it."""
    expected = read_metrics(whole)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert {(line["stage"], line["step"]) for line in lines} == set(expected)
    assert len(lines) > len(expected), "some steps were trained again"
    for line in lines:
        for name, value in expected[line["stage"], line["step"]].items():
            # Only a live run can tell version 0 of one incarnation from that of another.
            if not (name.startswith("lag/") and line["step"] == 0):
                assert line[name] == value, (line["stage"], line["step"], name)
