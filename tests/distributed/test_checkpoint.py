"""Checkpoints that are damaged, interrupted, too big for the disk, or written while training goes on."""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from megatron_sao.config import RunConfig
from megatron_sao.models.backend import Backend
from megatron_sao.trainer import checkpoint, checkpoint_files
from megatron_sao.trainer.checkpoint import CheckpointError
from megatron_sao.trainer.loop import run_rl
from megatron_sao.trainer.main import Run
from megatron_sao.weights.load import HFTensors
from tests.distributed.offline import RL_STEPS, assert_same_checkpoint, offline_config, read_metrics

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def finished(world: Backend, llama: Path, batches: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of an uninterrupted run; it keeps rl-2 and rl-4."""
    run_dir = tmp_path_factory.mktemp("finished")
    Run(offline_config(llama), run_dir, batches, world).run()
    return run_dir


@pytest.fixture
def run_dir(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run whose newest checkpoint is being resumed from."""
    shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "hf")
    (tmp_path / "run" / "metrics.jsonl").unlink()
    return tmp_path / "run"


def assert_same_training(run_dir: Path, finished: Path, steps: set[int]) -> None:
    """The steps' metrics and the exported weights equal those of the uninterrupted run, bit for bit."""
    expected, resumed = read_metrics(finished), read_metrics(run_dir)
    assert set(resumed) == {("rl", step) for step in steps}
    assert all(resumed[key] == expected[key] for key in resumed)
    theirs, ours = HFTensors(finished / "hf"), HFTensors(run_dir / "hf")
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs.names())


def the_shard(checkpoint: Path) -> Path:
    (shard,) = checkpoint.glob("*.distcp")
    return shard


def truncate(checkpoint: Path) -> Path:
    os.truncate(the_shard(checkpoint), the_shard(checkpoint).stat().st_size // 2)
    return the_shard(checkpoint)


def flip(path: Path) -> Path:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return path


def delete(path: Path) -> Path:
    path.unlink()
    return path


DAMAGES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "truncated shard": (truncate, r"has \d+ bytes, not the \d+ that were written"),
    "flipped bit in a shard": (lambda c: flip(the_shard(c)), r"has the CRC-32 \w+, not the \w+"),
    "missing rank file": (lambda c: delete(the_shard(c)), r"cannot be read \(No such file"),
    "flipped bit in Megatron's metadata": (lambda c: flip(c / ".metadata"), r"has the CRC-32"),
    "flipped bit in meta.json": (lambda c: flip(c / "meta.json"), r"(cannot be read|is not what was written)"),
    "missing extra.json": (lambda c: delete(c / "extra.json"), r"cannot be read"),
    "missing meta.json": (lambda c: delete(c / "meta.json"), r"that is no complete checkpoint"),
    "missing altogether": (lambda c: shutil.rmtree(c) or c, r"that is no complete checkpoint"),
}


