"""The sidecar of one SGLang server: starts it, registers it with the buffer, restarts it a bounded number of times.

A registered engine is "dirty" until the trainer has pushed current weights into it, so a restarted server never
answers workers with the weights it was started from.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from pathlib import Path

from megatron_sao.buffer.client import AsyncBufferClient, BufferError, BufferUnavailable, buffer_address
from megatron_sao.config import ConfigError, RunConfig
from megatron_sao.launch.ports import port_of, reserve_port
from megatron_sao.launch.process import SupervisedProcess
from megatron_sao.logs import Seldom, start_logging
from megatron_sao.rollout.health import HealthProbe
from megatron_sao.rollout.sglang_backend import ServerFailed, sglang_command, wait_until_serving

log = logging.getLogger(__name__)
copy_log = logging.getLogger(f"{__name__}.copy")  # five times a second
copy_log.addFilter(Seldom(60.0))

INITIAL_VERSION = "0.0"  # the weights of model.path, before any push
HEARTBEAT_SECONDS = 3.0  # the registry calls an engine down after 15 without one
WATCH_SECONDS = 0.2


def main(config: RunConfig, run_dir: Path, index: int, port: int) -> int:
    """Run sidecar ``index`` until SIGTERM. Returns the exit code; its last log lines say why it is not 0."""
    start_logging(f"engine-{index}")
    try:
        asyncio.run(until_signalled(Sidecar(config, run_dir, index, port).run()))
    except (ConfigError, ServerFailed, BufferError, BufferUnavailable) as error:
        log.error("engine %d gives up: %s", index, error)
        return 2 if isinstance(error, ConfigError) else 1  # 2: it would end the same way again
    return 0


class Sidecar:
    """One server and its entry ``engine-<index>`` in the registry. ``port`` 0: a free one at every start."""

    def __init__(self, config: RunConfig, run_dir: Path, index: int, port: int) -> None:
        self.id = f"engine-{index}"
        self._config = config
        self._run_dir = run_dir
        self._log_dir = run_dir / "logs"
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self._index = index
        self._port = port
        url, self._token = buffer_address()
        self._buffer = AsyncBufferClient(url, self._token)

    async def run(self) -> None:
        """Serve until cancelled.

        Raises:
            ServerFailed: the server died more than ``engine.max_restarts`` times; ends with its last log lines.
            BufferUnavailable: the buffer stayed away.
            ConfigError: another sidecar has registered under the same id.
        """
        restarts = 0
        copying = asyncio.create_task(self._keep_copy())
        try:
            while True:
                try:
                    await self._serve_once()
                except ServerFailed as error:
                    if restarts == self._config.engine.max_restarts:
                        raise ServerFailed(f"engine.max_restarts = {restarts} restarts are used up. {error}") from error
                    restarts += 1
                    log.error("%s restarts its server (%d): %s", self.id, restarts, error)
        finally:
            copying.cancel()
            await self._buffer.close()

    async def _keep_copy(self) -> None:
        """Under ``weights.mode: delta``, bring the local copy to every version that the trainer publishes."""
        if self._config.weights.mode != "delta":
            return
        from megatron_sao.weights.delta import LocalCopy  # torch and Megatron, slow to import

        settings = self._config.weights
        shared = settings.directory or self._run_dir / "weights"
        copy = LocalCopy(shared, self.id, (settings.local_directory or shared / "copies") / self.id)
        while True:
            try:
                await asyncio.to_thread(copy.advance)
            except (OSError, ValueError) as error:  # of a shared file system, which may be well again
                copy_log.warning("%s could not look after its copy of the weights: %s", self.id, error)
            await asyncio.sleep(WATCH_SECONDS)

    async def _serve_once(self) -> None:
        """Start the server and keep it registered; raises ServerFailed when it ends."""
        engine = self._config.engine
        try:
            reserved = reserve_port(engine.host, self._port)
        except OSError as error:
            raise ServerFailed(
                f"cannot use port {self._port} of engine.host = {engine.host}: {error.strerror}"
            ) from error
        port = port_of(reserved)
        url = f"http://{engine.host}:{port}"
        argv, env = sglang_command(self._config, port, self._config.model.path, INITIAL_VERSION)
        server = SupervisedProcess(f"sglang-{self._index}", argv, env, self._log_dir)
        server.start()
        try:
            await wait_until_serving(server, url, self._token, INITIAL_VERSION, engine.start_timeout)
            await self._buffer.register_engine(self.id, url, engine.tp)
            log.info("%s serves at %s and waits for the trainer's weights", self.id, url)
            probe = HealthProbe(url, self._token, engine.health_timeout)
            tasks = [asyncio.create_task(probe.run()), asyncio.create_task(self._send_heartbeats(url, probe))]
            try:
                while server.exit_code() is None:
                    for task in tasks:
                        if task.done():
                            task.result()  # raises: the buffer stayed away
                    await asyncio.sleep(WATCH_SECONDS)
            finally:
                for task in tasks:
                    task.cancel()
            raise ServerFailed(f"SGLang ended ({server.describe_exit()}); its last lines:\n{server.last_words()}")
        finally:
            server.kill()
            reserved.close()

    async def _send_heartbeats(self, url: str, probe: HealthProbe) -> None:
        while True:
            try:
                listed = await self._buffer.heartbeat_engine(self.id, probe.sick)
                if listed.url != url:
                    raise ConfigError(f"{self.id} is now the one at {listed.url}: no two sidecars may share an --index")
                probe.heed(listed.state)
            except BufferError as error:
                if error.status != 404:
                    raise
                await self._buffer.register_engine(self.id, url, self._config.engine.tp)
            await asyncio.sleep(HEARTBEAT_SECONDS)


async def until_signalled(work: asyncio.Future[None]) -> None:
    """Await ``work``; SIGTERM and SIGINT cancel it and are a normal end."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        log.info("stopped by a signal")
