import re
from pathlib import Path

import msgpack
import numpy as np
import pytest

from megatron_sao.data.batches import BatchesError, RecordedBatches, write_batch
from megatron_sao.data.trajectory import Support, Trajectory, TrajectoryError
from tests.trajectories import make_trajectory


def repacked(**changes):
    """The wire bytes of a good trajectory with some entries replaced; "REMOVE" removes one."""
    message = msgpack.unpackb(make_trajectory().encode()) | changes
    return msgpack.packb({key: value for key, value in message.items() if value != "REMOVE"})


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_a_decoded_trajectory_equals_the_encoded_one_in_every_field(dtype):
    sent = make_trajectory(routed_experts=np.arange(12, dtype=dtype).reshape(6, 1, 2), group="g")
    received = Trajectory.decode(sent.encode())
    for name, value in vars(sent).items():
        if isinstance(value, np.ndarray):
            assert getattr(received, name).dtype == value.dtype
            np.testing.assert_array_equal(getattr(received, name), value)
        else:
            assert getattr(received, name) == value
    assert received.encode() == sent.encode()


SUPPORT = Support.of([[3, 4], [4], [2, 6, 5]])  # of the three action tokens 3, 4 and 6


def test_the_support_of_truncated_sampling_travels_and_passes_the_door():
    received = Trajectory.decode(make_trajectory(support=SUPPORT).encode()).validate(vocab_size=7, max_tokens=6)
    assert received.support.padded().tolist() == [[3, 4, -1], [4, -1, -1], [2, 6, 5]]


@pytest.mark.parametrize(
    ("support", "message"),
    [
        ([[3], [4]], "support: 2 counts that sum to 2 do not fit 3 action tokens"),
        ([[3], [], [6]], "support: 3 counts"),
        ([[3], [4], [7, 6]], r"support\[2\]: 7 is outside the vocabulary"),
        ([[3], [5], [6]], r"support\[1\]: 4 was sampled, but is not in its own support"),
    ],
)
def test_a_support_that_cannot_be_is_refused(support, message):
    with pytest.raises(TrajectoryError, match=message):
        make_trajectory(support=Support.of(support)).validate(vocab_size=7, max_tokens=6)


def test_a_support_that_is_not_two_arrays_is_refused():
    with pytest.raises(TrajectoryError, match="support: expected null or"):
        Trajectory.decode(repacked(support=[b""]))


def test_arrays_travel_as_raw_little_endian_bytes():
    message = msgpack.unpackb(make_trajectory(token_ids=np.array([1, 2, 3, 4, 5, 256], np.int32)).encode())
    assert message["token_ids"][:4] == b"\x01\0\0\0"
    assert message["token_ids"][-4:] == b"\0\x01\0\0"
    assert message["schema"] == 1


def test_counts_and_reward_are_those_of_the_action_tokens():
    trajectory = make_trajectory()
    assert (trajectory.num_tokens, trajectory.num_action_tokens, trajectory.total_reward) == (6, 3, 1.0)
    assert trajectory.action_versions == {"1.0", "1.1"}


def test_a_good_trajectory_passes_the_door_unchanged():
    trajectory = make_trajectory()
    assert trajectory.validate(vocab_size=7, max_tokens=6) is trajectory


def array(dtype, *values):
    return np.array(values, dtype)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "test"}, "kind: 'test'"),
        ({"id": ""}, "id: is empty"),
        *(({"id": id}, "id: no URL can name") for id in (".", "..", "a\nb", "a\x7f")),
        ({"failure": ""}, "failure: is empty"),
        ({"epoch": -1}, "epoch: -1"),
        ({"metrics": {"x": float("inf")}}, r"metrics\[x\]"),
        ({"loss_mask": array(np.uint8, 0, 1)}, r"loss_mask: has shape \(2,\)"),
        ({"token_ids": array(np.int32, 1, 2, 3, 4, 5, 7)}, r"token_ids\[5\]: 7 is outside the vocabulary"),
        ({"token_ids": array(np.int32, 1, -1, 3, 4, 5, 6)}, r"token_ids\[1\]: -1"),
        ({"loss_mask": array(np.uint8, 0, 0, 2, 1, 0, 1)}, r"loss_mask\[2\]: 2"),
        ({"loss_mask": array(np.uint8, 1, 0, 1, 1, 0, 1)}, r"loss_mask\[0\]"),
        ({"loss_mask": array(np.uint8, 0, 0, 0, 0, 0, 0)}, "loss_mask: has no action token"),
        ({"logprobs": array(np.float32, 0, 0, np.nan, -1, 0, -1)}, r"logprobs\[2\]: nan"),
        ({"logprobs": array(np.float32, 0, 0, -1, 0.002, 0, -1)}, r"logprobs\[3\]: 0.002"),
        ({"logprobs": array(np.float32, 0, -1, -1, -1, 0, -1)}, r"logprobs\[1\]: .* off the loss mask"),
        ({"rewards": array(np.float32, 0, 0, 0, 0, 1, 0)}, r"rewards\[4\]: .* off the loss mask"),
        ({"rewards": array(np.float32, 0, 0, 0, 0, 0, np.inf)}, r"rewards\[5\]: inf"),
        ({"versions": [("1.0", 2, 4)]}, r"versions\[5\]: .* no recorded version"),
        ({"versions": [("default", 2, 6)]}, r"versions\[0\]: 'default'"),
        ({"versions": [("1.0", 2, 7)]}, r"versions\[0\]: \[2, 7\)"),
        ({"versions": [("1.0", 2, 5), ("1.1", 4, 6)]}, r"versions\[1\]"),
        ({"turns": [("speech", 0, 2)]}, r"turns\[0\]: 'speech'"),
        ({"turns": [("prompt", 2, 2)]}, r"turns\[0\]"),
    ],
)
def test_the_door_names_field_and_index_of_what_is_wrong(changes, message):
    with pytest.raises(TrajectoryError, match="^" + message):
        make_trajectory(**changes).validate(vocab_size=7, max_tokens=6)


