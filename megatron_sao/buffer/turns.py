"""Whose large body comes in next."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """Large bodies come in few at a time, in the order of their requests. All at once, each would grow piece by piece
    in memory that no cache holds any more, and all would be whole at the same late moment.

    Args:
        room: bytes of the bodies whose turn it is; it may be the turn of two whatever their size.
        seconds: after which a turn no longer keeps others waiting, since its client may be slow.
    """

    def __init__(self, room: int, seconds: float) -> None:
        self._room, self._seconds = room, seconds
        self._waiting: dict[_Turn, None] = {}  # in order
        self._begun: dict[_Turn, asyncio.TimerHandle] = {}

    @asynccontextmanager
    async def turn(self, size: int, patience: float) -> AsyncIterator[bool]:
        """Wait for a turn of ``size`` bytes; False if it does not come within ``patience`` seconds."""
        turn = _Turn(size)
        self._waiting[turn] = None
        self._begin_some()
        try:
            yield await turn.comes(patience)
        finally:
            self._end(turn)

    def _begin_some(self) -> None:
        while self._waiting and self._has_room(first := next(iter(self._waiting))):
            del self._waiting[first]
            self._begun[first] = asyncio.get_running_loop().call_later(self._seconds, self._end, first)
            first.begin.set()

    def _has_room(self, turn: _Turn) -> bool:
        return len(self._begun) < 2 or sum(other.size for other in self._begun) + turn.size <= self._room

    def _end(self, turn: _Turn) -> None:
        self._waiting.pop(turn, None)
        if timer := self._begun.pop(turn, None):
            timer.cancel()
        self._begin_some()


class _Turn:
    def __init__(self, size: int) -> None:
        self.size = size
        self.begin = asyncio.Event()

    async def comes(self, patience: float) -> bool:
        try:
            async with asyncio.timeout(patience):
                return await self.begin.wait()
        except TimeoutError:
            return False