@pytest.mark.parametrize(("harm", "sentence"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(
    harm: Callable[[Path], Path],
    sentence: str,
    world: Backend,
    llama: Path,
    batches: Path,
    run_dir: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    harmed = harm(run_dir / "checkpoints" / "rl-4")
    with caplog.at_level(logging.ERROR):
        run = Run(offline_config(llama), run_dir, batches, world)
    assert str(run.checkpoints.newest) == (run_dir / "checkpoints" / "latest").read_text().strip() == "rl-2"
    (message,) = [record.getMessage() for record in caplog.records if record.name == checkpoint.__name__]
    assert "names rl-4" in message and "FALLS BACK TO THE CHECKPOINT rl-2" in message
    assert re.search(sentence, message), message
    assert str(harmed) in message or "no complete checkpoint" in sentence
    event = read_metrics(run_dir)["rl", 2]
    assert (event["checkpoint/fallback"], event["checkpoint/fallback_reason"]) == (1, message)


def test_training_from_the_checkpoint_before_a_damaged_one_repeats_its_steps_bit_for_bit(
    world: Backend, llama: Path, batches: Path, finished: Path, run_dir: Path
) -> None:
    truncate(run_dir / "checkpoints" / "rl-4")
    Run(offline_config(llama), run_dir, batches, world).run()
    assert_same_training(run_dir, finished, {2, 3})
    intact = Run(offline_config(llama), run_dir, batches, world).checkpoints
    assert str(intact.newest) == "rl-4", "the damaged one has been replaced"


def test_without_an_intact_checkpoint_a_run_does_not_begin_again_from_the_start(
    world: Backend, llama: Path, batches: Path, run_dir: Path
) -> None:
    for name in ("rl-2", "rl-4"):
        flip(the_shard(run_dir / "checkpoints" / name))
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be used: .*rl-4/.*; .*rl-2/.*restore"):
        Run(offline_config(llama), run_dir, batches, world)
    shutil.rmtree(run_dir / "checkpoints" / "rl-2")
    shutil.rmtree(run_dir / "checkpoints" / "rl-4")
    with pytest.raises(CheckpointError, match=r"there is none.*names 'rl-4'"):
        Run(offline_config(llama), run_dir, batches, world)


@pytest.mark.parametrize("content", [None, "", "rl-"], ids=["missing", "empty", "torn"])
def test_a_lost_pointer_is_replaced_by_one_to_the_newest_complete_checkpoint(
    content: str | None, world: Backend, llama: Path, batches: Path, run_dir: Path
) -> None:
    pointer = run_dir / "checkpoints" / "latest"
    pointer.unlink() if content is None else pointer.write_text(content)
    assert str(Run(offline_config(llama), run_dir, batches, world).checkpoints.newest) == "rl-4"
    assert pointer.read_text() == "rl-4\n"


@contextmanager
def full_disk(file_bytes: int) -> Iterator[None]:
    """No file may grow beyond ``file_bytes``: the kernel refuses the write as it does on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_a_full_disk_ends_the_save_with_a_sentence_and_leaves_the_checkpoints_as_they_were(
    asynchronous: bool, world: Backend, llama: Path, batches: Path, finished: Path, run_dir: Path
) -> None:
    (run_dir / "checkpoints" / "latest").write_text("rl-2\n")
    config = offline_config(llama, checkpoint={"save_interval": 2, "asynchronous": asynchronous})
    stage = Run(config, run_dir, batches, world)._rl_stage(2)
    before = contents(run_dir / "checkpoints")
    sentence = r"cannot write the checkpoint .*rl-3\.tmp.*GB are free.*from .* rl-2"
    with pytest.raises(CheckpointError, match=sentence), full_disk(file_bytes=100_000):
        stage.save("rl", 3)
        stage.finish_save(wait=True)
    assert contents(run_dir / "checkpoints") == before
    Run(config, run_dir, batches, world).run()
    assert_same_training(run_dir, finished, {2, 3})


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


class Killed(BaseException):
    """Ends a save where kill -9 would: nothing in the product catches it. (test_exact_resume.py really kills.)"""


def killed(*_: object, **__: object) -> None:
    raise Killed


@pytest.mark.parametrize("interrupted", ["sync", "write_meta", "publish", "write_atomically"])
def test_an_interrupted_save_leaves_the_previous_checkpoint_to_resume_from(
    interrupted: str,
    world: Backend,
    llama: Path,
    batches: Path,
    finished: Path,
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (run_dir / "checkpoints" / "latest").write_text("rl-2\n")
    stage = Run(offline_config(llama), run_dir, batches, world)._rl_stage(2)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(checkpoint_files, interrupted, killed)
        stage.save("rl", 3)
    names = {path.name for path in (run_dir / "checkpoints").iterdir()}
    assert names == {"rl-2", "rl-4", "latest", "rl-3" if interrupted == "write_atomically" else "rl-3.tmp"}
    resumed = Run(offline_config(llama), run_dir, batches, world)
    assert str(resumed.checkpoints.newest) == "rl-2"
    resumed.run()
    assert_same_training(run_dir, finished, {2, 3})
    assert {path.name for path in (run_dir / "checkpoints").iterdir()} == {"rl-2", "rl-4", "latest"}


def half_deleted(path: Path, **_: object) -> None:
    if path.exists():
        (path / "extra.json").unlink()
        raise Killed


@pytest.mark.parametrize("interrupted", ["deleting the old one", "renaming the new one"])
def test_replacing_the_only_checkpoint_by_one_of_its_own_position_never_leaves_none(
    interrupted: str, world: Backend, llama: Path, batches: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = offline_config(llama, checkpoint={"save_interval": 2, "keep": 1})
    shutil.rmtree(run_dir / "checkpoints" / "rl-2")
    stage = Run(config, run_dir, batches, world)._rl_stage(4)
    rename = Path.rename
    with monkeypatch.context() as patch, pytest.raises(Killed):
        if interrupted == "deleting the old one":
            patch.setattr(shutil, "rmtree", half_deleted)
        else:
            patch.setattr(Path, "rename", lambda path, to: killed() if path.suffix == ".tmp" else rename(path, to))
        stage.save("rl", 4)
    again = Run(config, run_dir, batches, world)
    assert str(again.checkpoints.newest) == "rl-4"
    again._rl_stage(4).save("rl", 4)
    assert {path.name for path in (run_dir / "checkpoints").iterdir()} == {"rl-4", "latest"}


def test_an_asynchronous_save_holds_what_was_there_when_it_began_and_is_committed_when_it_is_complete(
    world: Backend, llama: Path, batches: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer is held back until two more steps are done."""
    released = threading.Event()
    write = checkpoint._Writing._write
    monkeypatch.setattr(checkpoint._Writing, "_write", lambda self: released.wait(60) and write(self))
    config: RunConfig = offline_config(llama, checkpoint={"save_interval": 2, "asynchronous": True})
    released.set()
    run = Run(config, tmp_path / "run", batches, world)
    run._run_stage("value", 0, 2)
    released.clear()
    stage = run._rl_stage(0)
    commits: list[tuple[str, int]] = []
    monkeypatch.setattr(stage.source, "commit", lambda *position: commits.append(position))
    batch = stage.source.batch

    def watched(kind: str, step: int, *rest: object, **named: object) -> object:
        if step == 3:
            assert str(run.checkpoints.newest) == "rl-0" and not commits
            released.set()
        return batch(kind, step, *rest, **named)

    monkeypatch.setattr(stage.source, "batch", watched)
    run_rl(stage, RL_STEPS, 0)
    assert commits == [("rl", 0), ("rl", 2)]
    (tmp_path / "run" / "checkpoints" / "latest").write_text("rl-2\n")
    shutil.rmtree(tmp_path / "run" / "hf")
    (tmp_path / "run" / "metrics.jsonl").unlink()
    Run(config, tmp_path / "run", batches, world).run()
    assert_same_training(tmp_path / "run", finished, {2, 3})


def two_ranks(model: Path, batches: Path, out: Path, what: str) -> subprocess.CompletedProcess[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    walk = [*torchrun, "-m", "tests.distributed.walk_asynchronous_saves", str(model), str(batches), str(out), what]
    return subprocess.run(walk, capture_output=True, text=True, timeout=280, check=False)


def test_a_rank_killed_in_an_asynchronous_save_leaves_the_checkpoint_before_it_and_the_run_goes_on_alike(
    glm4_moe: Path, batches: Path, tmp_path: Path
) -> None:
    """Pipeline stages write different files; the run beside it saves synchronously and is never interrupted."""
    killed = two_ranks(glm4_moe, batches, tmp_path, "die")
    assert "exitcode: -9" in killed.stderr, killed.stderr[-3000:]
    checkpoints = tmp_path / "killed" / "checkpoints"
    assert list((checkpoints / "rl-2.tmp").glob("__1_*.distcp")), "the rank's own files are there"
    assert (checkpoints / "latest").read_text() == "rl-0\n"
    assert not (checkpoints / "rl-2").exists()
    resumed = two_ranks(glm4_moe, batches, tmp_path, "go_on")
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    lines = [json.loads(line) for line in (tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["stage"] == "rl"].count(0) == 2, "it went on from rl-0"
    for name in ("rl-2", "rl-4"):
        assert_same_checkpoint(checkpoints / name, tmp_path / "whole" / "checkpoints" / name)
    assert read_metrics(tmp_path / "killed") == read_metrics(tmp_path / "whole")
