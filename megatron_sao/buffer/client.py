"""Clients of the buffer: a synchronous one for the trainer, an asynchronous one for workers and sidecars.

Every call is safe to repeat, so both do so, with exponential back-off: a buffer that is full (429) or whose disk is
(503) is waited for without end; one that cannot be reached, or breaks (any other 5xx), for ``give_up_after`` seconds.
Any other refusal is a :class:`BufferError` at once.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx

from megatron_sao.config import ConfigError
from megatron_sao.data.trajectory import Trajectory

log = logging.getLogger(__name__)

COME_AGAIN = (429, 503)  # the buffer is there, but has no room: only its trainer or its disk can tell for how long
NOTICE_SECONDS = 60.0  # between two lines of the log about calls that wait


class BufferError(RuntimeError):
    """The buffer refused a call. ``status`` is the HTTP status, ``message`` its sentence."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"the buffer refused ({status}): {message}")
        self.status = status
        self.message = message


class BufferUnavailable(RuntimeError):
    """The buffer could not be reached for longer than the client waits."""


def buffer_address() -> tuple[str, str]:
    """URL and token of the run's buffer, from the environment. Raises ConfigError where either is not set."""
    try:
        return os.environ["MEGATRON_SAO_BUFFER"], os.environ["MEGATRON_SAO_TOKEN"]
    except KeyError as missing:
        raise ConfigError(
            f"the environment variable {missing} is not set: start this through `megatron-sao run`, or set the URL "
            "(buffer.json of the run directory) and the token of the run's buffer; a trainer alone takes --batches DIR"
        ) from None


@dataclass(frozen=True)
class BatchEntry:
    id: str
    num_tokens: int
    num_action_tokens: int


@dataclass(frozen=True)
class EngineInfo:
    """An SGLang server as the registry sees it; ``heartbeat_age`` in seconds."""

    id: str
    url: str
    # "clean": holds exactly `version`; "dirty": weights unknown or mid-push; "sick": its sidecar says it cannot serve;
    # "down": no heartbeat
    state: str
    version: str | None
    tp: int
    heartbeat_age: float


@dataclass(frozen=True)
class Lease:
    """The right to play one visit of a task for ``expires_in`` seconds; renew it while the episode runs."""

    visit_id: str
    kind: str  # "train" | "eval"
    task: dict[str, Any]  # the fields of data.tasks.Task
    epoch: int
    attempt: int
    expires_in: float
    version: str | None = None  # evaluation only: the weight version every token must come from
    group: str | None = None  # of the trajectory; None unless rl.group_size > 1


@dataclass(frozen=True)
class _Call:
    """One request, independent of the transport that sends it."""

    method: str
    path: str
    parse: Callable[[httpx.Response], Any]
    json: dict[str, Any] | None = None
    content: bytes | None = None
    wait: float = 0.0  # seconds the server may hold the answer

    def request(self, timeout: float) -> dict[str, Any]:
        arguments: dict[str, Any] = {"method": self.method, "url": self.path, "timeout": timeout + self.wait}
        if self.json is not None:
            arguments["json"] = self.json
        if self.content is not None:
            arguments["content"] = self.content
            arguments["headers"] = {"Content-Type": "application/msgpack"}
        return arguments


