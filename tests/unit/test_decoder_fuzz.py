"""Whatever bytes arrive, the decoder returns a trajectory or says in one sentence why it is none."""

import contextlib
import math
import tracemalloc
from dataclasses import fields
from unittest.mock import patch

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sao.buffer.admission import admit
from megatron_sao.data import trajectory as trajectory_module
from megatron_sao.data.trajectory import Support, Trajectory, TrajectoryError
from tests.trajectories import make_config, make_trajectory

GOOD = make_trajectory().encode()
NAMES = [field.name for field in fields(Trajectory)] + ["schema"]
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8)
    | st.binary(max_size=40) | st.just(msgpack.Timestamp(0, 0)) | st.just(msgpack.ExtType(7, b"x")),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


def assert_decoded_or_refused(data: bytes) -> None:
    """What the buffer does with a body. Anything but a TrajectoryError ends a request with a 500."""
    with patch.object(trajectory_module, "MAX_LOOSE_BYTES", 0), contextlib.suppress(TrajectoryError):
        Trajectory.decode(data)  # as if it were large
        raise AssertionError("there is no trajectory without a byte beside its arrays")
    try:
        trajectory = Trajectory.decode(data).validate(vocab_size=7, max_tokens=100)
    except TrajectoryError as error:
        assert len(str(error)) < 1000
        return
    assert Trajectory.decode(trajectory.encode()).token_ids.tolist() == trajectory.token_ids.tolist()


@given(st.binary(max_size=300))
@settings(max_examples=300)
def test_random_bytes(data):
    assert_decoded_or_refused(data)


@given(
    st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=6), st.integers(0, 9)
)
@settings(max_examples=600)
def test_damaged_trajectories(changes, cut):
    data = bytearray(GOOD)
    for index, value in changes:
        data[index] = value
    assert_decoded_or_refused(bytes(data[: len(data) - cut]))


@given(st.dictionaries(st.sampled_from(NAMES), JUNK, min_size=1, max_size=3))
@settings(max_examples=400)
def test_well_formed_messages_with_other_values(changes):
    assert_decoded_or_refused(msgpack.packb(msgpack.unpackb(GOOD) | changes))


@given(JUNK)
@settings(max_examples=300)
def test_other_messages(message):
    assert_decoded_or_refused(msgpack.packb(message))


@pytest.mark.parametrize(
    "data",
    [
        b"\x91" * 100_000,  # lists in lists
        b"\xdd\x7f\xff\xff\xff" * 50_000,  # lists of two thousand million
        b"\xdf\x7f\xff\xff\xff" * 50_000,  # maps of as many
        b"\xdb\xff\xff\xff\xff" + b"x" * 1000,  # text of four thousand million
        b"\xc9\xff\xff\xff\xff\x01" + b"x" * 1000,
        GOOD + GOOD,
        b"",
    ],
)
def test_announced_sizes_buy_no_memory(data):
    tracemalloc.start()
    with pytest.raises(TrajectoryError):
        Trajectory.decode(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 * len(data) + 2**20


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"created_at": math.nan}, "created_at"),
        ({"sampling": {"temperature": math.inf}}, "sampling[temperature]"),
        ({"sampling": {"temperature": "hot"}}, "sampling[temperature]"),
        ({"id": "x" * 513}, "id"),
        ({"failure": "x" * 5000}, "failure"),
        ({"metrics": {str(i): 1.0 for i in range(1000)}}, "metrics"),
        ({"logprobs": np.array([0, 0, np.nan, 0, 0, 0], np.float32)}, "logprobs[2]"),
        ({"rewards": np.array([0, 0, np.inf, 0, 0, 0], np.float32)}, "rewards[2]"),
        ({"token_ids": np.array([1, 2, 3, -4, 5, 6], np.int32)}, "token_ids[3]"),
        ({"logprobs": np.zeros(5, np.float32)}, "logprobs"),
        ({"loss_mask": np.zeros(7, np.uint8)}, "loss_mask"),
    ],
)
def test_what_would_reach_the_trainer_as_nonsense_is_refused_by_name(changes, field):
    with pytest.raises(TrajectoryError) as caught:
        make_trajectory(**changes).validate(vocab_size=7, max_tokens=100)
    assert str(caught.value).startswith(f"{field}:")


