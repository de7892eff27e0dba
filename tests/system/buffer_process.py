"""The buffer as a process that tests start, kill and start again."""

import asyncio
import json
import os
import subprocess
import sys
import time

import httpx

from megatron_sao.buffer.client import AsyncBufferClient, BufferClient
from megatron_sao.config import dump_config
from tests.trajectories import make_config

TOKEN = "secret-of-this-run"
SERVE = (
    "import sys; from pathlib import Path; from megatron_sao.buffer.server import main\n"
    "from megatron_sao.config import load_config; main(load_config(sys.argv[1]), Path(sys.argv[2]))"
)


class Buffer:
    """A buffer process over one run directory, started, killed and started again."""

    def __init__(self, directory, config=None, **sections):
        self.directory = directory
        (directory / "config.json").write_text('{"vocab_size": 7}')
        (directory / "run_id").write_text("test\n")
        for name in ("train", "eval"):
            lines = [json.dumps({"id": f"{name}/{i}", "prompt": str(i)}) for i in range(16)]
            (directory / f"{name}.jsonl").write_text("\n".join(lines))
        self.config = config or make_config(directory, **sections)
        (directory / "run.yaml").write_text(dump_config(self.config))

    def start(self):
        with (self.directory / "log").open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", SERVE, str(self.directory / "run.yaml"), str(self.directory)],
                env=os.environ | {"MEGATRON_SAO_TOKEN": TOKEN},
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            assert self.process.poll() is None, (self.directory / "log").read_text()
            if (self.directory / "buffer.json").exists():
                self.url = json.loads((self.directory / "buffer.json").read_text())["url"]
                try:
                    if httpx.get(f"{self.url}/healthz", trust_env=False).is_success:
                        return
                except httpx.TransportError:
                    pass
            time.sleep(0.05)
        raise AssertionError("the buffer did not start")

    def kill(self):
        self.process.kill()
        self.process.wait()

    def client(self, **options):
        return BufferClient(self.url, TOKEN, **options)

    def get(self, path, token=TOKEN):
        return httpx.get(self.url + path, headers={"Authorization": f"Bearer {token}"}, trust_env=False)

    def post(self, path, content=b"", token=TOKEN, **headers):
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"} | headers
        return httpx.post(self.url + path, content=content, headers=headers, trust_env=False)


def on_async(buffer, scenario):
    """Run ``scenario(client)`` with an asynchronous client."""

    async def run():
        client = AsyncBufferClient(buffer.url, TOKEN)
        try:
            return await scenario(client)
        finally:
            await client.close()

    return asyncio.run(run())
