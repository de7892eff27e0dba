"""``python -m tools.bench.buffer``: the buffer's HTTP server under load, beside Redis streams and the bare disk.

Everything runs on this machine, one after the other, in fresh processes over one directory (``--dir``), and stores the
same payloads durably before it acknowledges: the buffer as it always does, Redis with ``--appendonly yes --appendfsync
always``, the disk by a write and an fsync for each record, and for as many at once as the buffer's group commit takes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import aiohttp
import numpy as np
import psutil

from megatron_sao.buffer.client import AsyncBufferClient, BufferClient
from megatron_sao.buffer.server import GROUP_LIMIT
from megatron_sao.config import dump_config, parse_config
from megatron_sao.data.trajectory import Trajectory
from megatron_sao.launch.ports import port_of, reserve_port

TOKEN = "bench"
VOCABULARY = 150_000
READERS = 8


class Case(NamedTuple):
    """``count`` trajectories of ``tokens`` tokens from ``writers`` at once."""

    tokens: int
    writers: int
    count: int


CASES = [
    Case(200, 1, 200), Case(200, 64, 3000), Case(200, 1000, 4000),
    Case(131_072, 1, 20), Case(131_072, 8, 100), Case(131_072, 64, 100),
]  # fmt: skip


class Figures(NamedTuple):
    """``memory``: the server's resident set after the case, in MB; ``cpu``: its CPU time per trajectory, in ms, which
    other jobs on the machine hardly change. None where there is no server, or it was not looked at."""

    system: str
    per_second: float
    megabytes: float
    p50: float  # ms
    p99: float
    memory: float | None = None
    cpu: float | None = None

    def row(self, case: Case) -> str:
        memory = "" if self.memory is None else f"{self.memory:.0f} | {self.cpu:.2f}"
        return (
            f"| {case.tokens} | {case.writers} | {self.system} | {self.per_second:.0f} | {self.megabytes:.1f} | "
            f"{self.p50:.1f} | {self.p99:.1f} | {memory or ' | '} |"
        )


def trajectory(tokens: int, seed: int, **fields: object) -> Trajectory:
    """A prompt of an eighth, and one action; random ids and log-probabilities, as incompressible as real ones."""
    rng = np.random.default_rng(seed)
    prompt = tokens // 8
    mask = np.arange(tokens) >= prompt
    return Trajectory(
        token_ids=rng.integers(0, VOCABULARY, tokens, dtype=np.int32), loss_mask=mask.astype(np.uint8),
        logprobs=np.where(mask, -rng.random(tokens), 0).astype(np.float32), rewards=np.zeros(tokens, np.float32),
        versions=[("1.0", prompt, tokens)], turns=[("prompt", 0, prompt), ("action", prompt, tokens)],
        sampling={"temperature": 1.0}, support=None, routed_experts=None, truncated=False, failure=None, metrics={},
        created_at=0.0, kind="train", group=None, **fields,
    )  # fmt: skip


async def timed(
    jobs: list[bytes] | list[str], workers: int, work: Callable[[int, bytes | str], Awaitable[int]]
) -> tuple[float, float, float, float]:
    """``workers`` at once do ``work(worker, job)``, which returns bytes moved. Returns jobs/s, MB/s, p50, p99 (ms)."""
    queue, latencies, moved = list(reversed(jobs)), [], 0

    async def worker(number: int) -> None:
        nonlocal moved
        while queue:
            job = queue.pop()
            started = time.perf_counter()
            size = await work(number, job)
            moved += size
            latencies.append(time.perf_counter() - started)

    started = time.perf_counter()
    await asyncio.gather(*(worker(number) for number in range(workers)))
    seconds = time.perf_counter() - started
    p50, p99 = np.percentile(latencies, (50, 99)) * 1e3
    return len(jobs) / seconds, moved / seconds / 1e6, p50, p99


# The buffer


@asynccontextmanager
async def buffer_server(directory: Path) -> AsyncIterator[tuple[str, str, psutil.Process]]:
    """(URL, run id, process) of a fresh buffer with visits for any number of trajectories."""
    (directory / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY}))
    (directory / "tasks.jsonl").write_text("".join(f'{{"prompt": "{i}"}}\n' for i in range(1000)))
    config = parse_config(
        {
            "name": "bench", "model": {"path": str(directory)}, "data": {"train": str(directory / "tasks.jsonl")},
            "rollout": {"environment": "unused:Unused", "max_tokens": 2**18}, "rl": {"batch_size": 2**16},
        }
    )  # fmt: skip
    (directory / "run.yaml").write_text(dump_config(config))
    command = [sys.executable, "-m", "megatron_sao.cli", "buffer", str(directory / "run.yaml")]
    environment = os.environ | {"MEGATRON_SAO_TOKEN": TOKEN}
    process = subprocess.Popen([*command, "--run-dir", str(directory)], env=environment, stdout=subprocess.DEVNULL)
    try:
        while not (directory / "buffer.json").exists():
            if process.poll() is not None:
                raise SystemExit("the buffer did not start; see above")
            await asyncio.sleep(0.05)
        url = json.loads((directory / "buffer.json").read_text())["url"]
        yield url, (directory / "run_id").read_text().strip(), psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


async def measure_buffer(directory: Path, case: Case) -> list[Figures]:
    async with buffer_server(directory) as (url, run_id, process):
        trainer, client = BufferClient(url, TOKEN), AsyncBufferClient(url, TOKEN)
        trainer.register_trainer(run_id, 0)
        await client.register_engine("e", "http://e", 1)
        trainer.mark_engine("e", "dirty", None, 1)
        trainer.mark_engine("e", "clean", "1.0", 1)
        leases = await client.lease("bench", case.count, 0)
        bodies = [
            trajectory(
                case.tokens, seed, id=str(seed), run_id=run_id, task_id=lease.task["id"], epoch=lease.epoch,
                attempt=lease.attempt,
            ).encode()
            for seed, lease in enumerate(leases)
        ]  # fmt: skip
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with aiohttp.ClientSession(url, headers=headers, connector=aiohttp.TCPConnector(limit=0)) as http:

            async def write(_: int, body: bytes) -> int:
                while True:
                    async with http.post("/v1/trajectories", data=body) as response:
                        if response.status == 429:  # too many large bodies at once: come again, as every client does
                            await asyncio.sleep(0.05)
                            continue
                        if (await response.json()) != {"result": "accepted"}:
                            raise SystemExit(f"the buffer answered {response.status}: {await response.text()}")
                        return len(body)

            async def read(_: int, id: str) -> int:
                async with http.get(f"/v1/trajectories/{id}") as response:
                    return len(await response.read())

            before = cpu_seconds(process)
            figures_in = await timed(bodies, case.writers, write)
            cpu = (cpu_seconds(process) - before) / case.count * 1e3
            memory = process.memory_info().rss / 1e6
            figures_out = await timed([str(i) for i in range(case.count)], READERS, read)
        await client.close()
        trainer.close()
    return [Figures("buffer, in", *figures_in, memory, cpu), Figures("buffer, out", *figures_out)]


# Redis


async def measure_redis(directory: Path, case: Case, bodies: list[bytes]) -> list[Figures]:
    with reserve_port("127.0.0.1") as free:
        port = port_of(free)
    options = ["--port", str(port), "--dir", str(directory), "--appendonly", "yes", "--appendfsync", "always"]
    process = subprocess.Popen(["redis-server", *options, "--save", ""], stdout=subprocess.DEVNULL)
    try:
        connections = [await connect_redis(port) for _ in range(max(case.writers, READERS))]

        async def write(number: int, body: bytes) -> int:
            await command(*connections[number], b"XADD", b"t", b"*", b"d", body)
            return len(body)

        before = cpu_seconds(psutil.Process(process.pid))
        figures_in = await timed(bodies, case.writers, write)
        cpu = (cpu_seconds(psutil.Process(process.pid)) - before) / case.count * 1e3
        memory = psutil.Process(process.pid).memory_info().rss / 1e6
        reply = await command(*connections[0], b"XINFO", b"STREAM", b"t")
        if int(reply[1]) != len(bodies):
            raise SystemExit(f"Redis holds {reply[1]} entries, not {len(bodies)}")
        for _, writer in connections:
            writer.close()
        return [Figures("Redis stream, in", *figures_in, memory, cpu)]
    finally:
        process.kill()
        process.wait()


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


async def connect_redis(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    for _ in range(200):
        try:
            return await asyncio.open_connection("127.0.0.1", port, limit=2**26)
        except ConnectionRefusedError:
            await asyncio.sleep(0.05)
    raise SystemExit("redis-server did not start")


async def command(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *parts: bytes) -> object:
    """One command of the Redis protocol, and its reply."""
    writer.write(b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts))
    await writer.drain()
    return await reply(reader)


async def reply(reader: asyncio.StreamReader) -> object:
    line = (await reader.readline()).rstrip()
    kind, rest = line[:1], line[1:]
    if kind == b"*":
        return [await reply(reader) for _ in range(int(rest))]
    if kind == b"$":
        return None if rest == b"-1" else (await reader.readexactly(int(rest) + 2))[:-2]
    if kind == b"-":
        raise SystemExit(f"Redis answered {rest.decode()}")
    return rest


# The disk


def measure_disk(directory: Path, bodies: list[bytes], group: int) -> Figures:
    """Sequential writes of ``group`` records each, then an fsync."""
    latencies = []
    with (directory / "disk").open("wb", buffering=0) as file:
        started = time.perf_counter()
        for first in range(0, len(bodies), group):
            begun = time.perf_counter()
            file.write(b"".join(bodies[first : first + group]))
            os.fsync(file.fileno())
            latencies.append(time.perf_counter() - begun)
        seconds = time.perf_counter() - started
    name = "disk, fsync each" if group == 1 else f"disk, fsync per {group}"
    p50, p99 = np.percentile(latencies, (50, 99)) * 1e3
    return Figures(name, len(bodies) / seconds, sum(map(len, bodies)) / seconds / 1e6, p50, p99)


async def measure(case: Case, parent: Path | None) -> list[Figures]:
    fields = {"run_id": "bench", "task_id": "t", "epoch": 0, "attempt": 1}
    bodies = [trajectory(case.tokens, seed, id=str(seed), **fields).encode() for seed in range(case.count)]
    figures = []
    for system in ("buffer", "redis", "disk"):
        directory = Path(tempfile.mkdtemp(prefix="bench-", dir=parent))
        try:
            if system == "buffer":
                figures += await measure_buffer(directory, case)
            elif system == "disk":
                figures += [measure_disk(directory, bodies, group) for group in (1, min(case.writers, GROUP_LIMIT))]
            elif shutil.which("redis-server"):
                figures += await measure_redis(directory, case, bodies)
        finally:
            shutil.rmtree(directory)
    return figures if case.writers > 1 else figures[:-1]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, help="where to write (default: the temporary directory)")
    parser.add_argument("--only", type=int, help="cases of this many tokens alone")
    arguments = parser.parse_args(argv)
    if not shutil.which("redis-server"):
        print("redis-server is not installed here: no figures for Redis", file=sys.stderr)
    print("| tokens | writers | system | per second | MB/s | p50 ms | p99 ms | RSS MB | CPU ms |")
    print("|---|---|---|---|---|---|---|---|---|")
    for case in CASES:
        if arguments.only in (None, case.tokens):
            for figures in asyncio.run(measure(case, arguments.dir)):
                print(figures.row(case), flush=True)


if __name__ == "__main__":
    main()
