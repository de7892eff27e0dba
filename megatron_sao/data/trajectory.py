"""The trajectory: one episode as token ids, with what the trainer needs to learn from it.

One wire format, versioned: a msgpack map whose arrays are raw little-endian bytes. Decoding is strict about
names and types; :meth:`Trajectory.validate` is the door of the buffer and is strict about the content.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import msgpack
import numpy as np

from megatron_sao.data.routing import RoutingShape

SCHEMA = 1
VERSION = re.compile(r"(0|[1-9]\d{0,17})\.(0|[1-9]\d{0,17})")  # incarnation.n
TURN_KINDS = ("prompt", "action", "observation")
TEXT_LIMITS = {"id": 512, "run_id": 512, "task_id": 1024, "group": 1100, "failure": 4096}  # characters
MAX_ENTRIES = 256  # of sampling, and of metrics
MAX_LOOSE_BYTES = 2**20  # of a body outside of its arrays: a byte of nested lists takes 64 in memory
POSITIVE_LOGPROB_LIMIT = 1e-3  # float noise around log 1; more is another quantity

_ARRAYS = {"token_ids": "<i4", "loss_mask": "|u1", "logprobs": "<f4", "rewards": "<f4"}
_MESSAGE_LIMIT = 1000
_BINARY = (b"\xc4", b"\xc5", b"\xc6")  # with which msgpack begins bytes
_PAIR_OR_TRIPLE = (b"\x92", b"\x93")  # and the lists that support and routed_experts are
_EXPERT_DTYPES = ("|u1", "<u2")
_SCALARS: dict[str, tuple[type, ...]] = {
    "id": (str,),
    "run_id": (str,),
    "task_id": (str,),
    "epoch": (int,),
    "attempt": (int,),
    "kind": (str,),
    "group": (str, type(None)),
    "sampling": (dict,),
    "truncated": (bool,),
    "failure": (str, type(None)),
    "metrics": (dict,),
    "created_at": (float,),
}


class TrajectoryError(ValueError):
    """A malformed trajectory; the message starts with ``field[index]:``. It has 1,000 characters at most."""

    def __init__(self, message: str) -> None:
        super().__init__(message if len(message) <= _MESSAGE_LIMIT else f"{message[: _MESSAGE_LIMIT - 1]}…")


class Support(NamedTuple):
    """Which ids truncated sampling could have drawn, per action token in order: ``ids`` int32 [sum of counts], of which
    the first ``counts[0]`` (int32 [num_action_tokens]) belong to the first action token, and so on."""

    counts: np.ndarray
    ids: np.ndarray

    @classmethod
    def of(cls, per_token: list[list[int]]) -> Support:
        counts = np.array([len(ids) for ids in per_token], np.int32)
        return cls(counts, np.array([id for ids in per_token for id in ids], np.int32))

    def padded(self) -> np.ndarray:
        """int32 [num_action_tokens, largest count], filled up with -1."""
        width = int(self.counts.max(initial=0))
        out = np.full((len(self.counts), width), -1, np.int32)
        out[np.arange(width) < self.counts[:, None]] = self.ids
        return out


def addressable(id: str) -> str:
    """``id``, if a URL's path can name it: clients resolve dots, and a route's match ends at a line break. Raises
    TrajectoryError."""
    if not id.isprintable() or id in (".", ".."):
        raise TrajectoryError(f"id: no URL can name {id!r}; use printable characters, and not '.' or '..'")
    return id


def parse_version(version: str) -> tuple[int, int]:
    """``"incarnation.n"`` as two ints. Raises TrajectoryError."""
    match = VERSION.fullmatch(version)
    if match is None:
        raise TrajectoryError(f"versions: {version!r} is not a weight version; expected 'incarnation.n' such as '1.20'")
    return int(match[1]), int(match[2])


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One episode. Positions count tokens of the whole sequence; spans are half-open.

    Args:
        epoch, attempt: of the visit's lease it was played under.
        kind: "train" or "eval".
        group: of sampling groups (baselines), else None.
        token_ids: int32 [L], prompt, actions and observations in order.
        loss_mask: uint8 [L], 1 where the rollout engine sampled the token.
        logprobs: float32 [L], behaviour log-probabilities (nats) where loss_mask is 1, else 0.
        rewards: float32 [L], on action tokens only.
        versions: (weight version "incarnation.n", start, end), covering the mask.
        turns: ("prompt" | "action" | "observation", start, end).
        sampling: temperature, top_p, top_k, ...
        support: of truncated sampling, else None; log-probabilities are over it.
        routed_experts: uint8 or uint16 [N, MoE layers, top_k], ids of the experts that the engine sent the first N <= L
            tokens to, those before every action token among them; else None.
        truncated: ended by a length or turn limit.
        failure: the environment's own failure, else None; such an episode is excluded from training.
        metrics: finite numbers to average.
        created_at: Unix time, seconds.
    """

    id: str
    run_id: str
    task_id: str
    epoch: int
    attempt: int
    kind: str
    group: str | None
    token_ids: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    rewards: np.ndarray
    versions: list[tuple[str, int, int]]
    turns: list[tuple[str, int, int]]
    sampling: dict[str, Any]
    support: Support | None
    routed_experts: np.ndarray | None
    truncated: bool
    failure: str | None
    metrics: dict[str, float]
    created_at: float

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_action_tokens(self) -> int:
        return int(np.count_nonzero(self.loss_mask))

    @property
    def total_reward(self) -> float:
        return float(self.rewards.sum(dtype=np.float64))

    @property
    def action_versions(self) -> set[str]:
        """The weight versions that action tokens were sampled under."""
        return {version for version, start, end in self.versions if self.loss_mask[start:end].any()}

    def validate(self, vocab_size: int, max_tokens: int, routing: RoutingShape | None = None) -> Trajectory:
        """Check the content.

        Args:
            vocab_size: of the model.
            max_tokens: ``rollout.max_tokens``.
            routing: of the model; None if it has no routed experts.

        Returns:
            The trajectory, with log-probabilities in (0, 1e-3] set to 0: a copy only if there were any.

        Raises:
            TrajectoryError: the first thing wrong, as ``field[index]: sentence``.
        """
        if self.kind not in ("train", "eval"):
            raise TrajectoryError(f"kind: {self.kind!r} is neither 'train' nor 'eval'")
        for name in ("id", "run_id", "task_id"):
            if not getattr(self, name):
                raise TrajectoryError(f"{name}: is empty")
        addressable(self.id)
        for name in ("epoch", "attempt"):
            if not 0 <= getattr(self, name) < 2**62:
                raise TrajectoryError(f"{name}: {getattr(self, name)} is outside [0, 2^62)")
        self._check_labels()
        self._check_arrays(vocab_size, max_tokens)
        for name in ("versions", "turns"):
            self._check_spans(name)
        self._check_cover()
        self._check_support(vocab_size)
        self._check_routing(routing)
        if self.logprobs.max(initial=0) <= 0:
            return self
        return replace(self, logprobs=np.where(self.logprobs > 0, np.float32(0), self.logprobs))

    def _check_labels(self) -> None:
        for name, limit in TEXT_LIMITS.items():
            if len(getattr(self, name) or "") > limit:
                raise TrajectoryError(f"{name}: has {len(getattr(self, name))} characters; the limit is {limit}")
        if self.failure == "":
            raise TrajectoryError("failure: is empty; null says that there was none")
        for name in ("sampling", "metrics"):
            entries = getattr(self, name)
            if len(entries) > MAX_ENTRIES:
                raise TrajectoryError(f"{name}: has {len(entries)} entries; the limit is {MAX_ENTRIES}")
            for key, value in entries.items():
                if type(value) not in (int, float) or not math.isfinite(value):
                    raise TrajectoryError(f"{name}[{key}]: {value!r:.100} is not a finite number")
        if not math.isfinite(self.created_at):
            raise TrajectoryError(f"created_at: {self.created_at} is not finite")

    def _check_arrays(self, vocab_size: int, max_tokens: int) -> None:
        length = self.num_tokens
        for name in _ARRAYS:
            array = getattr(self, name)
            if array.shape != (length,):
                raise TrajectoryError(f"{name}: has shape {array.shape}, but token_ids has {length} tokens")
        if length > max_tokens:
            raise TrajectoryError(f"token_ids: {length} tokens exceed the limit of {max_tokens} (rollout.max_tokens)")
        ids, logprobs, rewards = self.token_ids, self.logprobs, self.rewards
        # The extremes take one pass, and a NaN is one; what is wrong is looked for only where something is.
        if ids.min(initial=0) < 0 or ids.max(initial=0) >= vocab_size:
            _refuse("token_ids", ids, (ids < 0) | (ids >= vocab_size), f"is outside the vocabulary [0, {vocab_size})")
        _refuse("loss_mask", self.loss_mask, self.loss_mask > 1, "is neither 0 nor 1")
        off = self.loss_mask == 0
        if length and not off[0]:
            raise TrajectoryError("loss_mask[0]: is 1, but nothing precedes position 0, so it cannot have been sampled")
        if off.all() and self.failure is None:
            raise TrajectoryError("loss_mask: has no action token, and the trajectory is not marked as failed")
        if not logprobs.max(initial=0) <= POSITIVE_LOGPROB_LIMIT:
            _refuse("logprobs", logprobs, np.isnan(logprobs), "is not a log-probability")
            _refuse("logprobs", logprobs, logprobs > POSITIVE_LOGPROB_LIMIT, "is a log-probability above 0")
        _refuse("logprobs", logprobs, off & (logprobs != 0), "is off the loss mask, where it must be 0")
        if not -np.inf < rewards.min(initial=0) <= rewards.max(initial=0) < np.inf:
            _refuse("rewards", rewards, ~np.isfinite(rewards), "is not finite")
        _refuse("rewards", rewards, off & (rewards != 0), "is off the loss mask, where it must be 0")

    def _check_spans(self, name: str) -> None:
        end_of_last = 0
        for index, (label, start, end) in enumerate(getattr(self, name)):
            if not end_of_last <= start < end <= self.num_tokens:
                raise TrajectoryError(
                    f"{name}[{index}]: [{start}, {end}) is empty, overlaps its predecessor's end {end_of_last} "
                    f"or leaves [0, {self.num_tokens})"
                )
            if name == "turns" and label not in TURN_KINDS:
                raise TrajectoryError(f"turns[{index}]: {label!r} is none of {', '.join(TURN_KINDS)}")
            end_of_last = end

    def _check_cover(self) -> None:
        """Every action token has a version. Their order is free: failover and rollback are honest."""
        covered = np.zeros(self.num_tokens, bool)
        for index, (version, start, end) in enumerate(self.versions):
            if VERSION.fullmatch(version) is None:
                raise TrajectoryError(f"versions[{index}]: {version!r} is not 'incarnation.n' such as '1.20'")
            covered[start:end] = True
        _refuse("versions", self.token_ids, (self.loss_mask == 1) & ~covered, "was sampled under no recorded version")

    def _check_support(self, vocab_size: int) -> None:
        if self.support is None:
            return
        counts, ids = self.support
        if len(counts) != self.num_action_tokens or (counts < 1).any() or counts.sum(dtype=np.int64) != len(ids):
            raise TrajectoryError(
                f"support: {len(counts)} counts that sum to {counts.sum(dtype=np.int64)} do not fit "
                f"{self.num_action_tokens} action tokens and {len(ids)} ids"
            )
        _refuse("support", ids, (ids < 0) | (ids >= vocab_size), f"is outside the vocabulary [0, {vocab_size})")
        sampled = self.token_ids[self.loss_mask == 1]
        if len(sampled):  # row by row, but without a table: one long row would make all of them long
            own = np.logical_or.reduceat(ids == np.repeat(sampled, counts), np.cumsum(counts, dtype=np.int64) - counts)
            _refuse("support", sampled, ~own, "was sampled, but is not in its own support")

    def _check_routing(self, routing: RoutingShape | None) -> None:
        experts = self.routed_experts
        if experts is None:
            return
        if routing is None:
            raise TrajectoryError("routed_experts: are recorded, but the model has none")
        covered = len(experts) if experts.ndim else 0
        if covered > self.num_tokens or experts.shape[1:] != (len(routing.moe_layers), routing.top_k):
            raise TrajectoryError(
                f"routed_experts: has shape {experts.shape}; expected at most {self.num_tokens} tokens, "
                f"{len(routing.moe_layers)} MoE layers and top {routing.top_k}"
            )
        last = int(np.flatnonzero(self.loss_mask)[-1]) if self.num_action_tokens else 0
        if covered < last:
            raise TrajectoryError(f"routed_experts[{covered}]: is missing, but token {last} was sampled after it")
        for bad, why in (
            (experts >= routing.num_experts, f"is outside [0, {routing.num_experts})"),
            (np.diff(np.sort(experts, axis=-1), axis=-1) == 0, "has an expert twice"),
        ):
            if bad.any():
                token, layer = np.argwhere(bad)[0, :2]
                raise TrajectoryError(f"routed_experts[{token}, {layer}]: {experts[token, layer].tolist()} {why}")

    def encode(self) -> bytes:
        """The wire format. Raises TrajectoryError for an array of another dtype (never cast silently)."""
        message: dict[str, Any] = {"schema": SCHEMA}
        for name, dtype in _ARRAYS.items():  # first, so that a reader soon knows that little else is left
            message[name] = _raw(name, getattr(self, name), dtype)
        message |= {name: getattr(self, name) for name in _SCALARS}
        message["versions"] = [list(span) for span in self.versions]
        message["turns"] = [list(span) for span in self.turns]
        message["support"] = None if self.support is None else [_raw("support", part, "<i4") for part in self.support]
        experts = self.routed_experts
        message["routed_experts"] = None
        if experts is not None:
            dtype = "|u1" if experts.dtype == np.uint8 else "<u2"
            message["routed_experts"] = [dtype, list(experts.shape), _raw("routed_experts", experts, dtype)]
        return msgpack.packb(message)

    @staticmethod
    def decode(data: bytes | memoryview) -> Trajectory:
        """The inverse of :meth:`encode`. Raises TrajectoryError for anything that is not exactly the format."""
        try:
            loose = len(data) > MAX_LOOSE_BYTES and _is_loose(data)
            message = None if loose else msgpack.unpackb(data)
        except (ValueError, msgpack.UnpackException) as error:
            raise TrajectoryError(f"body: is not one msgpack message: {str(error) or type(error).__name__}") from None
        if loose:
            raise TrajectoryError(f"body: more than {MAX_LOOSE_BYTES} of its bytes are in none of its arrays")
        if not isinstance(message, dict) or message.get("schema") != SCHEMA:
            found = message.get("schema") if isinstance(message, dict) else type(message).__name__
            raise TrajectoryError(f"schema: found {found!r}; this reader knows {SCHEMA}")
        expected = {field.name for field in fields(Trajectory)} | {"schema"}
        if message.keys() != expected:
            odd = sorted(map(str, message.keys() ^ expected))
            raise TrajectoryError(f"{odd[0]}: is {'missing' if odd[0] in expected else 'not a field'}")
        del message["schema"]
        for name, types in _SCALARS.items():
            if type(message[name]) not in types:
                raise TrajectoryError(f"{name}: has type {type(message[name]).__name__}, expected {types[0].__name__}")
        for name, value in message["metrics"].items():
            if type(name) is not str or type(value) not in (int, float):
                raise TrajectoryError(f"metrics[{name}]: has type {type(value).__name__}, expected a number")
        for name, dtype in _ARRAYS.items():
            message[name] = _array(name, message[name], dtype)
        for name in ("versions", "turns"):
            message[name] = _spans(name, message[name])
        message["support"] = _support(message["support"])
        message["routed_experts"] = _experts(message["routed_experts"])
        return Trajectory(**message)


