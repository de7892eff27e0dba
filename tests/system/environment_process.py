"""An environment as a process that tests start, kill and start again."""

from __future__ import annotations

import os
import time
from pathlib import Path

import httpx

from megatron_sao import cli
from megatron_sao.config import dump_config
from megatron_sao.launch.ports import port_of, reserve_port
from megatron_sao.rollout import worker
from tests.system.buffer_process import PROCESSES, TOKEN
from tests.trajectories import make_config
from tests.unit.test_calculator import Characters

CALCULATOR = "megatron_sao.rollout.environments.calculator:Calculator"


class EnvironmentProcess:
    """``megatron-sao environment`` on the calculator, always at the same port."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._reserved = reserve_port("127.0.0.1")
        self.port = port_of(self._reserved)
        self.url = f"http://127.0.0.1:{self.port}"
        config = make_config(directory, rollout={"environment": CALCULATOR})
        (directory / "served.yaml").write_text(dump_config(config))

    def start(self) -> None:
        self.process = PROCESSES.Process(target=serve, args=(self.directory, self.port), daemon=True)
        self.process.start()
        deadline = time.monotonic() + 60
        while not self._answers():
            assert self.process.is_alive() and time.monotonic() < deadline, (self.directory / "log").read_text()
            time.sleep(0.05)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def close(self) -> None:
        self.kill()
        self._reserved.close()

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/healthz", trust_env=False).is_success
        except httpx.TransportError:
            return False


def serve(directory: Path, port: int) -> None:
    """The process itself: the product's command, with a tokenizer that needs no model."""
    log = os.open(directory / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ["MEGATRON_SAO_TOKEN"] = TOKEN
    worker.load_tokenizer = lambda path: Characters()
    cli.main(["environment", str(directory / "served.yaml"), "--port", str(port)])
