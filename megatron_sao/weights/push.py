"""Current weights into running SGLang servers, while their requests are in flight.

Rank 0 holds one process group per engine (itself as rank 0, the engine's tensor-parallel ranks after it), so that an
engine that hangs hangs nobody else. A push pauses generation (requests are retracted, none is lost), broadcasts every
tensor, flushes the KV cache, labels the new version and continues. Cached keys of the old weights would otherwise be
mixed with the new ones: without the flush log-probabilities are silently wrong.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from datetime import timedelta
from functools import partial
from typing import Any

import httpx
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _new_process_group_helper, _world

log = logging.getLogger(__name__)

Bucket = list[tuple[str, torch.Tensor]]


CONNECT_SECONDS = 30.0  # to form a group with an engine that answers
POLL_SECONDS = 0.0005


class PushError(RuntimeError):
    """An engine refused or failed a weight update; the message names the engine and the call."""


class EngineUnreachable(PushError):
    """The engine did not answer at all."""


def buckets(tensors: Iterator[tuple[str, torch.Tensor]], max_bytes: int) -> Iterator[Bucket]:
    """Group tensors, in order, into lists of at most ``max_bytes`` (a larger tensor is a bucket of its own)."""
    bucket: Bucket = []
    size = 0
    for name, tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if bucket and size + nbytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += nbytes
    if bucket:
        yield bucket


def push_weights(
    links: list[EngineLink], tensors: Iterator[tuple[str, torch.Tensor]], version: str, bucket_bytes: int
) -> dict[str, str]:
    """Send all ``tensors`` to every engine as weights ``version``. Each tensor is produced once, whatever their number.

    Returns:
        Error text by URL of the engines that failed: their weights are mixed, they must not serve. The others hold
        the new weights and are generating again.
    """
    failed: dict[str, str] = {}

    def attempt(link: EngineLink, action: Callable[[], None]) -> None:
        try:
            action()
        except (RuntimeError, OSError) as error:  # PushError, what torch.distributed raises, an unresolvable host
            log.warning("weight push %s to %s failed: %s", version, link.url, error)
            failed.setdefault(link.url, str(error))

    for link in links:
        attempt(link, link.begin)
    source = buckets(tensors, bucket_bytes)
    bucket = next(source, None)
    while bucket is not None:
        following = next(source, None)
        label = version if following is None else None
        for link in links:
            if link.url not in failed:
                attempt(link, partial(link.send, bucket, label))
        bucket = following
    for link in links:
        attempt(link, partial(link.finish, failed=link.url in failed))
    return failed


class EngineLink:
    """One running SGLang server as the receiver of weights. Used by rank 0 only.

    Args:
        url: the server's base URL.
        tp: its tensor-parallel size.
        token: its API and admin key.
        backend: ``gloo`` or ``nccl``, whatever the engine's device can receive.
        timeout: seconds that any one call or broadcast may take.
    """

    def __init__(self, url: str, tp: int, token: str, backend: str, timeout: float = 300.0) -> None:
        self.url, self._tp, self._backend, self._timeout = url, tp, backend, timeout
        self._http = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=httpx.Timeout(timeout, connect=10.0),
            trust_env=False,
        )
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="push")
        self._group: dist.ProcessGroup | None = None
        self._group_name = ""

    def connect(self) -> None:
        """Form the process group with the engine's ranks. Raises PushError or a torch.distributed error."""
        self._end_abandoned_update()
        host = httpx.URL(self.url).host
        address = _address_towards(host)
        store = dist.TCPStore(
            address, 0, 1 + self._tp, is_master=True, timeout=timedelta(seconds=CONNECT_SECONDS), wait_for_workers=False
        )
        self._group_name = f"sao-{address}-{store.port}"
        joined = self._later(
            "/init_weights_update_group",
            master_address=address,
            master_port=store.port,
            rank_offset=1,
            world_size=1 + self._tp,
            group_name=self._group_name,
            backend=self._backend,
        )
        forming = self._threads.submit(_join_group, store, 1 + self._tp, self._backend, self._group_name, self._timeout)
        # An engine that refuses never joins: its answer must end the wait for it.
        wait([joined, forming], timeout=CONNECT_SECONDS, return_when=FIRST_EXCEPTION)
        if not joined.done():
            raise PushError(f"engine {self.url} did not join the weight update group within {CONNECT_SECONDS:g} s")
        joined.result()
        self._group = forming.result(timeout=CONNECT_SECONDS)

    def begin(self) -> None:
        """Stop generation (requests in flight are kept) and open a weight update."""
        if self._group is None:
            self.connect()
        self._call("/pause_generation", mode="retract")
        self._call("/begin_weight_update")

    def send(self, bucket: Bucket, version: str | None) -> None:
        """Broadcast one bucket. ``version`` labels the weights and flushes the cache: give it with the last bucket
        only, since SGLang applies label and flush of whichever call carries them."""
        received = self._later(
            "/update_weights_from_distributed",
            names=[name for name, _ in bucket],
            dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            shapes=[list(tensor.shape) for _, tensor in bucket],
            group_name=self._group_name,
            flush_cache=version is not None,
            **({} if version is None else {"weight_version": version}),
        )
        works = [dist.broadcast(tensor, 0, group=self._group, async_op=True) for _, tensor in bucket]
        while not all(work.is_completed() for work in works):
            if received.done():
                received.result()  # raises where the engine refused, and so takes no part in the broadcast
            time.sleep(POLL_SECONDS)
        for work in works:
            work.wait()
        received.result()

    def finish(self, failed: bool = False) -> None:
        """Close the update and let generation continue; after a failed one, abort the requests in flight first, since
        the weights are mixed. Their clients send them again, to an engine that is clean."""
        try:
            self._call("/end_weight_update")
            if failed:
                self._call("/abort_request", abort_all=True)
        finally:
            self._call("/continue_generation")

    def close(self) -> None:
        """Leave the group, as far as the engine still answers."""
        if self._group is not None:
            with contextlib.suppress(httpx.HTTPError):
                self._http.post("/destroy_weights_update_group", json={"group_name": self._group_name}, timeout=5.0)
            dist.destroy_process_group(self._group)
            self._group = None
        self._http.close()
        self._threads.shutdown(wait=False)

    def _end_abandoned_update(self) -> None:
        """A trainer that died in the middle of a push left the update open; where there is none the call is refused."""
        try:
            self._call("/end_weight_update")
        except EngineUnreachable:
            raise
        except PushError as refusal:
            log.debug("no update was open: %s", refusal)

    def _later(self, path: str, **body: Any) -> Future[None]:
        """Start a call whose answer comes only after this process has taken part in a collective."""
        return self._threads.submit(self._call, path, **body)

    def _call(self, path: str, **body: Any) -> None:
        try:
            response = self._http.post(path, json=body)
        except httpx.HTTPError as error:
            raise EngineUnreachable(f"engine {self.url} {path}: {type(error).__name__} {error}") from error
        failed = response.status_code != 200
        if not failed and response.headers.get("content-type", "").startswith("application/json"):
            answer = response.json()
            failed = isinstance(answer, dict) and answer.get("success") is False
        if failed:
            raise PushError(f"engine {self.url} {path}: {response.status_code} {response.text[:300]}")


def _join_group(store: dist.TCPStore, size: int, backend: str, name: str, timeout: float) -> dist.ProcessGroup:
    """Rank 0 of a group whose other members are no part of this process's world.

    torch.distributed has no public call for that; the server forms its side with the same helper, so that keys in
    the store agree.
    """
    group, _ = _new_process_group_helper(
        size,
        0,
        [],
        dist.Backend(backend),
        PrefixStore(name, store),
        group_name=name,
        timeout=timedelta(seconds=timeout),
    )
    _world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    return group


def _address_towards(host: str) -> str:
    """The local address from which ``host`` is reached: what that host can connect back to."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return probe.getsockname()[0]