def _refuse(name: str, values: np.ndarray, bad: np.ndarray, why: str) -> None:
    if bad.any():
        index = int(np.argmax(bad))
        raise TrajectoryError(f"{name}[{index}]: {values[index]} {why}")


def _is_loose(data: bytes | memoryview) -> bool:
    """Whether more than MAX_LOOSE_BYTES of a body are in none of its arrays, found without decoding or copying it.
    Raises what msgpack raises."""
    view = memoryview(data)
    beginning = msgpack.Unpacker()
    beginning.feed(view[:8])
    num_fields, position, loose = beginning.read_map_header(), beginning.tell(), 0
    if num_fields > MAX_ENTRIES:
        return True  # no trajectory
    for _ in range(2 * num_fields):  # names are values like any other
        if loose + len(view) - position <= MAX_LOOSE_BYTES:
            return False
        values = 1
        if view[position : position + 1] in _PAIR_OR_TRIPLE:
            values, position = view[position] & 0x0F, position + 1
        for _ in range(values):
            end, is_array = _end(view, position)
            loose += 0 if is_array else end - position
            position = end
            if loose > MAX_LOOSE_BYTES:
                return True
    return loose + len(view) - position > MAX_LOOSE_BYTES


def _end(view: memoryview, start: int) -> tuple[int, bool]:
    """Where the msgpack value ends that begins at ``start``, and whether it is bytes."""
    if view[start : start + 1] in _BINARY:
        width = 1 << _BINARY.index(bytes(view[start : start + 1]))
        end = start + 1 + width + int.from_bytes(view[start + 1 : start + 1 + width], "big")
        if end > len(view):
            raise msgpack.OutOfData
        return end, True
    window = 2**8
    while True:
        unpacker = msgpack.Unpacker()
        unpacker.feed(view[start : start + window])
        try:
            unpacker.skip()
            return start + unpacker.tell(), False
        except msgpack.OutOfData:
            if start + window >= len(view):
                raise
            if window > MAX_LOOSE_BYTES:
                return start + window, False
            window *= 16


