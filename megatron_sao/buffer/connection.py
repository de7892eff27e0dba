"""A client's connection: how long it may take over what it sends and reads, and how much it may send ahead."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import TYPE_CHECKING

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    from megatron_sao.buffer.guard import Guard

AHEAD_LIMIT = 64 * 2**10  # bytes that may follow a request before it is answered
CONNECTION = "megatron_sao.connection"  # key of a scope: the protocol object that the request came through


class ImpatientProtocol(H11Protocol):
    """uvicorn's HTTP protocol, but a connection that takes longer than its guard's ``patience`` to send the head of a
    request, its first or a later one, or to read an answer, is closed, and so is one that sends more than AHEAD_LIMIT
    behind a request that is being served. uvicorn itself would wait for ever, and take in whatever follows a
    long-poll."""

    _closing: asyncio.TimerHandle | None = None  # if no head comes
    _giving_up: asyncio.TimerHandle | None = None  # if the answer is not read
    _ahead = 0  # bytes since the request that is being served was complete

    @property
    def _guard(self) -> Guard:
        return self.config.app

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        serving = self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body
        self._ahead = self._ahead + len(data) if serving else 0
        if self._ahead > AHEAD_LIMIT:
            self.send_400_response("More requests were sent than answered.")
            return
        super().data_received(data)
        self._watch()

    def handle_events(self) -> None:
        super().handle_events()
        if self.scope is not None:
            self.scope[CONNECTION] = self  # the application runs after this, and the guard takes it from there

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.trailing_data[0]:  # the begin of another head came before
            self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        seconds = self._guard.patience + self.transport.get_write_buffer_size() / self._guard.min_rate
        self._giving_up = self.loop.call_later(seconds, self._give_up)

    def resume_writing(self) -> None:
        self._giving_up.cancel()
        super().resume_writing()

    def _give_up(self) -> None:
        self._guard.refused += 1
        # With a reset: what is written already would stay in the kernel's memory.
        connection = self.transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        if self._giving_up is not None:
            self._giving_up.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """What follows a valid head is no HTTP: its request may be in the application's hands already."""
        self._guard.refused += 1
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
            if cycle.response_started:
                self.transport.close()
                return
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()  # the request it belongs to has been answered

    def _watch(self) -> None:
        """Bytes that complete no head do not buy more time."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_watching()  # a request is being served; how long its body may take is the guard's matter
        elif self._closing is None:
            self._closing = self.loop.call_later(self._guard.patience, self._close)

    def _stop_watching(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None

    def _close(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self._guard.refused += 1
            self.transport.close()
