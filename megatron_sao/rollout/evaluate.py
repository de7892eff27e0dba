"""``megatron-sao eval``: held-out success of a model directory, or of running servers, without a buffer."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from megatron_sao.buffer.client import EngineInfo
from megatron_sao.config import ConfigError, RunConfig
from megatron_sao.data.tasks import Task, load_tasks
from megatron_sao.data.trajectory import Trajectory
from megatron_sao.launch.ports import port_of, reserve_port
from megatron_sao.launch.process import SupervisedProcess
from megatron_sao.logs import start_logging
from megatron_sao.rollout.client import EngineClient, EngineError, ModelLimits
from megatron_sao.rollout.engine import INITIAL_VERSION
from megatron_sao.rollout.sglang_backend import ServerFailed, sglang_command, wait_until_serving
from megatron_sao.rollout.worker import EnvironmentBroken, Player, load_tokenizer

log = logging.getLogger(__name__)


def main(config: RunConfig, run_dir: Path, hf_dir: Path | None, engine_urls: list[str], prompts: int | None) -> int:
    """Play each held-out prompt once at temperature 1 and print one JSON line. Returns the exit code.

    Args:
        hf_dir: model to serve for the purpose; default ``model.path``. Unused where ``engine_urls`` are given.
        engine_urls: servers that already run, with MEGATRON_SAO_TOKEN as their key.
        prompts: how many of the held-out prompts; default ``eval.prompts``.

    Raises:
        ConfigError: no model or held-out tasks, or unusable ones.
    """
    if hf_dir and not (hf_dir / "config.json").is_file():
        raise ConfigError(f"--hf-dir {hf_dir} holds no config.json; name a Hugging Face model directory")
    start_logging("evaluation", logging.WARNING)
    os.environ.setdefault("MEGATRON_SAO_TOKEN", secrets.token_urlsafe(32))
    try:
        if config.data.eval is None:
            raise ConfigError("data.eval is not set; name the JSONL file with the held-out tasks")
        tasks = load_tasks(config.data.eval)[: prompts or config.eval.prompts]
        asyncio.run(_evaluate(config, run_dir, hf_dir or config.model.path, engine_urls, tasks))
    except (ServerFailed, EngineError, EnvironmentBroken) as error:
        log.error("evaluation failed: %s", error)
        return 1
    return 0


async def _evaluate(config: RunConfig, run_dir: Path, model: Path, urls: list[str], tasks: list[Task]) -> None:
    limits = ModelLimits.of(model, config.engine.sglang.get("context_length"))
    slots = asyncio.Semaphore(config.rollout.concurrency)
    async with _servers(config, run_dir, model, urls) as servers:

        async def registry() -> list[EngineInfo]:
            return servers

        async def episode(task: Task) -> Trajectory:
            async with slots:
                return await player.play(task, "eval", epoch=0, attempt=0)

        token = os.environ["MEGATRON_SAO_TOKEN"]
        async with EngineClient(limits, token, registry, config.rollout.max_retries) as engine:
            player = Player(config, engine, load_tokenizer(model))
            trajectories = await asyncio.gather(*(episode(task) for task in tasks))
    print(json.dumps(summary(trajectories)), flush=True)


@asynccontextmanager
async def _servers(config: RunConfig, run_dir: Path, model: Path, urls: list[str]) -> AsyncIterator[list[EngineInfo]]:
    """The given servers, or one of our own that serves ``model`` and ends with the block."""
    if urls:
        yield [EngineInfo(url, url.rstrip("/"), "clean", None, config.engine.tp, 0.0) for url in urls]
        return
    reserved = reserve_port(config.engine.host, config.engine.port)
    port = port_of(reserved)
    url = f"http://{config.engine.host}:{port}"
    argv, env = sglang_command(config, port, model, INITIAL_VERSION)
    logs = run_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    server = SupervisedProcess("sglang-eval", argv, env, logs)
    server.start()
    try:
        token = os.environ["MEGATRON_SAO_TOKEN"]
        await wait_until_serving(server, url, token, INITIAL_VERSION, config.engine.start_timeout)
        yield [EngineInfo("eval", url, "clean", INITIAL_VERSION, config.engine.tp, 0.0)]
    finally:
        server.kill()
        reserved.close()


def summary(trajectories: list[Trajectory]) -> dict[str, object]:
    """What an evaluation reports. Success is a positive total reward; episodes the environment failed are left out."""
    played = [trajectory for trajectory in trajectories if trajectory.failure is None]
    count = len(played)
    return {
        "success_rate": sum(t.total_reward > 0 for t in played) / count if count else None,
        "reward_mean": sum(t.total_reward for t in played) / count if count else None,
        "prompts": count,
        "failed": len(trajectories) - count,
        "truncated": sum(t.truncated for t in played),
        "tokens": sum(t.num_tokens for t in played),
        "action_tokens": sum(t.num_action_tokens for t in played),
        "weight_versions": sorted({version for t in played for version in t.action_versions}),
    }
