"""Processes of the fleet's tests: an engine that is a stub, the product's worker, and what it plays."""

import asyncio
import os
import random
import sys
from itertools import pairwise
from pathlib import Path

from aiohttp import web

from megatron_sao.config import load_config
from megatron_sao.data.tasks import Task
from megatron_sao.rollout import worker
from megatron_sao.rollout.session import Session

TOKENS_PER_SECOND = 20.0


class Engine:
    """Answers SGLang's ``/generate`` with random tokens, slowly. A push makes it stand still for a while and gives it a
    version: tokens sampled before and after carry their own. When it is told to stand still, turns get no further than
    to their first token until a push."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.version, self.in_flight, self.going = "0.0", 0, asyncio.Event()
        self.going.set()
        self.free = asyncio.Event()
        self.free.set()

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        tokens, logprobs, versions = [], [], []
        self.in_flight += 1
        try:
            for _ in range(body["sampling_params"]["max_new_tokens"]):
                await asyncio.sleep(1 / TOKENS_PER_SECOND)
                await self.going.wait()
                if tokens:
                    await self.free.wait()
                tokens.append(self._rng.randrange(1, 7))
                logprobs.append([-self._rng.random(), tokens[-1], None])
                versions.append(self.version)
        finally:
            self.in_flight -= 1
        edges = [i for i in range(len(versions)) if i == 0 or versions[i] != versions[i - 1]] + [len(versions)]
        spans = [{"version": versions[a], "start": a, "end": b} for a, b in pairwise(edges)]
        meta = {"output_token_logprobs": logprobs, "weight_versions": spans, "finish_reason": {"type": "length"}}
        return web.json_response({"output_ids": tokens, "meta_info": meta})

    async def push(self, request: web.Request) -> web.Response:
        self.going.clear()
        await asyncio.sleep(0.2)
        self.version = (await request.json())["version"]
        self.going.set()
        self.free.set()
        return web.Response()

    async def stand_still(self, _: web.Request) -> web.Response:
        self.free.clear()
        return web.Response()

    async def state(self, _: web.Request) -> web.Response:
        return web.json_response({"in_flight": self.in_flight})


async def serve_engine(address: Path, seed: int) -> None:
    engine, app = Engine(seed), web.Application()
    app.router.add_post("/generate", engine.generate)
    app.router.add_post("/push", engine.push)
    app.router.add_post("/stand_still", engine.stand_still)
    app.router.add_post("/abort_request", engine.state)
    app.router.add_get("/state", engine.state)
    runner = web.AppRunner(app, handler_cancellation=True)  # as SGLang: a client that leaves ends its request
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    address.write_text(f"http://127.0.0.1:{runner.addresses[0][1]}\n")
    await asyncio.Event().wait()


def run_engine(address: Path, seed: int) -> None:
    asyncio.run(serve_engine(address, seed))


def run_worker(directory: Path, buffer_url: str, token: str, worker_id: str) -> None:
    """The product's worker; without a tokenizer, which takes longest to import and which TwoTurns does not need."""
    os.environ |= {"MEGATRON_SAO_BUFFER": buffer_url, "MEGATRON_SAO_TOKEN": token}
    log = os.open(directory / f"{worker_id}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    worker.load_tokenizer = lambda path: None
    worker.RELEASE_SECONDS = 60.0  # on a machine that stalls it needs more than two
    sys.exit(worker.main(load_config(directory / "run.yaml"), directory, worker_id))


class TwoTurns:
    """The environment: two turns of eight tokens, and a reward for the first token of the second."""

    def __init__(self, tokenizer: None) -> None: ...

    async def run(self, session: Session, task: Task) -> None:
        session.prompt([1, 2, 3])
        await session.generate(max_new_tokens=8)
        session.observe([4, 5])
        session.finish(float((await session.generate(max_new_tokens=8))[0] > 3))