def _raw(name: str, array: np.ndarray, dtype: str) -> bytes:
    if array.dtype != np.dtype(dtype).newbyteorder("="):
        raise TrajectoryError(f"{name}: has dtype {array.dtype}, expected {np.dtype(dtype).name}")
    return np.ascontiguousarray(array, dtype).tobytes()


def _array(name: str, raw: Any, dtype: str) -> np.ndarray:
    itemsize = np.dtype(dtype).itemsize
    if type(raw) is not bytes or len(raw) % itemsize:
        raise TrajectoryError(f"{name}: expected raw bytes, a multiple of {itemsize}")
    return np.frombuffer(raw, dtype).astype(np.dtype(dtype).newbyteorder("="), copy=False)


def _spans(name: str, raw: Any) -> list[tuple[str, int, int]]:
    if type(raw) is not list:
        raise TrajectoryError(f"{name}: expected a list of [text, start, end]")
    for index, span in enumerate(raw):
        if type(span) is not list or [type(part) for part in span] != [str, int, int]:
            raise TrajectoryError(f"{name}[{index}]: expected [text, start, end]")
    return [tuple(span) for span in raw]


def _support(raw: Any) -> Support | None:
    if raw is None:
        return None
    if type(raw) is not list or len(raw) != 2:
        raise TrajectoryError("support: expected null or [counts, ids] as bytes")
    return Support(*(_array("support", part, "<i4") for part in raw))


def _experts(raw: Any) -> np.ndarray | None:
    if raw is None:
        return None
    if type(raw) is not list or len(raw) != 3 or raw[0] not in _EXPERT_DTYPES or type(raw[1]) is not list:
        raise TrajectoryError(f"routed_experts: expected null or [{' or '.join(_EXPERT_DTYPES)}, shape, bytes]")
    dtype, shape, data = raw
    flat = _array("routed_experts", data, dtype)
    if len(shape) != 3 or any(type(size) is not int or not 0 <= size < 2**31 for size in shape):
        raise TrajectoryError("routed_experts: shape is not [tokens, MoE layers, top_k]")
    if math.prod(shape) != flat.size:
        raise TrajectoryError(f"routed_experts: shape {shape} does not hold {flat.size} values")
    return flat.reshape(shape)
