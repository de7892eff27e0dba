"""``status`` and ``inspect`` of a run whose buffer serves, and of the same run when it is gone."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megatron_sao.buffer.client import AsyncBufferClient, BufferClient
from megatron_sao.cli import main as cli
from megatron_sao.data.batches import RecordedBatches
from megatron_sao.report.trajectories import starting_point
from tests.system.buffer_process import TOKEN, Buffer
from tests.trajectories import make_trajectory

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def buffer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buffer]:
    """A buffer whose run has two batches of two, and one trajectory that waits."""
    buffer = Buffer(tmp_path_factory.mktemp("run"))
    (buffer.directory / "run.yaml").rename(buffer.directory / "config.yaml")
    (buffer.directory / "run.yaml").symlink_to("config.yaml")
    (buffer.directory / "token").write_text(TOKEN)
    buffer.start()
    trainer = buffer.client()
    trainer.register_trainer("test", 0)
    asyncio.run(_play(buffer, trainer))
    yield buffer
    buffer.kill()


async def _play(buffer: Buffer, trainer: BufferClient) -> None:
    client = AsyncBufferClient(buffer.url, TOKEN)
    await client.register_engine("engine-0", "http://127.0.0.1:1", 1)
    trainer.mark_engine("engine-0", "dirty", None, 1)
    trainer.mark_engine("engine-0", "clean", "1.0", 1)
    for played in range(5):
        if played in (2, 4):  # a batch must be asked for before more may be outstanding
            assert trainer.batch("rl", played // 2 - 1, 1, 2, 0, wait=5.0)
        (lease,) = await client.lease("w", 1, wait=5.0)
        trajectory = make_trajectory(
            id=f"t{played}",
            task_id=lease.task["id"],
            epoch=lease.epoch,
            attempt=lease.attempt,
            versions=[("1.0", 2, 6)],
        )
        assert await client.submit(trajectory) == "accepted"
    await client.close()


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert cli([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def test_the_status_of_a_live_run_names_its_engines_and_its_queue(buffer: Buffer, capsys) -> None:
    text = printed(capsys, "status", buffer.directory)
    assert f"running, buffer at {buffer.url}" in text
    assert "engine-0 at http://127.0.0.1:1: clean, weights 1.0, heartbeat" in text
    assert "1 trajectories wait for training, 0 episodes are played" in text
    assert TOKEN not in text


def test_a_trajectory_and_a_batch_are_put_into_words(buffer: Buffer, capsys) -> None:
    text = printed(capsys, "inspect", buffer.directory, "--trajectory", "t0")
    assert "trajectory  t0, train" in text
    assert "reward      1, ended by itself" in text
    assert "weights     1.0 for tokens 2–5" in text
    assert "── action (tokens 2–3, mean log-prob -0.75)\n[3][4]\n" in text  # there is no tokenizer here
    assert "── action (tokens 5–5, mean log-prob -0.25, reward 1)\n[6]" in text
    text = printed(capsys, "inspect", buffer.directory, "--batch", "rl-1")
    assert "batch rl-1: 2 trajectories, 12 tokens, 6 of them actions; mean reward 1" in text
    assert [line.split()[0] for line in text.splitlines()[2:]] == ["t2", "t3"]
    text = printed(capsys, "inspect", buffer.directory)
    assert "5 trajectories: 4 train assigned, 1 train stored" in text
    assert "2 batches: rl 0–1" in text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--trajectory", "x"], "there is no trajectory 'x'"),
        (["--batch", "rl-7"], "--batch rl-7 is not held; the buffer has rl 0–1"),
        (["--batch", "seven"], "'seven' names no step; write it as STAGE-STEP"),
    ],
)
def test_what_is_not_there_is_a_sentence(buffer: Buffer, capsys, arguments: list[str], sentence: str) -> None:
    assert cli(["inspect", str(buffer.directory), *arguments]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("held", "stage", "step", "start"),
    [
        (["sft-9", "value-0", "rl-4", "rl-6"], "rl", 5, "rl-4"),
        (["sft-9", "value-0"], "rl", 0, "value-0"),
        (["sft-9"], "value", 0, "sft-9"),
        (["rl-4", "rl-6"], "rl", 2, "rl-4"),
        ([], "value", 0, None),
    ],
)
def test_training_on_exported_batches_starts_from_the_newest_checkpoint_before_them(
    held: list[str], stage: str, step: int, start: str | None
) -> None:
    assert starting_point(held, stage, step) == start


def test_exported_batches_are_the_buffers_and_the_same_when_the_buffer_is_gone(
    buffer: Buffer, capsys, tmp_path: Path
) -> None:
    (buffer.directory / "checkpoints" / "rl-0").mkdir(parents=True)
    (buffer.directory / "checkpoints" / "rl-0" / "meta.json").write_text("{}")
    text = printed(capsys, "inspect", buffer.directory, "--export-batches", tmp_path / "two words")
    assert "exported rl 0–1" in text and "from the checkpoint rl-0 on" in text
    assert (
        f"megatron-sao train {buffer.directory}/config.yaml --run-dir NEW_RUN --batches '{tmp_path}/two words'" in text
    )
    live = RecordedBatches(tmp_path / "two words")
    assert live.steps("rl") == [0, 1]
    batch = live.batch("rl", 0)
    assert [trajectory.id for trajectory in batch] == ["t0", "t1"]
    np.testing.assert_array_equal(batch[0].logprobs, make_trajectory().logprobs)

    overview = printed(capsys, "inspect", buffer.directory)
    buffer.kill()
    assert "no buffer answers" in printed(capsys, "status", buffer.directory)
    assert printed(capsys, "inspect", buffer.directory) == overview
    printed(capsys, "inspect", buffer.directory, "--export-batches", tmp_path / "offline")
    assert subprocess.run(["diff", "-r", tmp_path / "two words", tmp_path / "offline"], check=False).returncode == 0
