"""A process that answers SGLang's ``/generate`` with random tokens, slowly, for tests of the fleet around it.

It can be paused, and gets its weight version by a call: tokens sampled before and after carry their own.
"""

import asyncio
import random
import sys
from itertools import pairwise

from aiohttp import web

TOKENS_PER_SECOND = 20.0


class Engine:
    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.version, self.in_flight, self.going = "0.0", 0, asyncio.Event()
        self.going.set()

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        tokens, logprobs, versions = [], [], []
        self.in_flight += 1
        try:
            for _ in range(body["sampling_params"]["max_new_tokens"]):
                await asyncio.sleep(1 / TOKENS_PER_SECOND)
                await self.going.wait()
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
        """Stand still for as long as a push takes, then go on under the new version."""
        self.going.clear()
        await asyncio.sleep(0.2)
        self.version = (await request.json())["version"]
        self.going.set()
        return web.Response()

    async def state(self, _: web.Request) -> web.Response:
        return web.json_response({"in_flight": self.in_flight})


async def main(port_file: str, seed: int) -> None:
    engine, app = Engine(seed), web.Application()
    app.router.add_post("/generate", engine.generate)
    app.router.add_post("/push", engine.push)
    app.router.add_post("/abort_request", engine.state)
    app.router.add_get("/state", engine.state)
    runner = web.AppRunner(app, handler_cancellation=True)  # as SGLang: a client that leaves ends its request
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    with open(port_file, "w") as file:
        file.write(f"http://127.0.0.1:{runner.addresses[0][1]}\n")
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
