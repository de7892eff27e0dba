"""What the registry is told around a push, and which engines are pushed to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
import torch

from megatron_sao.buffer.client import BufferError, EngineInfo
from megatron_sao.config import ParallelConfig
from megatron_sao.models.backend import Backend
from megatron_sao.trainer.fleet import EngineFleet
from megatron_sao.trainer.world import World
from megatron_sao.weights.publish import Receiver

pytestmark = pytest.mark.unit


@dataclass
class Registry:
    """In place of the buffer: engines by id, and every mark in order."""

    by_id: dict[str, EngineInfo] = field(default_factory=dict)
    log: list[tuple[str, ...]] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)  # registered anew while they were pushed to

    def engines(self) -> list[EngineInfo]:
        return list(self.by_id.values())

    def mark_engine(self, id: str, state: str, version: str | None, incarnation: int) -> None:
        if id not in self.by_id:
            raise BufferError(404, "no such engine")
        if state == "clean" and id in self.lost:
            raise BufferError(409, "registered anew")
        self.by_id[id] = replace(self.by_id[id], state=state, version=version)
        self.log.append((state, id))


class Pusher:
    """In place of a WeightPusher: fails the engines in ``broken``."""

    def __init__(self, log: list[tuple[str, ...]]) -> None:
        self.log, self.broken, self.forgotten, self.fresh = log, set(), [], []

    def forget(self, keys: list[str]) -> None:
        self.forgotten += keys

    def push(self, receivers: list[Receiver], version: str) -> dict[str, str]:
        self.log.append(("push", version, *(receiver.id for receiver in receivers)))
        self.fresh = [receiver.id for receiver in receivers if receiver.fresh]
        return {receiver.key: "broken" for receiver in receivers if receiver.id in self.broken}


@pytest.fixture
def fleet(world: Backend) -> EngineFleet:
    registry = Registry()
    here = World.current(torch.device("cpu"), ParallelConfig())
    made = EngineFleet(registry, Pusher(registry.log), 3, 7, here, resident=nullcontext)
    for id in ("a", "b"):
        registry.by_id[id] = EngineInfo(id, f"http://{id}", "dirty", None, 1, 0.0)
    return made


def test_engines_are_dirty_during_a_push_and_a_failed_one_stays_so(fleet: EngineFleet) -> None:
    registry, pusher = fleet._client, fleet._pusher
    pusher.broken = {"b"}
    fleet.publish(8)
    assert registry.log == [("dirty", "a"), ("dirty", "b"), ("push", "3.8", "a", "b"), ("clean", "a")]
    assert [(e.state, e.version) for e in registry.engines()] == [("clean", "3.8"), ("dirty", None)]
    assert pusher.fresh == ["a", "b"]


def test_an_engine_whose_pushes_fail_is_tried_again_ever_later_and_holds_up_no_other(
    fleet: EngineFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, pusher, now = fleet._client, fleet._pusher, 1000.0
    monkeypatch.setattr("megatron_sao.trainer.fleet.time.monotonic", lambda: now)
    pusher.broken = {"b"}
    fleet.publish(8)
    tried = [now]
    while now < 3000.0:
        now += 1.0
        registry.log.clear()
        fleet.refresh(8, interval=0.0)
        if registry.log:
            assert registry.log == [("dirty", "b"), ("push", "3.8", "b")]
            tried.append(now)
    waits = [later - earlier for earlier, later in pairwise(tried)]
    assert waits[:9] == [2, 4, 8, 16, 32, 64, 128, 256, 300] and set(waits[9:]) == {300}
    registry.log.clear()
    fleet.publish(9)
    assert registry.log == [("dirty", "a"), ("push", "3.9", "a"), ("clean", "a")]
    assert pusher.forgotten == [], "it is not gone"
    pusher.broken, now = set(), now + 300
    fleet.refresh(9, interval=0.0)
    assert registry.by_id["b"].state == "clean"
    pusher.broken = {"b"}
    fleet.publish(10)
    assert fleet._failures["b http://b"] == (1, now + 2)
    registry.by_id["b"] = EngineInfo("b", "http://another-process", "dirty", None, 1, 0.0)
    registry.log.clear()
    fleet.refresh(10, interval=0.0)
    assert registry.log[0] == ("dirty", "b"), "a restarted server has not failed"


def test_only_engines_without_the_published_weights_are_refreshed(fleet: EngineFleet) -> None:
    registry, pusher = fleet._client, fleet._pusher
    fleet.publish(8)
    registry.by_id["c"] = EngineInfo("c", "http://c", "dirty", None, 1, 0.0)  # joins
    registry.log.clear()
    fleet.refresh(8, interval=0.0)
    assert registry.log == [("dirty", "c"), ("push", "3.8", "c"), ("clean", "c")]
    registry.log.clear()
    fleet.refresh(8, interval=0.0)
    assert registry.log == []
    registry.by_id["a"] = replace(registry.by_id["a"], state="dirty")
    fleet.refresh(9, interval=0.0)  # the policy has moved on: everyone gets what it is now
    assert ("push", "3.9", "a", "b", "c") in registry.log
    assert pusher.fresh == ["a"], "its process may be new, the others' groups stand"


def test_an_engine_that_leaves_is_forgotten_and_one_that_restarts_in_mid_push_stays_dirty(fleet: EngineFleet) -> None:
    registry, pusher = fleet._client, fleet._pusher
    fleet.publish(8)
    registry.by_id["a"] = replace(registry.by_id["a"], state="down")
    registry.lost = {"b"}
    fleet.publish(9)
    assert pusher.forgotten == ["a http://a"]
    assert registry.by_id["b"].state == "dirty"
    assert ("push", "3.9", "b") in registry.log


def test_the_weights_are_at_hand_during_a_push_and_at_no_other_time(fleet: EngineFleet) -> None:
    registry = fleet._client

    @contextmanager
    def resident() -> Iterator[None]:
        registry.log.append(("here",))
        yield
        registry.log.append(("gone",))

    fleet._resident = resident
    fleet.publish(8)
    assert [entry[0] for entry in registry.log] == ["dirty", "dirty", "here", "push", "gone", "clean", "clean"]
    registry.log.clear()
    fleet.refresh(8, interval=0.0)
    assert registry.log == [], "every engine has them"
