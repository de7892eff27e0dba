"""A request's body on its way in: in the pieces it comes in, or, if large, in the memory that it will be used from.

A large body's bytes would otherwise go through h11's buffer, uvicorn's and the application's, which for a long
trajectory takes as long as all else that is done with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import h11
from h11._readers import ContentLengthReader  # pinned; it knows how many bytes of a body are still to come
from uvicorn.protocols.http.h11_impl import H11Protocol

from megatron_sao.buffer.segments import Frame

LARGE = 256 * 2**10  # bytes; to take the connection over does not pay for fewer


class Pieces:
    """A body in the pieces it comes in."""

    frame = None

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self.size = 0  # bytes that are there

    def add(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self.size += len(piece)

    def whole(self) -> bytes:
        return b"".join(self._pieces)

    def end(self) -> int:
        """It is not wanted any longer. Returns how many bytes that frees; again: none."""
        self._pieces, freed, self.size = [], self.size, 0
        return freed


class InPlace(asyncio.BufferedProtocol):
    """A body of known length, received straight into its memory. It has the connection from :meth:`begin` until all
    but the last byte are there, or until :meth:`end`. The last byte is left to h11, which then goes on as if it had
    seen all of them.

    Args:
        http: whose connection it is.
        length: of the body, in bytes. Memory is taken only as they come.
        arrived: called with the number of bytes that came, whenever some did.
    """

    def __init__(self, http: H11Protocol, length: int, arrived: Callable[[int], None]) -> None:
        self._http, self._arrived = http, arrived
        self.frame: Frame | None = Frame(length)
        self._memory = self.frame.payload
        self._receiving = True
        self.size = 0  # bytes that are there

    @classmethod
    def begin(cls, http: H11Protocol, limit: int, arrived: Callable[[int], None]) -> InPlace | None:
        """Take the connection over, where what is still to come of the body is large and the whole within ``limit``."""
        connection, reader, here = http.conn, http.conn._reader, http.cycle.body
        if connection.their_state is not h11.SEND_BODY or not isinstance(reader, ContentLengthReader):
            return None
        if reader._remaining < LARGE or reader._length > limit or http.transport.is_closing():
            return None
        if connection.trailing_data[0] or len(here) != reader._length - reader._remaining:
            return None  # some of it waits in h11, or has been used already
        body = cls(http, reader._length, arrived)
        body.add(here)
        arrived(len(here))
        http.cycle.body = bytearray()
        http.transport.set_protocol(body)
        return body

    def add(self, piece: bytes) -> None:
        self._memory[self.size : self.size + len(piece)] = piece
        self.size += len(piece)

    def whole(self) -> memoryview:
        return self._memory.toreadonly()

    def end(self) -> int:
        """Neither more of it nor what is there is wanted any longer. Returns how many bytes that frees; again: none."""
        self._give_back()
        # uvloop's transport keeps a reference to this object as long as it is open.
        self.frame, self._memory = None, memoryview(b"")
        freed, self.size = self.size, 0
        return freed

    def _give_back(self) -> None:
        """The connection, to HTTP."""
        if self._receiving:
            self._receiving = False
            self._http.transport.set_protocol(self._http)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._memory[self.size : -1]

    def buffer_updated(self, nbytes: int) -> None:
        self._http.conn._reader._remaining -= nbytes
        self.size += nbytes
        self._arrived(nbytes)
        if self.size == len(self._memory) - 1:
            self._give_back()

    def eof_received(self) -> bool | None:
        return self._http.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._receiving = False
        self._http.connection_lost(exc)

    def pause_writing(self) -> None:
        self._http.pause_writing()

    def resume_writing(self) -> None:
        self._http.resume_writing()
