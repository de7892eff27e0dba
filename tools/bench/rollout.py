"""``python -m tools.bench.rollout MODEL_DIR``: what the rollout worker costs, beside the same load straight to SGLang.

One SGLang server; ``--concurrency`` episodes at once, each of ``--turns`` turns with an observation in between.
*Straight*: coroutines that post to ``/generate`` and read the answer, nothing else. *Worker*: the product's Worker,
Player, Session and EngineClient with an environment that plays the same turns; visits come from memory, and every
trajectory is encoded as for the buffer. Both ask with the same parameters. They take turns, ``--rounds`` each, and the
medians are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import secrets
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp

from megatron_sao.buffer.client import EngineInfo, Lease
from megatron_sao.config import RunConfig, SamplingConfig, parse_config
from megatron_sao.data.trajectory import Trajectory
from megatron_sao.launch.ports import port_of, reserve_port
from megatron_sao.launch.process import SupervisedProcess
from megatron_sao.rollout.client import EngineClient, ModelLimits, _sampling_params
from megatron_sao.rollout.engine import INITIAL_VERSION
from megatron_sao.rollout.sglang_backend import sglang_command, wait_until_serving
from megatron_sao.rollout.worker import Player, Worker

PROMPT_TOKENS, OBSERVATION_TOKENS = 16, 8


class Turns:
    """The environment of the measurement; also says what the straight load sends."""

    def __init__(self, tokenizer: Any, turns: int, tokens: int, vocab_size: int) -> None:
        self.turns, self.tokens, self.vocab_size = turns, tokens, vocab_size

    def ids(self, seed: str, count: int) -> list[int]:
        return random.Random(seed).choices(range(1, self.vocab_size), k=count)

    async def run(self, session: Any, task: Any) -> None:
        session.prompt(self.ids(task.id, PROMPT_TOKENS))
        for turn in range(self.turns):
            await session.generate(max_new_tokens=self.tokens)
            session.observe(self.ids(f"{task.id}/{turn}", OBSERVATION_TOKENS))
        session.finish(1.0)


class Visits:
    """A buffer in memory: gives out ``count`` visits and keeps what is submitted."""

    def __init__(self, round: str, count: int) -> None:
        self._leases = [
            Lease(str(i), "train", {"id": f"{round}/{i}", "prompt": "-", "label": 0, "extra": {}}, 0, 1, 3600.0)
            for i in range(count)
        ]
        self._open = count
        self.tokens = 0
        self.over = asyncio.Event()

    async def lease(self, worker_id: str, max_leases: int, wait: float) -> list[Lease]:
        if not self._leases:
            await asyncio.sleep(3600)
        given, self._leases = self._leases[:max_leases], self._leases[max_leases:]
        return given

    async def submit(self, trajectory: Trajectory) -> str:
        trajectory.encode()
        self.tokens += trajectory.num_action_tokens
        self._open -= 1
        if not self._open:
            self.over.set()
        return "accepted"

    async def renew(self, visit_id: str, attempt: int) -> float:
        return 3600.0

    async def release(self, visit_id: str, attempt: int, reason: str) -> None:
        raise SystemExit(f"an episode was given back: {reason}")


async def through_worker(config: RunConfig, player: Player, round: str, episodes: int) -> int:
    """Tokens sampled in ``episodes`` episodes."""
    visits = Visits(round, episodes)
    worker = asyncio.create_task(Worker(config, "bench", visits, player).run())
    await visits.over.wait()
    worker.cancel()
    await asyncio.wait([worker])
    return visits.tokens


async def straight(config: RunConfig, load: Turns, url: str, token: str, round: str, episodes: int) -> int:
    """The same, without anything of ours in between."""
    queue, sampled = [f"{round}/{i}" for i in range(episodes)], 0
    parameters = _sampling_params(SamplingConfig(), load.tokens, [])
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {token}"}, connector=connector, timeout=timeout
    ) as http:

        async def client() -> None:
            nonlocal sampled
            while queue:
                episode = queue.pop()
                ids = load.ids(episode, PROMPT_TOKENS)
                for turn in range(load.turns):
                    body = {"input_ids": ids, "sampling_params": parameters, "return_logprob": True}
                    async with http.post(f"{url}/generate", json=body | {"logprob_start_len": -1}) as response:
                        answer = (await response.json())["output_ids"]
                    sampled += len(answer)
                    ids = [*ids, *answer, *load.ids(f"{episode}/{turn}", OBSERVATION_TOKENS)]

        await asyncio.gather(*(client() for _ in range(config.rollout.concurrency)))
    return sampled


async def rate(load: Callable[[], Awaitable[int]]) -> float:
    """Tokens per second."""
    started = time.perf_counter()
    tokens = await load()
    return tokens / (time.perf_counter() - started)


async def compare(config: RunConfig, options: argparse.Namespace, url: str, token: str) -> None:
    limits = ModelLimits.of(config.model.path, config.engine.sglang.get("context_length"))
    load = Turns(None, **config.rollout.environment_args)

    async def registry() -> list[EngineInfo]:
        return [EngineInfo("e", url, "clean", INITIAL_VERSION, 1, 0.0)]

    async with EngineClient(limits, token, registry) as engine:
        player = Player(config, engine, None)
        await straight(config, load, url, token, "warm-up", options.concurrency)
        rates: dict[str, list[float]] = {"straight": [], "worker": []}
        for round in range(options.rounds):
            for name, measured in (
                ("straight", lambda key: straight(config, load, url, token, key, options.episodes)),
                ("worker", lambda key: through_worker(config, player, key, options.episodes)),
            ):
                rates[name].append(await rate(lambda m=measured, key=f"{name} {round}": m(key)))
                print(f"{name}: {rates[name][-1]:.0f} tokens/s", flush=True)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    print(
        f"median of {options.rounds}: straight {medians['straight']:.0f}, worker {medians['worker']:.0f} tokens/s: "
        f"{medians['worker'] / medians['straight']:.1%}"
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a Hugging Face directory, e.g. of tools/make_tiny_model.py")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--episodes", type=int, default=192, help="of one round")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32, help="per turn")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(argv)
    token = os.environ["MEGATRON_SAO_TOKEN"] = secrets.token_urlsafe(16)
    arguments = {
        "turns": options.turns,
        "tokens": options.tokens,
        "vocab_size": ModelLimits.of(options.model).vocab_size,
    }
    config = parse_config(
        {
            "name": "bench", "model": {"path": str(options.model)}, "data": {"train": "unused"},
            "rollout": {
                "environment": f"{Turns.__module__}:Turns", "environment_args": arguments,
                "concurrency": options.concurrency, "max_turns": options.turns,
            },
            "engine": {"sglang": {"max_running_requests": options.concurrency}},
        }
    )  # fmt: skip
    with reserve_port("127.0.0.1") as free:
        port = port_of(free)
    command, environment = sglang_command(config, port, options.model, INITIAL_VERSION)
    with tempfile.TemporaryDirectory() as logs:
        server = SupervisedProcess("sglang", command, environment, Path(logs))
        server.start()
        try:
            url = f"http://127.0.0.1:{port}"
            asyncio.run(wait_until_serving(server, url, token, INITIAL_VERSION, 600))
            asyncio.run(compare(config, options, url, token))
        finally:
            server.kill()


if __name__ == "__main__":
    main()
