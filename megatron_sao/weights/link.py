"""What a weight update says to one running SGLang server: HTTP calls, and the process group that carries tensors."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _new_process_group_helper, _world

from megatron_sao.weights.gather import Bucket

log = logging.getLogger(__name__)

CONNECT_SECONDS = 30.0  # for the first call to an engine, and to form a group with it
CLEAN_UP_SECONDS = 5.0  # for a call to an engine that has failed
POLL_SECONDS = 0.002  # meanwhile the engine has a bucket to load, so it loses nothing by this


class PushError(RuntimeError):
    """An engine refused or failed a weight update; the message names the engine and the call."""


class EngineUnreachable(PushError):
    """The engine did not answer at all."""


class EngineControl:
    """The calls around the tensors. Any of them raises PushError, or EngineUnreachable.

    Args:
        url: the server's base URL.
        token: its API and admin key.
        timeout: seconds that any one call may take.
    """

    def __init__(self, url: str, token: str, timeout: float) -> None:
        self.url = url
        self._http = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=httpx.Timeout(timeout, connect=10.0),
            trust_env=False,
        )

    def end_abandoned_update(self) -> None:
        """A trainer that died in the middle of a push left the update open; where there is none the call is refused."""
        try:
            self.call("/end_weight_update", timeout=CONNECT_SECONDS)
        except EngineUnreachable:
            raise
        except PushError as refusal:
            log.debug("no update was open: %s", refusal)

    def pause(self, mode: str) -> None:
        """Stop generation; requests in flight are kept, and under ``retract`` computed anew when it goes on."""
        self.call("/pause_generation", mode=mode)

    def begin(self) -> None:
        self.call("/begin_weight_update")

    def label(self, version: str, group_name: str, flush: bool) -> None:
        """Name the weights that all sources have sent, and drop cached keys and values of the old ones. The call
        carries no tensor: SGLang applies label and flush of whichever call has them, so they come after the last."""
        nothing: dict[str, Any] = {"names": [], "dtypes": [], "shapes": [], "group_name": group_name}
        self.call("/update_weights_from_distributed", **nothing, flush_cache=flush, weight_version=version)

    def end(self) -> None:
        self.call("/end_weight_update")

    def load(self, directory: Path, version: str, flush: bool) -> None:
        """Load a safetensors directory that both sides see. Check it first: SGLang takes a wrong one silently."""
        body = {"model_path": str(directory), "load_format": "safetensors", "weight_version": version}
        self.call("/update_weights_from_disk", **body, flush_cache=flush)

    def checksums(self) -> list[dict[str, str]]:
        """Checksum by tensor name of every tensor-parallel rank, in rank order."""
        ranks = self.call("/weights_checker", action="checksum", selector="target")["ranks"]
        placed = {entry["parallelism_info"][0]["tp_rank"]: entry["checksums"] for entry in ranks}
        return [placed[rank] for rank in sorted(placed)]

    def resume(self) -> None:
        self.call("/continue_generation")

    def abandon(self) -> None:
        """After a failed update the weights are mixed: abort the requests in flight, whose clients send them again, to
        an engine that is clean. Whatever still answers is left neither paused nor inside an update."""
        calls: list[tuple[str, dict[str, Any]]] = [
            ("/end_weight_update", {}),
            ("/abort_request", {"abort_all": True}),
            ("/continue_generation", {}),
        ]
        for path, body in calls:
            try:
                self.call(path, timeout=CLEAN_UP_SECONDS, **body)
            except EngineUnreachable:
                return  # it hangs or is gone, and each further call would wait as long
            except PushError as refusal:
                log.debug("while abandoning an update: %s", refusal)

    def call(self, path: str, timeout: float | None = None, **body: Any) -> dict[str, Any]:
        options = {} if timeout is None else {"timeout": timeout}
        try:
            response = self._http.post(path, json=body, **options)
        except httpx.HTTPError as error:
            raise EngineUnreachable(f"engine {self.url} {path}: {type(error).__name__} {error}") from error
        answer = {}
        if response.headers.get("content-type", "").startswith("application/json"):
            answer = response.json()
        if response.status_code != 200 or (isinstance(answer, dict) and answer.get("success") is False):
            raise PushError(f"engine {self.url} {path}: {response.status_code} {response.text[:300]}")
        return answer

    def close(self) -> None:
        self._http.close()


class SourceLink:
    """The process group of this source rank (its rank 0) with one engine's ranks: an engine that hangs hangs no other.

    Args:
        control: the engine's calls, with this rank's own connection.
        tp: its tensor-parallel size.
        backend: ``gloo`` or ``nccl``, whatever the engine's device can receive.
        timeout: seconds that any broadcast may take.
    """

    def __init__(self, control: EngineControl, tp: int, backend: str, timeout: float) -> None:
        self._control, self._tp, self._backend, self._timeout = control, tp, backend, timeout
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="push")
        self._group: dist.ProcessGroup | None = None
        self.group_name = ""
        self._loading: Future[dict[str, Any]] | None = None  # the engine's answer to the last bucket

    def connect(self) -> None:
        """Form the group, if there is none yet. Raises PushError or a torch.distributed error."""
        if self._group is not None:
            return
        address = _address_towards(httpx.URL(self._control.url).host)
        size = 1 + self._tp
        store = dist.TCPStore(
            address, 0, size, is_master=True, timeout=timedelta(seconds=CONNECT_SECONDS), wait_for_workers=False
        )
        self.group_name = f"sao-{address}-{store.port}"
        joined = self._later(
            "/init_weights_update_group",
            master_address=address,
            master_port=store.port,
            rank_offset=1,
            world_size=size,
            group_name=self.group_name,
            backend=self._backend,
        )
        forming = self._threads.submit(_join_group, store, size, self._backend, self.group_name, self._timeout)
        # An engine that refuses never joins: its answer must end the wait for it.
        wait([joined, forming], timeout=CONNECT_SECONDS, return_when=FIRST_EXCEPTION)
        if not joined.done():
            raise PushError(
                f"engine {self._control.url} did not join the weight update group within {CONNECT_SECONDS:g} s"
            )
        joined.result()
        self._group = forming.result(timeout=CONNECT_SECONDS)

    def send(self, bucket: Bucket) -> None:
        """Broadcast a bucket in one piece; returns when the engine has it, though it may still be loading it. What goes
        wrong then is raised by the next call, or by :meth:`finish`."""
        before = self._loading
        self._loading = self._later(
            "/update_weights_from_distributed",
            names=[name for name, _ in bucket.tensors],
            dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket.tensors],
            shapes=[list(tensor.shape) for _, tensor in bucket.tensors],
            group_name=self.group_name,
            load_format="flattened_bucket",
            flush_cache=False,
        )
        work = dist.broadcast(bucket.data, 0, group=self._group, async_op=True)
        while not work.is_completed():
            if self._loading.done():
                self._loading.result()  # raises where the engine refused, and so takes no part in the broadcast
            if before is not None and before.done() and isinstance(before.exception(), EngineUnreachable):
                before.result()
            time.sleep(POLL_SECONDS)
        work.wait()
        if before is not None:
            # Only now: an engine that refused the bucket before takes this one all the same, and is not left waiting.
            before.result()

    def finish(self) -> None:
        """Wait until the engine has loaded all that was sent. Raises PushError."""
        loading, self._loading = self._loading, None
        if loading is not None:
            loading.result()

    def close(self, wait: bool = False) -> None:
        """Leave the group, as far as the engine still answers.

        Args:
            wait: for CLEAN_UP_SECONDS at most, before the process ends: one that ends while a group is being taken
                apart is aborted. Otherwise not at all: a broadcast that the engine does not take ends only at its
                timeout, and the group with it.
        """
        group, self._group = self._group, None

        def leave() -> None:
            if group is not None:
                with contextlib.suppress(PushError):
                    body = {"group_name": self.group_name}
                    self._control.call("/destroy_weights_update_group", timeout=CLEAN_UP_SECONDS, **body)
                with contextlib.suppress(ValueError):  # the process has left torch.distributed altogether meanwhile
                    dist.destroy_process_group(group)
            self._control.close()
            self._threads.shutdown(wait=False)

        leaving = threading.Thread(target=leave, daemon=True)
        leaving.start()
        if wait:
            leaving.join(CLEAN_UP_SECONDS)

    def _later(self, path: str, **body: Any) -> Future[dict[str, Any]]:
        """Start a call whose answer comes only after this process has taken part in a collective."""
        return self._threads.submit(self._control.call, path, **body)


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
