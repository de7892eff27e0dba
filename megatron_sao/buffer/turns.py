"""Whose large body comes in next."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """Large bodies come in few at a time, in the order of their requests. All at once, each would grow piece by piece
    in memory that no cache holds any more, and all would be whole at the same late moment.

    Args:
        room: bytes of the bodies whose turn it is; it may be the turn of two whatever their size.
        seconds: after which a body that is still not whole no longer keeps others waiting, since its client may be
            slow. One that is whole does until its turn ends: then it is the disk that is slow.
    """

    def __init__(self, room: int, seconds: float) -> None:
        self._room, self._seconds = room, seconds
        self._waiting: dict[Turn, None] = {}  # in order
        self._begun: dict[Turn, asyncio.TimerHandle] = {}

    @contextmanager
    def turn(self, size: int) -> Iterator[Turn]:
        """Stand in line with ``size`` bytes."""
        turn = Turn(size)
        self._waiting[turn] = None
        self._begin_some()
        try:
            yield turn
        finally:
            self.end(turn)

    def end(self, turn: Turn) -> None:
        """Its body is not needed any longer. Again: nothing."""
        self._waiting.pop(turn, None)
        if timer := self._begun.pop(turn, None):
            timer.cancel()
        self._begin_some()

    def whole(self, turn: Turn) -> None:
        """All of its body is there."""
        if timer := self._begun.get(turn):
            timer.cancel()

    def _begin_some(self) -> None:
        while self._waiting and self._has_room(first := next(iter(self._waiting))):
            del self._waiting[first]
            self._begun[first] = asyncio.get_running_loop().call_later(self._seconds, self.end, first)
            first.begun.set()

    def _has_room(self, turn: Turn) -> bool:
        return len(self._begun) < 2 or sum(other.size for other in self._begun) + turn.size <= self._room


class Turn:
    """One request's."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.begun = asyncio.Event()

    async def comes(self, patience: float) -> bool:
        """Wait for it; False if it does not come within ``patience`` seconds."""
        try:
            async with asyncio.timeout(patience):
                return await self.begun.wait()
        except TimeoutError:
            return False