@pytest.mark.parametrize(
    ("config", "changes", "complaint"),
    [
        ({}, {"sampling": {"temperature": 0.5}}, "sampling: temperature 0.5 is not the 1"),
        ({}, {"sampling": {}}, "sampling: temperature None"),
        ({"sampling": {"temperature": 0.5}}, {"kind": "eval", "sampling": {"temperature": 0.5}}, "is not the 1 of"),
        ({"sampling": {"top_k": 2}}, {}, "support: is missing"),
        ({}, {"support": Support.of([[3], [4], [6]])}, "support: is recorded"),
    ],
)
def test_what_the_trainer_would_end_the_run_over_is_refused_at_the_door(tmp_path, config, changes, complaint):
    rollout = {"environment": "package.module:Class", "max_tokens": 100} | config
    body = make_trajectory(**changes).encode()
    with pytest.raises(TrajectoryError, match=complaint):
        admit(body, make_config(tmp_path, rollout=rollout), vocab_size=7)
    failed = make_trajectory(**changes, failure="sandbox crashed")
    assert admit(failed.encode(), make_config(tmp_path, rollout=rollout), vocab_size=7)[0].id == "t"


NESTED = b"\xdc\xff\xff" + b"\x90" * (2**16 - 1)  # a list of empty lists: 64 times as large once decoded


@pytest.mark.parametrize("field", ["token_ids", "versions", "support", "routed_experts", "sampling", "no field"])
@pytest.mark.parametrize("wrapped", ["as it is", "in a pair", "behind an array"])
def test_a_large_body_of_small_things_is_refused_before_it_is_decoded(field, wrapped):
    many = b"\xdc" + (70).to_bytes(2, "big") + NESTED * 70
    value = {"as it is": many, "in a pair": b"\x92\xa1x" + many, "behind an array": b"\x92\xc4\x04abcd" + many}[wrapped]
    fields_of_it = msgpack.unpackb(GOOD) | {field: "PLACE"}
    body = msgpack.packb(fields_of_it).replace(b"\xa5PLACE", value)
    assert len(body) > 4 * 2**20
    tracemalloc.start()
    with pytest.raises(TrajectoryError, match=r"^body: more than \d+ of its bytes are in none of its arrays"):
        Trajectory.decode(body)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * len(body)
    for end in (2**22 + 1, len(body) - 1):
        with pytest.raises(TrajectoryError, match=r"is not one msgpack message|in none of its arrays"):
            Trajectory.decode(body[:end])


@pytest.mark.parametrize("shape", [[1] * 65, [2**31 - 1] * 60_000, [], [1, 1]])
def test_a_shape_has_three_sizes(shape):
    body = msgpack.packb(msgpack.unpackb(GOOD) | {"routed_experts": ["|u1", shape, b"x"]})
    with pytest.raises(TrajectoryError, match=r"routed_experts: shape is not \[tokens, MoE layers, top_k\]"):
        Trajectory.decode(body)


@pytest.mark.parametrize(
    "changes",
    [
        {"schema": "v" * 10**6},
        {"v" * 10**6: 0},
        {"versions": [["v" * 10**6, 2, 6]]},
        {"turns": [["v" * 10**6, 0, 2]]},
        {"metrics": {"v" * 10**6: "w"}},
    ],
    ids=["schema", "no field", "versions", "turns", "metrics"],
)
def test_what_a_refusal_quotes_is_short(changes):
    with pytest.raises(TrajectoryError) as refusal:
        Trajectory.decode(msgpack.packb(msgpack.unpackb(GOOD) | changes)).validate(vocab_size=7, max_tokens=100)
    assert len(str(refusal.value)) <= 1000


def test_one_long_row_of_a_support_makes_none_of_the_others_long():
    length = 2000
    mask = np.arange(length) >= 1
    counts = np.ones(length - 1, np.int32)
    counts[0] = 100_000
    ids = np.ones(counts.sum(), np.int32)
    long = make_trajectory(
        token_ids=np.ones(length, np.int32), loss_mask=mask.astype(np.uint8), logprobs=-mask.astype(np.float32),
        rewards=np.zeros(length, np.float32), versions=[("1.0", 1, length)], turns=[], support=Support(counts, ids),
    )  # fmt: skip
    tracemalloc.start()
    long.validate(vocab_size=7, max_tokens=length)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 * ids.nbytes
    ids[-1] = 2
    with pytest.raises(TrajectoryError, match=rf"support\[{length - 2}\]: 1 was sampled, but is not in its own"):
        long.validate(vocab_size=7, max_tokens=length)


def test_a_body_is_as_large_as_its_arrays():
    length = 2**20
    mask = np.arange(length) >= 1
    ones = np.ones(length - 1, np.int32)
    long = make_trajectory(
        token_ids=np.ones(length, np.int32), loss_mask=mask.astype(np.uint8), logprobs=-mask.astype(np.float32),
        rewards=np.zeros(length, np.float32), versions=[("1.0", 1, length)],
        turns=[("prompt", 0, 1), ("action", 1, length)],
        routed_experts=np.zeros((length, 2, 2), np.uint8), support=Support(ones, ones),
    )  # fmt: skip
    assert Trajectory.decode(long.encode()).num_tokens == length