class _Notices:
    """Says why calls wait: a line a minute, however many calls of a client wait for the same."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._last = -math.inf

    def waiting(self, since: float, problem: str) -> None:
        now = time.monotonic()
        if now - max(since, self._last) >= NOTICE_SECONDS:
            self._last = now
            log.warning("a call to the buffer at %s waits, for %.0f s so far: %s", self._url, now - since, problem)


class _Retries:
    """How long to wait before a call is tried again; asked after every failure. A success ends it."""

    def __init__(self, url: str, give_up_after: float, notices: _Notices) -> None:
        self._url = url
        self._give_up_after = give_up_after
        self._notices = notices
        self._waiting_since: float | None = None
        self._failing_since: float | None = None  # a long-poll's own wait does not count
        self._pause = 0.1

    def refused(self, response: httpx.Response) -> float:
        """Seconds. Raises BufferError for a refusal that a repeat would only meet again."""
        status, message = response.status_code, _message(response)
        if status not in (*COME_AGAIN, 408) and status < 500:  # 408: the body took too long on its way
            raise BufferError(status, message)
        problem = f"{status}: {message}"
        if status not in COME_AGAIN or not self._give_up_after:
            return self.failed(problem)
        self._failing_since = None
        if self._waiting_since is None:
            self._waiting_since = time.monotonic()
        self._notices.waiting(self._waiting_since, problem)
        retry_after = response.headers.get("Retry-After", "")
        return self._next_pause() + (min(float(retry_after), 30.0) if retry_after.isdigit() else 0.0)

    def failed(self, problem: str) -> float:
        """Seconds. Raises BufferUnavailable when the time is up."""
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = now
        elapsed = now - self._failing_since
        if elapsed >= self._give_up_after:
            raise BufferUnavailable(
                f"the buffer at {self._url} has not served a call for {elapsed:.0f} s (last: {problem}); "
                "see logs/buffer.log of the run, and check that the process runs and the URL is right"
            )
        return min(self._next_pause(), self._give_up_after - elapsed)

    def _next_pause(self) -> float:
        pause = self._pause * random.uniform(0.5, 1.0)  # spread clients that lost the server at the same instant
        self._pause = min(self._pause * 2, 5.0)
        return pause


def _message(response: httpx.Response) -> str:
    try:
        return response.json()["error"]
    except (ValueError, KeyError, TypeError):  # not ours: a proxy, or a crash inside the server
        return response.text[:500] or response.reason_phrase


def _field(name: str) -> Callable[[httpx.Response], Any]:
    return lambda response: response.json()[name]


def _entries(response: httpx.Response) -> list[BatchEntry] | None:
    entries = response.json()["entries"]
    return None if entries is None else [BatchEntry(**entry) for entry in entries]


def _engines_call() -> _Call:
    def parse(response: httpx.Response) -> list[EngineInfo]:
        return [EngineInfo(**engine) for engine in response.json()["engines"]]

    return _Call("GET", "/v1/engines", parse)


def _quoted(part: str) -> str:
    return quote(part, safe="")


class BufferClient:
    """Synchronous client; used by trainer processes and tools. Safe to share between threads.

    Args:
        url: e.g. "http://127.0.0.1:8500".
        token: bearer token, MEGATRON_SAO_TOKEN.
        timeout: seconds per request, on top of a long-poll's own wait.
        give_up_after: seconds without an answer before BufferUnavailable; what a buffer that is full answers is one,
            and is waited for however long. With 0 a call is tried once, whatever the answer.

    Every method raises BufferError for a refusal and BufferUnavailable when the buffer stays away.
    """

    def __init__(self, url: str, token: str, timeout: float = 60.0, give_up_after: float = 120.0) -> None:
        self.token = token
        self.url = url.rstrip("/")
        self.timeout = timeout
        self.give_up_after = give_up_after
        self._notices = _Notices(self.url)
        self._http = httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {token}"}, trust_env=False)

    def register_trainer(self, run_id: str, policy_version: int) -> int:
        """Become the trainer that rules. Returns the incarnation; every engine is dirty from now on."""
        body = {"run_id": run_id, "policy_version": policy_version}
        return self._send(_Call("POST", "/v1/trainers", _field("incarnation"), body))

    def batch(
        self, stage: str, step: int, incarnation: int, batch_size: int, policy_version: int, wait: float
    ) -> list[BatchEntry] | None:
        """The batch of a step, the same at every call; None if it is not complete within ``wait`` seconds."""
        body = {
            "incarnation": incarnation,
            "batch_size": batch_size,
            "policy_version": policy_version,
            "wait": wait,
        }
        return self._send(_Call("POST", f"/v1/batches/{stage}/{step}", _entries, body, wait=wait))

    def trajectory(self, id: str) -> Trajectory:
        path = f"/v1/trajectories/{_quoted(id)}"
        return self._send(_Call("GET", path, lambda response: Trajectory.decode(response.content)))

    def commit(self, stage: str, step: int, incarnation: int) -> None:
        """Allow the buffer to forget everything strictly before (stage, step)."""
        body = {"incarnation": incarnation}
        self._send(_Call("POST", f"/v1/commits/{stage}/{step}", _nothing, body))

    def start_eval(self, stage: str, step: int, incarnation: int, version: str, num_prompts: int) -> None:
        """Lease the first ``num_prompts`` held-out tasks once each, under one weight version. Repeatable; another
        version starts the evaluation of this step afresh."""
        body = {"incarnation": incarnation, "version": version, "num_prompts": num_prompts}
        self._send(_Call("POST", f"/v1/evaluations/{stage}/{step}", _nothing, body))

    def eval_result(self, stage: str, step: int, incarnation: int, wait: float) -> list[str] | None:
        """Trajectory ids in task order when every visit has ended, else None after ``wait`` seconds. Visits that
        failed at all their attempts have no id: num_prompts − len(ids) count as failures."""
        body = {"incarnation": incarnation, "wait": wait}
        return self._send(_Call("POST", f"/v1/evaluations/{stage}/{step}/result", _field("ids"), body, wait=wait))

    def engines(self) -> list[EngineInfo]:
        return self._send(_engines_call())

    def mark_engine(self, id: str, state: str, version: str | None, incarnation: int) -> None:
        """Mark an engine "dirty" before a push and "clean" with its version after. 409 if it registered anew in
        between: it has lost the weights and needs another push."""
        body = {"state": state, "version": version, "incarnation": incarnation}
        self._send(_Call("POST", f"/v1/engines/{_quoted(id)}/state", _nothing, body))

    def dropped(self, after: int = 0, limit: int = 100) -> list[dict[str, Any]]:
        """What was not trained on and why, oldest first from behind the serial ``after``; the newest 10,000 stay."""
        path = f"/v1/dropped?after={after}&limit={limit}"
        return self._send(_Call("GET", path, _field("dropped")))

    def aside(self, after: int = 0, limit: int = 100) -> list[dict[str, Any]]:
        """Visits given up after ``buffer.max_attempts`` leases, by id from behind ``after``."""
        return self._send(_Call("GET", f"/v1/aside?after={after}&limit={limit}", _field("aside")))

    def stats(self) -> dict[str, Any]:
        return self._send(_Call("GET", "/v1/stats", httpx.Response.json))

    def index(self) -> list[dict[str, Any]]:
        """As :meth:`megatron_sao.buffer.archive.Archive.index`."""
        return self._send(_Call("GET", "/v1/trajectories", _field("trajectories")))

    def recorded_batches(self) -> list[dict[str, Any]]:
        """As :meth:`megatron_sao.buffer.archive.Archive.recorded_batches`."""
        return self._send(_Call("GET", "/v1/batches", _field("batches")))

    def close(self) -> None:
        self._http.close()

    def _send(self, call: _Call) -> Any:
        retries = _Retries(self.url, self.give_up_after, self._notices)
        while True:
            try:
                response = self._http.request(**call.request(self.timeout))
            except httpx.TransportError as error:
                pause = retries.failed(f"{type(error).__name__}: {error}")
            else:
                if response.is_success:
                    return call.parse(response)
                pause = retries.refused(response)
            time.sleep(pause)


class AsyncBufferClient:
    """Asynchronous client; used by rollout workers and engine sidecars. Arguments and errors as BufferClient's."""

    def __init__(self, url: str, token: str, timeout: float = 60.0, give_up_after: float = 120.0) -> None:
        self.url = url.rstrip("/")
        self.timeout = timeout
        self.give_up_after = give_up_after
        self._notices = _Notices(self.url)
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {token}"},
            trust_env=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=32),
        )

    async def lease(self, worker_id: str, max_leases: int, wait: float) -> list[Lease]:
        """Up to ``max_leases`` visits to play; empty if there are none within ``wait`` seconds."""
        body = {"worker_id": worker_id, "max_leases": max_leases, "wait": wait, "request_id": uuid.uuid4().hex}

        def parse(response: httpx.Response) -> list[Lease]:
            return [Lease(**lease) for lease in response.json()["leases"]]

        return await self._send(_Call("POST", "/v1/tasks/lease", parse, body, wait=wait))

    async def renew(self, visit_id: str, attempt: int) -> float:
        """Seconds the lease now lasts. BufferError 409: it is lost, stop the episode."""
        path = f"/v1/tasks/{_quoted(visit_id)}/renew"
        return await self._send(_Call("POST", path, _field("expires_in"), {"attempt": attempt}))

    async def release(self, visit_id: str, attempt: int, reason: str) -> None:
        """Give a visit back unplayed; it is leased again, up to max_attempts times."""
        path = f"/v1/tasks/{_quoted(visit_id)}/release"
        await self._send(_Call("POST", path, _nothing, {"attempt": attempt, "reason": reason}))

    async def submit(self, trajectory: Trajectory) -> str:
        """Store a trajectory durably. Returns "accepted", "duplicate" (the visit or this very trajectory was in
        already) or "dropped" (failed in the environment, or nobody waits for it any more)."""
        return await self._send(_Call("POST", "/v1/trajectories", _field("result"), content=trajectory.encode()))

    async def register_engine(self, id: str, url: str, tp: int) -> None:
        await self._send(_Call("POST", "/v1/engines", _nothing, {"id": id, "url": url, "tp": tp}))

    async def heartbeat_engine(self, id: str, sick: str | None = None) -> EngineInfo:
        """``sick``: why the server cannot serve; it gets no requests until a heartbeat without, and a push."""
        path = f"/v1/engines/{_quoted(id)}/heartbeat"
        return await self._send(_Call("POST", path, lambda response: EngineInfo(**response.json()), {"sick": sick}))

    async def engines(self) -> list[EngineInfo]:
        return await self._send(_engines_call())

    async def close(self) -> None:
        await self._http.aclose()

    async def _send(self, call: _Call) -> Any:
        retries = _Retries(self.url, self.give_up_after, self._notices)
        while True:
            try:
                response = await self._http.request(**call.request(self.timeout))
            except httpx.TransportError as error:
                pause = retries.failed(f"{type(error).__name__}: {error}")
            else:
                if response.is_success:
                    return call.parse(response)
                pause = retries.refused(response)
            await asyncio.sleep(pause)


def _nothing(response: httpx.Response) -> None:
    return None
