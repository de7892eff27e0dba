"""A tiny model and the run config around it, for tests against real SGLang servers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_sao.buffer.client import EngineInfo
from megatron_sao.config import RunConfig, parse_config
from megatron_sao.launch.ports import port_of, reserve_port
from megatron_sao.launch.process import SupervisedProcess
from megatron_sao.rollout.engine import INITIAL_VERSION
from megatron_sao.rollout.sglang_backend import sglang_command, wait_until_serving

CHARACTERS = "_0123456789+-*()=<>;A.E"  # 23; "_" is the padding
CONTEXT = 256
TOKEN = "-token-of-the-test-session"  # every 64th that a run draws begins with "-"


@dataclass(frozen=True)
class Server:
    """A running SGLang server of the test session."""

    engine: EngineInfo
    config: RunConfig
    process: SupervisedProcess

    @property
    def model_path(self) -> Path:
        return self.config.model.path


@contextmanager
def serving(name: str, config: RunConfig, log_dir: Path) -> Iterator[Server]:
    """A real server, started by the product's own command; killed at the end even if tests fail."""
    with starting(name, config, log_dir) as server:
        wait_for(server)
        yield server


@contextmanager
def starting(name: str, config: RunConfig, log_dir: Path) -> Iterator[Server]:
    """The same, but it may not serve yet, so that several can start at the same time."""
    os.environ["MEGATRON_SAO_TOKEN"] = TOKEN
    reserved = reserve_port("127.0.0.1")
    port = port_of(reserved)
    argv, env = sglang_command(config, port, config.model.path, INITIAL_VERSION)
    process = SupervisedProcess(name, argv, env, log_dir)
    process.start()
    try:
        engine = EngineInfo(name, f"http://127.0.0.1:{port}", "clean", INITIAL_VERSION, config.engine.tp, 0.0)
        yield Server(engine, config, process)
    finally:
        process.kill()
        reserved.close()


def wait_for(server: Server) -> None:
    asyncio.run(wait_until_serving(server.process, server.engine.url, TOKEN, INITIAL_VERSION, timeout=420))


def run_config(model_path: Path, **sections: Any) -> RunConfig:
    """The smallest run config around a model directory."""
    raw = {
        "name": "test",
        "model": {"path": model_path, "device": "cpu"},
        "data": {"train": "unused.jsonl"},
        "rollout": {"environment": "unused:Unused", "max_tokens": 128, "concurrency": 32},
    }
    return parse_config(raw | sections)


def skip_time(seconds: float) -> None:
    """Have so much time pass for the timers of the running event loop, at once: of a real second nobody knows how much
    a machine that stalls leaves to those that wait."""
    loop = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + seconds


async def eventually(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """What ``condition`` returns as soon as that is true."""
    async with asyncio.timeout(seconds):
        while not (value := condition()):
            await asyncio.sleep(0.02)
        return value
