"""How long the buffer's clients wait, by a clock that only their pauses move."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace

import httpx
import pytest

from megatron_sao.buffer import client as module
from megatron_sao.buffer.client import AsyncBufferClient, BufferClient, BufferUnavailable

URL = "http://buffer"


def full() -> httpx.Response:
    return httpx.Response(429, json={"error": "the buffer is full"}, headers={"Retry-After": "1"})


def full_disk() -> httpx.Response:
    return httpx.Response(503, json={"error": "free some disk space"})


def broken() -> httpx.Response:
    return httpx.Response(500, text="a bug")


def unreachable() -> httpx.Response:
    raise httpx.ConnectError("connection refused")


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        fake = SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep)
        monkeypatch.setattr(module, "time", fake)
        monkeypatch.setattr(module, "asyncio", SimpleNamespace(sleep=self.sleep_async))

    def sleep(self, seconds: float) -> None:
        self.now += seconds + 1e-6  # as a real one it is never early

    async def sleep_async(self, seconds: float) -> None:
        self.sleep(seconds)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def stats(answer: Callable[[], httpx.Response], **options) -> dict:
    """What a synchronous client gets from a buffer that gives these answers."""
    client = BufferClient(URL, "token", **options)
    client._http = httpx.Client(base_url=URL, transport=httpx.MockTransport(lambda _: answer()))
    return client.stats()


def engines(answer: Callable[[], httpx.Response]) -> list:
    """The same of an asynchronous one."""
    client = AsyncBufferClient(URL, "token")
    client._http = httpx.AsyncClient(base_url=URL, transport=httpx.MockTransport(lambda _: answer()))
    return asyncio.run(client.engines())


@pytest.mark.parametrize("refusal", [full, full_disk])
def test_what_tells_to_come_again_is_waited_for_however_long_with_a_line_a_minute(clock, caplog, refusal):
    hours = 5 * 3600
    assert stats(lambda: refusal() if clock.now < hours else httpx.Response(200, json={"steps": 3})) == {"steps": 3}
    assert hours <= clock.now < hours + 10
    began = clock.now
    assert engines(lambda: refusal() if clock.now < began + hours else httpx.Response(200, json={"engines": []})) == []
    sentence = refusal().json()["error"]
    assert all(sentence in record.message for record in caplog.records)
    assert 2 * hours / 70 < len(caplog.records) <= 2 * hours / 60


def test_the_pause_is_at_least_what_the_answer_asks_for(clock):
    asked_at = []

    def answer():
        asked_at.append(clock.now)
        return full() if len(asked_at) < 5 else httpx.Response(200, json={})

    stats(answer)
    assert all(later - earlier >= 1.0 for earlier, later in pairwise(asked_at))


@pytest.mark.parametrize("failure", [unreachable, broken])
def test_the_time_of_an_absent_or_broken_buffer_is_up_and_begins_anew_with_every_answer(clock, failure):
    def answer():
        return full() if 110 < clock.now < 115 else failure()

    with pytest.raises(BufferUnavailable, match=r"has not served a call for 120 s \(last: "):
        stats(answer)
    assert clock.now > 115 + 110
    began = clock.now
    with pytest.raises(BufferUnavailable):
        engines(failure)
    assert clock.now == pytest.approx(began + 120, abs=0.1)


def test_a_body_that_took_too_long_on_its_way_is_sent_again(clock):
    answers = [httpx.Response(408, json={"error": "the body came too slowly"}), httpx.Response(200, json={})]
    assert stats(lambda: answers.pop(0)) == {} and not answers


def test_a_client_that_is_to_try_once_does_not_wait_for_a_full_buffer(clock):
    with pytest.raises(BufferUnavailable, match="429: the buffer is full"):
        stats(full, give_up_after=0.0)
    assert clock.now == 0


def test_many_calls_that_wait_for_the_same_are_one_line_a_minute(clock, caplog):
    async def sleep(seconds: float) -> None:
        await asyncio.sleep(0)  # the others' turn
        clock.sleep(seconds / 20)  # all 20 pause at the same time

    module.asyncio.sleep = sleep
    client = AsyncBufferClient(URL, "token")
    minutes = 30 * 60
    answer = lambda _: full_disk() if clock.now < minutes else httpx.Response(200, json={"engines": []})  # noqa: E731
    client._http = httpx.AsyncClient(base_url=URL, transport=httpx.MockTransport(answer))

    async def wait() -> list:
        return await asyncio.gather(*(client.engines() for _ in range(20)))

    assert asyncio.run(wait()) == [[]] * 20
    assert 25 <= len(caplog.records) <= 30


def test_a_call_that_waits_can_be_cancelled():
    client = AsyncBufferClient(URL, "token")
    client._http = httpx.AsyncClient(base_url=URL, transport=httpx.MockTransport(lambda _: full_disk()))

    async def wait() -> None:
        call = asyncio.create_task(client.engines())
        await asyncio.sleep(0.3)
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled()

    asyncio.run(wait())
