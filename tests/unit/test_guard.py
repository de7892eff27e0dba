"""What the guard holds of a request, and for how long; driven as an ASGI application, without a server."""

import asyncio
import hmac

import pytest

from megatron_sao.buffer import guard as guard_module
from megatron_sao.buffer.body import LARGE
from megatron_sao.buffer.connection import CONNECTION
from megatron_sao.buffer.guard import Guard

MOST = 2 * LARGE


async def echo(scope, receive, send):
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def scope(path="/v1/trajectories", length=MOST, token=b"Bearer secret"):
    headers = [(b"authorization", token), (b"content-length", b"%d" % length)]
    return {"type": "http", "method": "POST", "path": path, "headers": headers}


async def request(guard, send, **fields):
    body = [{"type": "http.request", "body": bytes(fields.get("length", MOST)), "more_body": False}]

    async def receive():
        return body.pop()

    await guard(scope(**fields), receive, send)


def test_an_answer_that_nobody_reads_holds_neither_memory_nor_a_turn():
    """Ten clients do not read theirs; four such bodies may be in memory, and it may be the turn of two."""

    async def never_read(_):
        await asyncio.Event().wait()

    async def scenario():
        guard, statuses = Guard(echo, "secret", MOST), []
        deaf = [asyncio.create_task(request(guard, never_read)) for _ in range(10)]
        await asyncio.sleep(0.01)

        async def read(message):
            statuses.append(message.get("status"))

        await request(guard, read)
        await request(guard, read, path="/healthz", length=0)
        for task in deaf:
            task.cancel()
        return statuses

    assert asyncio.run(scenario()) == [200, None] * 2


def test_without_memory_for_a_body_it_is_put_off(monkeypatch):
    def begin(*_):
        raise MemoryError("Unable to allocate")

    async def scenario():
        guard, statuses = Guard(echo, "secret", MOST), []

        async def read(message):
            statuses.append(message.get("status"))

        monkeypatch.setattr(guard_module.InPlace, "begin", begin)
        await guard(scope() | {CONNECTION: object()}, None, read)
        monkeypatch.undo()
        await request(guard, read)
        return statuses, guard.put_off

    assert asyncio.run(scenario()) == ([503, None, 200, None], 1)


@pytest.mark.parametrize(("token", "status"), [(b"Bearer secret", 200), (b"Bearer Secret", 401), (b"", 401)])
def test_the_token_is_compared_in_constant_time(monkeypatch, token, status):
    compared, statuses = [], []

    def compare_digest(given, expected):
        compared.append((given, expected))
        return hmac_compare_digest(given, expected)

    async def read(message):
        statuses.append(message.get("status"))

    hmac_compare_digest = hmac.compare_digest
    monkeypatch.setattr(guard_module.hmac, "compare_digest", compare_digest)
    asyncio.run(request(Guard(echo, "secret", MOST), read, token=token))
    assert compared == [(token, b"Bearer secret")] and statuses[0] == status
