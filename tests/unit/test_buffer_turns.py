"""Large bodies come in few at a time, first come first served, and nobody keeps the others waiting for long."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from megatron_sao.buffer.turns import Turns
from tests.serving import skip_time


async def settle():
    """All happens that needs no time to pass."""
    for _ in range(20):
        await asyncio.sleep(0)


async def pass_time(seconds):
    skip_time(seconds)
    await settle()


class Crowd:
    """Requests that want a turn; ``began`` and ``refused`` hold their names. The bodies of ``whole`` come at once."""

    def __init__(self, room=10, seconds=1000.0, whole=()):
        self.turns = Turns(room, seconds)
        self.whole = whole
        self.began, self.refused, self._leave, self._tasks = [], [], {}, {}

    async def come(self, name, size, patience=5000.0):
        self._leave[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(self._request(name, size, patience))
        await settle()

    async def _request(self, name, size, patience):
        with self.turns.turn(size) as turn:
            has_come = await turn.comes(patience)
            (self.began if has_come else self.refused).append(name)
            if has_come:
                if name in self.whole:
                    self.turns.whole(turn)
                await self._leave[name].wait()

    async def end(self, name):
        self._leave[name].set()
        await settle()

    async def leave(self, name):
        self._tasks[name].cancel()
        await settle()

    @asynccontextmanager
    async def all_of(self, *requests):
        for name, size in requests:
            await self.come(name, size)
        try:
            yield self
        finally:
            for task in self._tasks.values():
                task.cancel()


def test_turns_begin_in_order_while_there_is_room():
    async def scenario():
        async with Crowd(room=10).all_of(("a", 4), ("b", 4), ("c", 4), ("d", 1)) as crowd:
            assert crowd.began == ["a", "b"]  # d has room, but c came before
            await crowd.end("b")
            assert crowd.began == ["a", "b", "c", "d"]

    asyncio.run(scenario())


def test_it_may_be_the_turn_of_two_whatever_their_size():
    async def scenario():
        async with Crowd(room=10).all_of(("a", 100), ("b", 100), ("c", 1)) as crowd:
            assert crowd.began == ["a", "b"]
            await crowd.end("a")
            assert crowd.began == ["a", "b", "c"]

    asyncio.run(scenario())


def test_a_slow_one_keeps_others_waiting_for_no_longer_than_a_turn():
    async def scenario():
        async with Crowd(room=10, seconds=1000).all_of(("a", 9), ("b", 9), ("c", 9)) as crowd:
            await pass_time(900)
            assert crowd.began == ["a", "b"]
            await pass_time(200)
            assert crowd.began == ["a", "b", "c"]
            await crowd.end("a")  # its turn was over long ago, which is no news
            await crowd.come("d", 9)
            assert crowd.began == ["a", "b", "c", "d"]

    asyncio.run(scenario())


def test_those_that_wait_for_the_disk_keep_their_turns():
    async def scenario():
        async with Crowd(room=10, seconds=1000, whole="ab").all_of(("a", 9), ("b", 9), ("c", 9)) as crowd:
            await pass_time(2000)
            assert crowd.began == ["a", "b"]
            await crowd.end("a")
            assert crowd.began == ["a", "b", "c"]

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["patience", "leave"])
def test_one_that_waits_no_longer_is_passed_over(how):
    async def scenario():
        async with Crowd(room=10).all_of(("a", 9), ("b", 1)) as crowd:
            await crowd.come("c", 9, patience=500)
            await crowd.come("d", 0)
            assert crowd.began == ["a", "b"]
            if how == "leave":
                await crowd.leave("c")
            else:
                await pass_time(600)
            assert (crowd.began, crowd.refused) == (["a", "b", "d"], ["c"] if how == "patience" else [])
            await crowd.end("a")
            await crowd.end("b")
            await crowd.come("e", 10)
            assert crowd.began[-1] == "e"  # nothing of c's is still taken

    asyncio.run(scenario())
