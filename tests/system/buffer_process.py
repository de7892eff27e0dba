"""The buffer as a process that tests start, kill and start again."""

import asyncio
import fcntl
import json
import multiprocessing
import os
import signal
import socket
import sqlite3
import sys
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import httpx

from megatron_sao.buffer import database, segments, server, store
from megatron_sao.buffer.client import AsyncBufferClient, BufferClient
from megatron_sao.buffer.guard import Guard
from megatron_sao.config import dump_config, load_config
from tests.trajectories import make_config

TOKEN = "secret-of-this-run"
LONG = 40.0  # seconds that nothing here takes, although the machine may stall for some
PATIENCE = 1.0  # of a buffer to which clients are too slow
# A process forked from one that has imported everything starts ten times as fast, and is killed like any other.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.system.buffer_process"])


class Buffer:
    """A buffer process over one run directory, started, killed and started again."""

    def __init__(self, directory, config=None, patience=30.0, roll_bytes=64 * 2**20, **sections):
        self.directory, self.patience, self.roll_bytes = directory, patience, roll_bytes
        (directory / "config.json").write_text('{"vocab_size": 7}')
        (directory / "run_id").write_text("test\n")
        for name in ("train", "eval"):
            lines = [json.dumps({"id": f"{name}/{i}", "prompt": str(i)}) for i in range(16)]
            (directory / f"{name}.jsonl").write_text("\n".join(lines))
        self.config = config or make_config(directory, **sections)
        (directory / "run.yaml").write_text(dump_config(self.config))

    def start(self, die_at=None):
        """Start it and wait until it serves. With ``die_at`` it kills itself at that one of its steps (see
        :func:`doom`), perhaps before it serves."""
        arguments = (self.directory, self.patience, self.roll_bytes, die_at)
        self.process = PROCESSES.Process(target=serve, args=arguments, daemon=True)
        self.process.start()
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if not self.process.is_alive():
                assert die_at is not None and self.process.exitcode == -signal.SIGKILL, self.log()
                return
            if (self.directory / "buffer.json").exists():
                self.url = json.loads((self.directory / "buffer.json").read_text())["url"]
                try:
                    if httpx.get(f"{self.url}/healthz", trust_env=False).is_success:
                        return
                except httpx.TransportError:
                    pass
            time.sleep(0.02)
        raise AssertionError("the buffer did not start")

    def kill(self):
        self.process.kill()
        self.process.join()

    def log(self):
        return (self.directory / "log").read_text()

    def client(self, **options):
        return BufferClient(self.url, TOKEN, **options)

    def connect(self):
        """A bare connection, for what no client library would send."""
        address = urlsplit(self.url)
        return socket.create_connection((address.hostname, address.port), timeout=LONG)

    def wait_until_read(self):
        """Wait until the process has taken from the kernel whatever was sent to it."""
        deadline = time.monotonic() + LONG
        while self._unread():
            assert time.monotonic() < deadline, "it does not read"
            time.sleep(0.01)
        assert self.get("/healthz").is_success  # and it has begun to deal with it, since this came later

    def _unread(self):
        """Bytes underway to it, and connections that it has not accepted."""
        port, unread = f":{urlsplit(self.url).port:04X}", 0
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            _, ours, theirs, _, queues, *_ = line.split()
            sending, receiving = (int(queue, 16) for queue in queues.split(":"))
            unread += receiving * ours.endswith(port) + sending * theirs.endswith(port)
        return unread

    def get(self, path, token=TOKEN):
        headers = {"Authorization": f"Bearer {token}"}
        return httpx.get(self.url + path, headers=headers, trust_env=False, timeout=LONG)

    def post(self, path, content=b"", token=TOKEN, **headers):
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"} | headers
        return httpx.post(self.url + path, content=content, headers=headers, trust_env=False, timeout=LONG)


@contextmanager
def serving(directory, patience, **sections):
    """A buffer of one trainer, until the end of the block."""
    buffer = Buffer(directory, patience=patience, **sections)
    buffer.start()
    try:
        buffer.client().register_trainer("test", 0)
        yield buffer
    finally:
        buffer.kill()


def serve(directory: Path, patience: float, roll_bytes: int, die_at: int | None) -> None:
    """The process itself. ``patience`` is the guard's, ``roll_bytes`` the segments'."""
    log = os.open(directory / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ["MEGATRON_SAO_TOKEN"] = TOKEN
    server.Guard = partial(Guard, patience=patience)
    store.Segments = partial(segments.Segments, roll_bytes=roll_bytes)
    if die_at is not None:
        doom(die_at)
    server.main(load_config(directory / "run.yaml"), directory)
    sys.stdout.flush()


def doom(die_at: int) -> None:
    """Have this process killed with -9 at the ``die_at``-th of its steps towards the disk: a statement of the index,
    the moment after a commit, an fsync of a segment, or half-way through a write to one."""
    steps = 0

    def dies() -> bool:
        nonlocal steps
        steps += 1
        return steps == die_at

    def step() -> None:
        if dies():
            os.kill(os.getpid(), signal.SIGKILL)

    def pwritev(file, parts, offset):
        if dies():
            whole, torn = parts[: len(parts) // 2], parts[len(parts) // 2]
            block = 4096 if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT else 1
            half = [*whole, torn[: len(torn) // 2 // block * block]]
            assert os.pwritev(file, half, offset) == sum(map(len, half))
            os.kill(os.getpid(), signal.SIGKILL)
        return os.pwritev(file, parts, offset)

    def fsync(file):
        step()
        os.fsync(file)
        step()

    class Doomed(sqlite3.Connection):
        def execute(self, sql, *values):
            step()
            cursor = super().execute(sql, *values)
            if sql == "COMMIT":
                step()
            return cursor

    ours = {"pwritev": pwritev, "fsync": fsync}
    segments.os = SimpleNamespace(**{name: getattr(os, name) for name in dir(os)} | ours)
    connect = sqlite3.connect
    database.sqlite3 = SimpleNamespace(**{name: getattr(sqlite3, name) for name in dir(sqlite3)})
    database.sqlite3.connect = lambda *arguments, **options: connect(*arguments, factory=Doomed, **options)


def on_async(buffer, scenario):
    """Run ``scenario(client)`` with an asynchronous client."""

    async def run():
        client = AsyncBufferClient(buffer.url, TOKEN)
        try:
            return await scenario(client)
        finally:
            await client.close()

    return asyncio.run(run())


def serve_engine(buffer, version="1.0", incarnation=1):
    """One engine, registered and clean."""
    on_async(buffer, lambda client: client.register_engine("host/0", "http://e", 1))
    trainer = buffer.client()
    trainer.mark_engine("host/0", "dirty", None, incarnation)
    trainer.mark_engine("host/0", "clean", version, incarnation)
