"""The engines as the trainer sees them: who is there, what they hold, and bringing them up to date."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from megatron_sao.buffer.client import BufferClient, BufferError, EngineInfo
from megatron_sao.distributed import broadcast_json
from megatron_sao.trainer.world import World
from megatron_sao.weights.publish import Receiver
from megatron_sao.weights.push import WeightPusher

log = logging.getLogger(__name__)

RETRY_SECONDS = 300.0  # at most, until an engine whose push failed is tried again; from 2 s on, doubled by each failure


class EngineFleet:
    """Keeps every registered engine on the policy's published weights. Methods are collective over trainer ranks.

    The registry calls an engine dirty from before the first tensor of a push until after the last, and from its
    registration until its first push, so no request is sent to an engine whose weights are in doubt. An engine whose
    push has failed is left out for a while: one that hangs would otherwise hold up every step.

    Args:
        client: the buffer's registry; used on rank 0 only.
        pusher: of the policy's weights.
        incarnation, policy_version: of this trainer and of the weights it starts with.
        resident: a context in which the policy's weights can be read.
    """

    def __init__(
        self,
        client: BufferClient,
        pusher: WeightPusher,
        incarnation: int,
        policy_version: int,
        world: World,
        resident: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._client, self._pusher, self._world, self.incarnation = client, pusher, world, incarnation
        self._resident = resident
        self._known: set[str] = set()  # keys of the engines that were there at the last look
        self._failures: dict[str, tuple[int, float]] = {}  # by key: pushes failed in a row, and when to try again
        self.version = f"{incarnation}.{policy_version}"
        self._last_refresh = 0.0

    def publish(self, policy_version: int) -> None:
        """Label the policy's current weights and push them to every live engine whose time has come.

        Raises:
            WeightMismatch: an engine's checksums are not those of the weights it was sent.
        """
        self.version = f"{self.incarnation}.{policy_version}"
        self._push(self._due() if self._world.is_leader else [])

    def refresh(self, policy_version: int, interval: float = 1.0) -> None:
        """Push the policy's weights where an engine does not hold the published ones: new, restarted or failed ones.

        Where the policy has moved on since :meth:`publish` every engine gets the newer weights, under their own label.
        Looks at most once per ``interval`` seconds.
        """
        stale: list[EngineInfo] = []
        if self._world.is_leader and time.monotonic() - self._last_refresh >= interval:
            self._last_refresh = time.monotonic()
            stale = [e for e in self._due() if e.state != "clean" or e.version != self.version]
        if not broadcast_json(bool(stale), self._world.device):
            return
        if self.version == f"{self.incarnation}.{policy_version}":
            self._push(stale)
        else:
            self.publish(policy_version)

    def close(self) -> None:
        self._pusher.close()

    def _live(self) -> list[EngineInfo]:
        return [engine for engine in self._client.engines() if engine.state not in ("down", "sick")]

    def _due(self) -> list[EngineInfo]:
        now = time.monotonic()
        return [engine for engine in self._live() if self._failures.get(_key(engine), (0, now))[1] <= now]

    def _push(self, engines: list[EngineInfo]) -> None:
        engines = [engine for engine in engines if self._mark_dirty(engine)]
        if self._world.is_leader:
            live = {_key(engine) for engine in self._live()}
            gone, self._known = self._known - live, live
        self._pusher.forget(sorted(gone) if self._world.is_leader else [])
        receivers = [Receiver(_key(e), e.id, e.url, e.tp, fresh=e.state != "clean") for e in engines]
        with self._resident():
            failed = self._pusher.push(receivers, self.version)
        for engine in engines:
            failures, _ = self._failures.pop(_key(engine), (0, 0.0))
            if _key(engine) in failed:
                wait = min(2 ** (failures + 1), RETRY_SECONDS)
                self._failures[_key(engine)] = failures + 1, time.monotonic() + wait
            else:
                self._mark_clean(engine)

    def _mark_dirty(self, engine: EngineInfo) -> bool:
        """False for an engine that has left in the meantime."""
        try:
            self._client.mark_engine(engine.id, "dirty", None, self.incarnation)
        except BufferError as error:
            if error.status != 404:
                raise
            return False
        return True

    def _mark_clean(self, engine: EngineInfo) -> None:
        try:
            self._client.mark_engine(engine.id, "clean", self.version, self.incarnation)
        except BufferError as error:
            # It registered anew while it was pushed to, as another server process without these weights, or is sick.
            log.warning("engine %s is not clean after its push: %s", engine.id, error)


def _key(engine: EngineInfo) -> str:
    return f"{engine.id} {engine.url}"
