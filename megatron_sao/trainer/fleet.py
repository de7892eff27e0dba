"""The engines as the trainer sees them: who is there, what they hold, and bringing them up to date."""

from __future__ import annotations

import logging
import time

from megatron_sao.buffer.client import BufferClient, BufferError, EngineInfo
from megatron_sao.distributed import broadcast_json
from megatron_sao.trainer.world import World
from megatron_sao.weights.export import HFExporter
from megatron_sao.weights.push import EngineLink, push_weights

log = logging.getLogger(__name__)

BUCKET_BYTES = 256 * 2**20


class EngineFleet:
    """Keeps every registered engine on the policy's published weights. Methods are collective over trainer ranks.

    The registry calls an engine dirty from before the first tensor of a push until after the last, and from its
    registration until its first push, so no request is sent to an engine whose weights are in doubt.

    Args:
        client: the buffer's registry and, as its bearer token, the engines' key; used on rank 0 only.
        exporter: the policy's weights.
        incarnation, policy_version: of this trainer and of the weights it starts with.
        backend: ``gloo`` or ``nccl``.
        bucket_bytes: how much is sent per call.
    """

    def __init__(
        self,
        client: BufferClient,
        exporter: HFExporter,
        incarnation: int,
        policy_version: int,
        world: World,
        backend: str,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._client, self._exporter, self._world, self.incarnation = client, exporter, world, incarnation
        self._backend, self._bucket_bytes = backend, bucket_bytes
        self._links: dict[str, EngineLink] = {}
        self.version = f"{incarnation}.{policy_version}"
        self._last_refresh = 0.0

    def publish(self, policy_version: int) -> None:
        """Label the policy's current weights and push them to every live engine."""
        self.version = f"{self.incarnation}.{policy_version}"
        self._push(self._live() if self._world.is_leader else [])

    def refresh(self, policy_version: int, interval: float = 1.0) -> None:
        """Push the policy's weights where an engine does not hold the published ones: new, restarted or failed ones.

        Where the policy has moved on since :meth:`publish` every engine gets the newer weights, under their own label.
        Looks at most once per ``interval`` seconds.
        """
        stale: list[EngineInfo] = []
        if self._world.is_leader and time.monotonic() - self._last_refresh >= interval:
            self._last_refresh = time.monotonic()
            stale = [e for e in self._live() if e.state != "clean" or e.version != self.version]
        if not broadcast_json(bool(stale), self._world.device):
            return
        if self.version == f"{self.incarnation}.{policy_version}":
            self._push(stale)
        else:
            self.publish(policy_version)

    def close(self) -> None:
        for link in self._links.values():
            link.close()

    def _live(self) -> list[EngineInfo]:
        engines = self._client.engines()
        for key in set(self._links) - {self._key(engine) for engine in engines if engine.state != "down"}:
            self._links.pop(key).close()
        return [engine for engine in engines if engine.state != "down"]

    def _push(self, engines: list[EngineInfo]) -> None:
        if not self._world.is_leader:
            for _ in self._exporter.tensors():  # take part in the gathers
                pass
            return
        links: dict[str, EngineLink] = {}
        for engine in engines:
            try:
                self._client.mark_engine(engine.id, "dirty", None, self.incarnation)
            except BufferError as error:
                if error.status != 404:
                    raise
                continue
            if engine.state != "clean" and self._key(engine) in self._links:
                self._links.pop(self._key(engine)).close()  # perhaps a new server process, unknown to the old group
            links[engine.id] = self._link(engine)
        failed = push_weights(list(links.values()), self._exporter.tensors(), self.version, self._bucket_bytes)
        for engine in engines:
            link = links.get(engine.id)
            if link is None:
                continue
            if link.url in failed:
                self._links.pop(self._key(engine)).close()
            else:
                self._mark_clean(engine)

    def _mark_clean(self, engine: EngineInfo) -> None:
        try:
            self._client.mark_engine(engine.id, "clean", self.version, self.incarnation)
        except BufferError as error:
            # It registered anew while it was pushed to: another server process, without these weights.
            log.warning("engine %s is not clean after its push: %s", engine.id, error)
            self._links.pop(self._key(engine)).close()

    def _link(self, engine: EngineInfo) -> EngineLink:
        key = self._key(engine)
        if key not in self._links:
            self._links[key] = EngineLink(engine.url, engine.tp, self._client.token, self._backend)
        return self._links[key]

    def _key(self, engine: EngineInfo) -> str:
        return f"{engine.id} {engine.url}"
