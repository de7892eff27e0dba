"""What stands between the network and the application: the token, bounds on size and time, and a count of refusals."""

from __future__ import annotations

import asyncio
import hmac
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Any

import uvicorn
from fastapi.responses import JSONResponse

from megatron_sao.buffer.body import LARGE, InPlace, Pieces
from megatron_sao.buffer.connection import CONNECTION, ImpatientProtocol
from megatron_sao.buffer.turns import Turn, Turns
from megatron_sao.config import ConfigError

JSON_BODY_LIMIT = 64 * 2**10  # bytes; only a trajectory is larger
TURN_ROOM = 32 * 2**20  # bytes of large bodies that are dealt with at the same time
TURN_SECONDS = 0.25  # after which a large body that is not whole no longer keeps others waiting
TRAJECTORIES = "/v1/trajectories"
PUT_OFF = frozenset({429, 503})  # the answers that say: come again

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


def error_response(status: int, message: str) -> JSONResponse:
    """The form of every refusal: ``{"error": sentence}``."""
    headers = {"Retry-After": "1"} if status in (429, 503) else None
    return JSONResponse({"error": message}, status, headers)


_TOO_MANY = error_response(429, "too many large bodies at once; try again")


class Guard:
    """ASGI middleware in front of everything: the token first, then a bounded body, read whole.

    Args:
        app: what it guards.
        max_body_bytes: of a trajectory; four of them may be in memory at once, then 429. Large ones take turns before.
        json_limit: bytes of any other body.
        patience: seconds a client may take to send a request's head, and beyond what ``min_rate`` takes, its body and
            to read the answer; and that a large body waits for its turn, then 429.
        min_rate: bytes per second a body must come at, and an answer be read at.
    """

    def __init__(
        self,
        app: Callable[..., Awaitable[None]],
        token: str,
        max_body_bytes: int,
        patience: float = 30.0,
        min_rate: float = 64 * 2**10,
        json_limit: int = JSON_BODY_LIMIT,
    ) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()
        self._max_body_bytes = max_body_bytes
        self._json_limit = json_limit
        self.min_rate = min_rate
        self._held = 0
        self._turns = Turns(min(TURN_ROOM, 2 * max_body_bytes), TURN_SECONDS)
        self._stopping = False
        self._deadlines: set[asyncio.Timeout] = set()  # of the bodies that are awaited
        self.patience = patience
        self.refused = 0  # answers 4xx but 429, and connections that were closed on their client
        self.put_off = 0  # answers whose status is in PUT_OFF

    def stop(self) -> None:
        """Wait for no body any longer: what is not there yet is answered 503."""
        self._stopping = True
        for deadline in self._deadlines:
            if not deadline.expired():
                deadline.reschedule(0)

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        send = self._counted(send)
        given = dict(scope["headers"]).get(b"authorization", b"")
        if scope["path"] != "/healthz" and not hmac.compare_digest(given, self._expected):
            await error_response(
                401, "the bearer token is missing or wrong; set MEGATRON_SAO_TOKEN to the run's token"
            )(scope, receive, send)
            return
        size = self._large(scope)
        with nullcontext() if size is None else self._turns.turn(size) as turn:
            if turn is None or await turn.comes(self.patience):
                await self._serve(scope, receive, send, turn)
            else:
                await _TOO_MANY(scope, receive, send)

    def _large(self, scope: dict[str, Any]) -> int | None:
        """How many bytes this request says that it brings, if it has to wait for its turn with them."""
        if scope["path"] != TRAJECTORIES:
            return None
        size = int(dict(scope["headers"]).get(b"content-length", 0))
        return size if LARGE <= size <= self._max_body_bytes else None

    async def _serve(self, scope: dict[str, Any], receive: Receive, send: Send, turn: Turn | None) -> None:
        try:
            body = self._incoming(scope)
        except MemoryError:
            await error_response(503, "there is no memory for this body; send it again")(scope, receive, send)
            return

        def let_go() -> None:
            self._held -= body.end()
            if turn is not None:
                self._turns.end(turn)

        async def answer(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                let_go()  # the client may take its time to read it
            await send(message)

        try:
            refusal = await self._read(scope["path"], body, receive)
            if turn is not None:
                self._turns.whole(turn)
            if refusal is None:
                await self._app(scope, _replay(body, receive), answer)
            else:
                await refusal(scope, receive, answer)
        except _Gone:
            return
        finally:
            let_go()

    def _incoming(self, scope: dict[str, Any]) -> Pieces | InPlace:
        connection = scope.get(CONNECTION)
        if connection is None or scope["path"] != TRAJECTORIES:
            return Pieces()

        def arrived(nbytes: int) -> None:
            self._held += nbytes
            if self._is_full():
                connection.cycle.message_event.set()  # wakes _read, which otherwise waits for the whole

        return InPlace.begin(connection, self._max_body_bytes, arrived) or Pieces()

    async def _read(self, path: str, body: Pieces | InPlace, receive: Receive) -> JSONResponse | None:
        """Fill ``body``; returns why it is refused, if it is."""
        trajectory = path == TRAJECTORIES
        limit = self._max_body_bytes if trajectory else self._json_limit
        start = asyncio.get_running_loop().time()
        more = True
        while more:
            message = await self._next(receive, body, start)
            if message is None and self._stopping:
                return error_response(503, "the buffer is being stopped; send it again")
            if message is None:
                return error_response(
                    408, f"the body came slower than {self.min_rate:.0f} bytes per second; send it again"
                )
            if message["type"] == "http.disconnect":
                raise _Gone
            chunk = message.get("body", b"")
            body.add(chunk)
            self._held += len(chunk)
            more = message.get("more_body", False)
            if body.size > limit:
                field = " (buffer.max_body_bytes)" if trajectory else ""
                return error_response(413, f"the body exceeds {limit} bytes{field}")
            if body.size > JSON_BODY_LIMIT and self._is_full():
                return _TOO_MANY
        return None

    async def _next(self, receive: Receive, body: Pieces | InPlace, start: float) -> dict[str, Any] | None:
        """The next message; None if by then ``body``, which may grow meanwhile, has been too slow since ``start``, or
        nothing is awaited any longer."""
        while True:
            size = body.size
            deadline = asyncio.timeout_at(0 if self._stopping else start + self.patience + size / self.min_rate)
            self._deadlines.add(deadline)
            try:
                async with deadline:
                    return await receive()
            except TimeoutError:
                if body.size == size or self._stopping:
                    return None
            finally:
                self._deadlines.remove(deadline)

    def _is_full(self) -> bool:
        return self._held > 4 * max(self._max_body_bytes, self._json_limit)

    def _counted(self, send: Send) -> Send:
        async def counted(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self.put_off += message["status"] in PUT_OFF
                self.refused += 400 <= message["status"] < 500 and message["status"] not in PUT_OFF
            await send(message)

        return counted


class _Gone(Exception):
    """The client has left."""


def _replay(body: Pieces | InPlace, receive: Receive) -> Receive:
    """A receive channel that yields the whole body once and then what really comes: the disconnect."""
    first = [{"type": "http.request", "body": body.whole(), "frame": body.frame, "more_body": False}]

    async def replay() -> dict[str, Any]:
        return first.pop() if first else await receive()

    return replay


def token_of(server: str) -> str:
    """The token that every client of ``server`` must have. Raises ConfigError: there is none, or no header holds it."""
    token = os.environ.get("MEGATRON_SAO_TOKEN", "")
    if not token:
        raise ConfigError(f"MEGATRON_SAO_TOKEN is not set: {server} serves nobody without a token; set it to a secret")
    if not all("!" <= character <= "~" for character in token):
        raise ConfigError("MEGATRON_SAO_TOKEN has characters that no HTTP header carries; use ASCII without spaces")
    return token


class GuardedServer(uvicorn.Server):
    """Serves a guarded application."""

    def __init__(self, guard: Guard) -> None:
        super().__init__(
            uvicorn.Config(
                guard,
                http=ImpatientProtocol,
                ws="none",
                log_config=None,  # its lines go where ours do
                log_level="warning",
                access_log=False,
                proxy_headers=False,  # nobody asks where a request came from
                timeout_graceful_shutdown=3,
                timeout_keep_alive=60,
            )
        )
        self._guard = guard

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._guard.stop()
        await super().shutdown(sockets)
