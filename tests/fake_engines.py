"""Engines of a few lines that answer ``/generate`` from a script, and a client that sees them in its registry."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from megatron_sao.buffer.client import EngineInfo
from megatron_sao.rollout.client import EngineClient, ModelLimits

LIMITS = ModelLimits(vocab_size=100, context=64)
Answer = Callable[[dict[str, Any]], web.Response | Awaitable[web.Response]]


def generated(ids: list[int], reason: str = "stop", version: str = "1.0") -> Answer:
    logprobs = [[-0.5, token, None] for token in ids]
    spans = [{"version": version, "start": 0, "end": len(ids)}] if ids else []
    meta = {"output_token_logprobs": logprobs, "weight_versions": spans, "finish_reason": {"type": reason}}
    return lambda body: web.json_response({"output_ids": ids, "meta_info": meta})


async def hanging(body: dict[str, Any]) -> web.Response:
    await asyncio.sleep(3600)


def http_error(status: int) -> Answer:
    return lambda body: web.Response(status=status, text="out of luck")


class FakeEngine:
    """Answers /generate with the next answer of a script (the last one for ever) and keeps what it was sent."""

    def __init__(self, id: str, *answers: Answer) -> None:
        self.id, self.answers, self.bodies = id, list(answers), []
        self.aborted = []  # ids of requests it was told to stop

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        answer = (self.answers.pop(0) if len(self.answers) > 1 else self.answers[0])(body)
        return await answer if inspect.isawaitable(answer) else answer

    async def abort(self, request: web.Request) -> web.Response:
        self.aborted.append((await request.json())["rid"])
        return web.Response()

    @asynccontextmanager
    async def serving(self):
        app = web.Application()
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/abort_request", self.abort)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield EngineInfo(self.id, f"http://127.0.0.1:{runner.addresses[0][1]}", "clean", "1.0", 1, 0.0)
        await runner.cleanup()


def with_engines(
    engines: list[FakeEngine],
    use: Callable[..., Awaitable[Any]],
    max_retries: int = 2,
    seconds: float = 90,
    **options: Any,
) -> Any:
    """Run ``use(client, registry)`` for ``seconds`` at most; ``registry`` is the list the client sees."""

    async def run() -> Any:
        async with asyncio.timeout(seconds):
            registry: list[EngineInfo] = []
            contexts = [engine.serving() for engine in engines]
            for context in contexts:
                registry.append(await context.__aenter__())

            async def listed() -> list[EngineInfo]:
                return list(registry)

            async with EngineClient(LIMITS, "token", listed, max_retries, **options) as client:
                result = await use(client, registry)
            for context in contexts:
                await context.__aexit__(None, None, None)
            return result

    return asyncio.run(run())
