"""How an SGLang server is started, on a GPU and on a CPU, and how one knows that it serves."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import httpx

from megatron_sao.config import ConfigError, RunConfig
from megatron_sao.launch.process import SupervisedProcess

CPU_STUB = Path(__file__).parent / "cpu_stub"
# A push brings every bucket into new memory, which to map in anew takes longer than the bytes themselves: glibc is to
# take large blocks from its heap as well, and to keep what is freed there.
KEEP_FREED_MEMORY = f"glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold={2**34}"
RESERVED = ("model_path", "host", "port", "weight_version", "api_key", "admin_api_key", "tp_size", "tp")


class ServerFailed(RuntimeError):
    """The SGLang server exited or did not answer in time; the message ends with its last log lines."""


def serves_on_cpu(config: RunConfig) -> bool:
    if config.model.device != "auto":
        return config.model.device == "cpu"
    import torch  # three seconds, so only where the answer is not in the config

    return not torch.cuda.is_available()


def sglang_command(config: RunConfig, port: int, model_path: Path, version: str) -> tuple[list[str], dict[str, str]]:
    """The command line and whole environment of one server; ``engine.sglang`` adds to and overrides the flags.

    The server reads its keys from MEGATRON_SAO_TOKEN.

    Args:
        version: label of the weights in ``model_path``, "incarnation.n".

    Raises:
        ConfigError: ``engine.sglang`` names a flag that this function owns.
    """
    for name in RESERVED:
        if name in config.engine.sglang:
            raise ConfigError(f"engine.sglang.{name} is set by the run itself (engine.tp, engine.port, model.path)")
    flags: dict[str, Any] = {
        "model_path": model_path,
        "host": config.engine.host,
        "port": port,
        "tp_size": config.engine.tp,
        "dtype": config.model.dtype,
        "weight_version": version,
        "skip_tokenizer_init": True,  # token ids in, token ids out
        "enable_return_routed_experts": config.algorithm.routing_replay,
        "log_level": "warning",  # at "info" every request costs a line
    }
    env = os.environ | {
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # else /health hangs while a push is on
        "SGLANG_HEALTH_CHECK_TIMEOUT": str(config.engine.health_timeout),  # of /health_generate
        "PYTHONWARNINGS": "ignore",  # the server's last words should be its reason, not a deprecation
    }
    env |= dict.fromkeys(("no_proxy", "NO_PROXY"), _without_proxy(config.engine.host))
    if serves_on_cpu(config):
        flags |= _cpu_flags(config)
        env |= _cpu_environment(config, env)
    flags |= config.engine.sglang
    argv = [sys.executable, "-m", "megatron_sao.rollout.sglang_server"]
    for name, value in flags.items():
        argv += _flag(name, value)
    return argv, env


def _without_proxy(host: str) -> str:
    """A server asks itself whether it is warm, and ends if a proxy answers."""
    others = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    return ",".join(filter(None, [others, host, "localhost", "127.0.0.1"]))


def _cpu_flags(config: RunConfig) -> dict[str, Any]:
    episodes = -(-config.rollout.workers * config.rollout.concurrency // config.engine.count)
    return {
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "disable_overlap_schedule": True,
        "sleep_on_idle": True,  # an idle scheduler would take a core from the trainer
        "mem_fraction_static": 0.3,
        "max_running_requests": episodes,
        "max_total_tokens": 2 * max(episodes, 16) * config.rollout.max_tokens,  # as much again for cached prefixes
    }


def _cpu_environment(config: RunConfig, env: dict[str, str]) -> dict[str, str]:
    binding = "|".join(str(core % (os.cpu_count() or 1)) for core in range(config.engine.tp))
    return {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_NCCL_SO_PATH": "/nonexistent.so",  # tensor parallelism over gloo
        "SGLANG_CPU_OMP_THREADS_BIND": env.get("SGLANG_CPU_OMP_THREADS_BIND", binding),
        "GLIBC_TUNABLES": env.get("GLIBC_TUNABLES", KEEP_FREED_MEMORY),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(CPU_STUB), env.get("PYTHONPATH")])),
    }


def _flag(name: str, value: Any) -> list[str]:
    """``{chunked_prefill_size: 4096}`` as ``--chunked-prefill-size 4096``; true is a bare flag, false and null none."""
    flag = "--" + name.replace("_", "-")
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    if isinstance(value, list):
        return [flag, *map(str, value)]
    # a value that begins with "-" would be taken for a flag of its own; SGLang knows `--config` by the bare word alone
    return [f"{flag}={value}"] if str(value).startswith("-") else [flag, str(value)]


async def wait_until_serving(server: SupervisedProcess, url: str, token: str, version: str, timeout: float) -> None:
    """Return when the server has generated a token under weights ``version``.

    Raises:
        ServerFailed: it exited, did not answer within ``timeout`` seconds, or another server has the port.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 1.0}}
    problem = "nothing listens there yet"
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {token}"}, trust_env=False) as http:
        while loop.time() < deadline:
            if server.exit_code() is not None:
                raise ServerFailed(f"SGLang ended while starting ({server.describe_exit()}):\n{server.last_words()}")
            try:
                response = await http.post(f"{url}/generate", json=body, timeout=30.0)
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                if response.status_code == 200:
                    served = response.json()["meta_info"]["weight_version"]
                    if served != version:
                        raise ServerFailed(f"{url} serves weights {served!r}, not {version!r}: the port is another's")
                    return
                if response.status_code in (401, 404, 405):
                    raise ServerFailed(
                        f"{url} is another program's port (HTTP {response.status_code}); set engine.port or free it"
                    )
                problem = f"HTTP {response.status_code}: {response.text[:300]}"
            await asyncio.sleep(0.25)
    raise ServerFailed(
        f"SGLang at {url} did not serve within engine.start_timeout = {timeout:g} s ({problem}):\n{server.last_words()}"
    )
