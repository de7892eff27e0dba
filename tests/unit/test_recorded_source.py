"""Recorded batches meet the same door as those of a live run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_sao.data.batches import BatchesError, write_batch
from megatron_sao.data.trajectory import Trajectory
from megatron_sao.trainer.source import RecordedSource
from tests.trajectories import make_trajectory

pytestmark = pytest.mark.unit


def read(directory: Path, batch: list[Trajectory], size: int, group_size: int = 1, **limits: int) -> list[Trajectory]:
    """The batch as it comes back for step 3 of RL, where ``size`` trajectories are expected."""
    write_batch(directory, "rl", 3, batch)
    source = RecordedSource(directory, **{"vocab_size": 10, "max_tokens": 6} | limits, group_size=group_size)
    return source.batch("rl", 3, size, policy_version=3)


def grouped(*labels: str | None) -> list[Trajectory]:
    return [make_trajectory(id=str(index), group=label) for index, label in enumerate(labels)]


def test_a_valid_batch_comes_back_in_order(tmp_path: Path) -> None:
    batch = read(tmp_path, grouped("a", "b", "b", "a"), size=4, group_size=2)
    assert [trajectory.id for trajectory in batch] == ["0", "1", "2", "3"]


def test_float_noise_above_log_1_is_cut_as_at_the_buffers_door(tmp_path: Path) -> None:
    logprobs = np.array([0, 0, 5e-4, -1.0, 0, -0.25], np.float32)
    (trajectory,) = read(tmp_path, [make_trajectory(logprobs=logprobs)], size=1)
    assert trajectory.logprobs[2] == 0


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"vocab_size": 6}, r"rl/3/1\.msgpack .*token_ids\[5\]: 6 is outside the vocabulary \[0, 6\)"),
        ({"max_tokens": 5}, r"rl/3/0\.msgpack .*6 tokens exceed the limit of 5 \(rollout\.max_tokens\)"),
    ],
)
def test_a_trajectory_that_the_buffer_would_refuse_is_refused_with_its_file(
    tmp_path: Path, limits: dict[str, int], message: str
) -> None:
    small = make_trajectory(token_ids=np.array([1, 2, 3, 4, 5, 5], np.int32))
    with pytest.raises(BatchesError, match=message):
        read(tmp_path, [small, make_trajectory()], size=2, **limits)


def test_a_batch_of_another_size_is_refused_with_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(BatchesError, match=r"rl/3 holds 2 trajectories for stage 'rl', step 3, but rl\.batch_size = 4"):
        read(tmp_path, grouped("a", "a"), size=4)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (("a", "a", "a", "b"), r"3 trajectories of the group 'a' for stage 'rl', step 3, but rl\.group_size = 2"),
        (("a", "a", "b", "c"), r"1 trajectories of the group 'b'"),
        ((None, None, "a", "a"), r"2 trajectories of the group None"),
    ],
)
def test_incomplete_and_overfull_groups_are_refused(tmp_path: Path, labels: tuple[str | None], message: str) -> None:
    with pytest.raises(BatchesError, match=message):
        read(tmp_path, grouped(*labels), size=4, group_size=2)


def test_without_groups_their_labels_do_not_matter(tmp_path: Path) -> None:
    assert len(read(tmp_path, grouped("a", None, "a"), size=3)) == 3
