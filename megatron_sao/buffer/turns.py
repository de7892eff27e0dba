"""Whose large body comes in next."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """Large bodies come in few at a time, in the order of their requests. All at once, each would grow piece by piece
    in memory that no cache holds any more, and all would be whole at the same late moment.

    Args:
        room: bytes of the bodies that have their turn; two may have it whatever their size.
        seconds: after which a turn no longer keeps others waiting, since its client may be slow.
    """

    def __init__(self, room: int, seconds: float) -> None:
        self._room, self._seconds = room, seconds
        self._waiting: deque[_Turn] = deque()
        self._begun: dict[_Turn, asyncio.TimerHandle] = {}

    @asynccontextmanager
    async def turn(self, size: int, patience: float) -> AsyncIterator[bool]:
        """Wait for a turn of ``size`` bytes; False if after ``patience`` seconds it has not come."""
        turn = _Turn(size)
        self._waiting.append(turn)
        try:
            self._begin_some()
            try:
                await asyncio.wait_for(turn.begins, patience)
            except TimeoutError:
                yield False
            else:
                yield True
        finally:
            turn.begins.cancel()
            self._end(turn)

    def _begin_some(self) -> None:
        while self._waiting and self._has_room(self._waiting[0].size):
            turn = self._waiting.popleft()
            if not turn.begins.cancelled():
                turn.begins.set_result(None)
                self._begun[turn] = asyncio.get_running_loop().call_later(self._seconds, self._end, turn)

    def _has_room(self, size: int) -> bool:
        return len(self._begun) < 2 or sum(turn.size for turn in self._begun) + size <= self._room

    def _end(self, turn: _Turn) -> None:
        if timer := self._begun.pop(turn, None):
            timer.cancel()
        self._begin_some()


class _Turn:
    def __init__(self, size: int) -> None:
        self.size = size
        self.begins: asyncio.Future[None] = asyncio.get_running_loop().create_future()