def test_a_trajectory_over_the_token_limit_is_refused():
    with pytest.raises(TrajectoryError, match="6 tokens exceed the limit of 5"):
        make_trajectory().validate(vocab_size=7, max_tokens=5)


def test_tiny_positive_logprobs_become_zero_and_minus_infinity_passes():
    trajectory = make_trajectory(logprobs=array(np.float32, 0, 0, 1e-4, -np.inf, 0, -1))
    cleaned = trajectory.validate(7, 6)
    np.testing.assert_array_equal(cleaned.logprobs, array(np.float32, 0, 0, 0, -np.inf, 0, -1))
    assert cleaned.logprobs.dtype == np.float32
    assert trajectory.logprobs[2] > 0


def test_a_failed_trajectory_may_have_no_action_token_or_no_token_at_all():
    off = np.zeros(6, np.float32)
    idle = make_trajectory(failure="sandbox", loss_mask=off.astype(np.uint8), logprobs=off, rewards=off)
    assert idle.validate(7, 6).num_action_tokens == 0
    none = np.zeros(0, np.float32)
    empty = make_trajectory(
        failure="sandbox",
        token_ids=none.astype(np.int32),
        loss_mask=none.astype(np.uint8),
        logprobs=none,
        rewards=none,
        versions=[],
        turns=[],
    )
    assert empty.validate(7, 6).num_tokens == 0


def test_versions_may_go_back_after_a_failover():
    trajectory = make_trajectory(versions=[("2.7", 2, 4), ("1.9", 5, 6)])
    assert trajectory.validate(7, 6).action_versions == {"2.7", "1.9"}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xc1", "body"),
        (b"", "body"),
        (make_trajectory().encode() + b"\0", "body"),
        (msgpack.packb([1]), "schema: found 'list'"),
        (repacked(schema=2), "schema: found 2"),
        (repacked(turns="REMOVE"), "turns: is missing"),
        (repacked(surprise=1), "surprise: is not a field"),
        (repacked(epoch=True), "epoch: has type bool"),
        (repacked(created_at=1), "created_at: has type int"),
        (repacked(support=[]), "support"),
        (repacked(metrics={"x": "1"}), r"metrics\[x\]"),
        (repacked(token_ids=[1, 2]), "token_ids: expected raw bytes"),
        (repacked(logprobs=b"123"), "logprobs: expected raw bytes"),
        (repacked(versions=[["1.0", 2, 4], ["1.0", 4]]), r"versions\[1\]"),
        (repacked(turns=7), "turns: expected a list"),
        (repacked(routed_experts=["|u1", [2], b"\0\0\0\0"]), "routed_experts: shape"),
        (repacked(routed_experts=["<i4", [1], b"\0\0\0\0"]), r"routed_experts: expected null or \[\|u1 or <u2"),
        (repacked(routed_experts=[b""]), "routed_experts: expected"),
    ],
)
def test_decoding_refuses_whatever_is_not_exactly_the_format(data, message):
    with pytest.raises(TrajectoryError, match="^" + message):
        Trajectory.decode(data)


def test_encoding_never_casts_an_array_silently():
    with pytest.raises(TrajectoryError, match="token_ids: has dtype int64, expected int32"):
        make_trajectory(token_ids=np.arange(6)).encode()


def test_recorded_batches_come_back_in_order_and_know_their_steps(tmp_path):
    first = [make_trajectory(id="x"), make_trajectory(id="a/b")]
    write_batch(tmp_path, "rl", 10, [make_trajectory(id="z")])
    write_batch(tmp_path, "rl", 2, first)
    write_batch(tmp_path, "value", 0, first)
    recorded = RecordedBatches(tmp_path)
    assert recorded.stages() == ["value", "rl"]
    assert recorded.steps("rl") == [2, 10]
    assert [trajectory.id for trajectory in recorded.batch("rl", 2)] == ["x", "a/b"]
    assert recorded.batch("rl", 2)[0].encode() == first[0].encode()


def test_recorded_batches_say_what_is_missing_or_broken(tmp_path):
    with pytest.raises(BatchesError, match=r"holds no manifest.json"):
        RecordedBatches(tmp_path)
    write_batch(tmp_path, "rl", 0, [make_trajectory()])
    with pytest.raises(BatchesError, match=r"no batch for stage 'rl', step 1; recorded: \[0\]"):
        RecordedBatches(tmp_path).batch("rl", 1)
    (tmp_path / "rl" / "0" / "0.msgpack").write_bytes(b"\xc1")
    with pytest.raises(BatchesError, match=r"0.msgpack is not a readable trajectory"):
        RecordedBatches(tmp_path).batch("rl", 0)
    write_batch(tmp_path, "rl", 0, [make_trajectory()])
    (tmp_path / "rl" / "0" / "0.msgpack").write_bytes(make_trajectory(id="other").encode())
    with pytest.raises(BatchesError, match="holds the trajectory 'other'"):
        RecordedBatches(tmp_path).batch("rl", 0)
    (tmp_path / "manifest.json").write_text('{"schema": 1}')
    with pytest.raises(BatchesError, match="not a manifest"):
        RecordedBatches(tmp_path)


def test_the_docs_describe_every_field_of_the_wire_format():
    text = (Path(__file__).parents[2] / "docs" / "buffer.md").read_text()
    rows = text.split("| key | type | what it is |")[1].split("\n\n")[0].splitlines()
    described = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1] if "|" in row else "")}
    assert described | {"schema"} == set(msgpack.unpackb(make_trajectory().encode()))
