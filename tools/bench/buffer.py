"""``python -m tools.bench.buffer``: the buffer's HTTP server under load, beside its alternatives and the bare disk.

Everything runs on this machine, one after the other, in fresh processes over one directory (``--dir``), and stores the
same bytes: the buffer, durably before it acknowledges; what of Redis, straw-queue and TransferQueue is installed
(``tools/bench/alternatives.py`` says how durably); the disk by a write and an fsync for each record, and for as many at
once as the buffer's group commit takes. Every payload is read back, by ``READERS`` at once, and compared. The systems
take turns ``--rounds`` times; printed are the medians, and each round's figures as they come on stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import numpy as np
import psutil

from megatron_sao.buffer.client import AsyncBufferClient, BufferClient, Lease
from megatron_sao.buffer.server import GROUP_LIMIT
from megatron_sao.config import dump_config, parse_config
from megatron_sao.data.trajectory import Trajectory
from tools.bench.alternatives import Server, alternatives

TOKEN = "token-of-the-bench"
VOCABULARY = 150_000
READERS = 8


class Case(NamedTuple):
    """``count`` trajectories of ``tokens`` tokens from ``writers`` at once."""

    tokens: int
    writers: int
    count: int


CASES = [
    Case(200, 1, 300), Case(200, 64, 3000), Case(200, 1000, 4000),
    Case(131_072, 1, 200), Case(131_072, 8, 400), Case(131_072, 64, 400), Case(131_072, 1000, 1000),
]  # fmt: skip


class Figures(NamedTuple):
    """``memory``: the servers' resident set after the case, in MB; ``cpu``: their CPU time per trajectory, in ms, which
    other jobs on the machine hardly change. NaN where there is no server, or it was not looked at."""

    per_second: float
    megabytes: float
    p50: float  # ms
    p99: float
    memory: float = math.nan
    cpu: float = math.nan

    def row(self, case: Case, system: str) -> str:
        servers = "" if np.isnan(self.memory) else f"{self.memory:.0f}", "" if np.isnan(self.cpu) else f"{self.cpu:.2f}"
        return (
            f"| {case.tokens} | {case.writers} | {system} | {self.per_second:.0f} | {self.megabytes:.1f} | "
            f"{self.p50:.1f} | {self.p99:.1f} | {servers[0]} | {servers[1]} |"
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


async def timed(sizes: list[int], clients: int, work: Callable[[int, int], Awaitable[None]]) -> Figures:
    """``clients`` at once do ``work(client, number)`` for the payload of each number, of ``sizes[number]`` bytes."""
    waiting, latencies = list(reversed(range(len(sizes)))), []

    async def client(index: int) -> None:
        while waiting:
            number = waiting.pop()
            started = time.perf_counter()
            await work(index, number)
            latencies.append(time.perf_counter() - started)

    started = time.perf_counter()
    await asyncio.gather(*(client(index) for index in range(clients)))
    return figures(sizes, time.perf_counter() - started, latencies)


def figures(sizes: list[int], seconds: float, latencies: list[float]) -> Figures:
    p50, p99 = np.percentile(latencies, (50, 99)) * 1e3
    return Figures(len(sizes) / seconds, sum(sizes) / seconds / 1e6, p50, p99)


async def measure_server(server: Server, clients: int, payloads: list[bytes]) -> tuple[Figures, Figures]:
    """In and out."""

    async def write(client: int, number: int) -> None:
        await server.write(client, number, payloads[number])

    async def read(client: int, number: int) -> None:
        if await server.read(client, number) != payloads[number]:
            raise SystemExit(f"payload {number} came back changed")

    sizes = list(map(len, payloads))
    before = cpu_seconds(server.processes)
    written = await timed(sizes, clients, write)
    if server.processes:
        cpu = (cpu_seconds(server.processes) - before) / len(payloads) * 1e3
        written = written._replace(memory=sum(p.memory_info().rss for p in server.processes) / 1e6, cpu=cpu)
    return written, await timed(sizes, READERS, read)


def cpu_seconds(processes: list[psutil.Process]) -> float:
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


@contextmanager
def buffer_process(directory: Path) -> Iterator[tuple[str, str, psutil.Process]]:
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
            time.sleep(0.05)
        url = json.loads((directory / "buffer.json").read_text())["url"]
        yield url, (directory / "run_id").read_text().strip(), psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


@asynccontextmanager
async def buffer(directory: Path, case: Case) -> AsyncIterator[tuple[Server, list[bytes]]]:
    """A buffer, and the trajectories that it waits for."""
    with buffer_process(directory) as (url, run_id, process):
        leases = await leases_of(url, run_id, case.count)
        payloads = [
            trajectory(
                case.tokens, number, id=str(number), run_id=run_id, task_id=lease.task["id"], epoch=lease.epoch,
                attempt=lease.attempt,
            ).encode()
            for number, lease in enumerate(leases)
        ]  # fmt: skip
        address = urlsplit(url)
        connections = [
            await asyncio.open_connection(address.hostname, address.port, limit=2**26)
            for _ in range(max(case.writers, READERS))
        ]

        async def write(client: int, number: int, payload: bytes) -> None:
            answer = await _request(*connections[client], "POST", "/v1/trajectories", payload)
            if json.loads(answer) != {"result": "accepted"}:
                raise SystemExit(f"the buffer answered {answer.decode()}")

        async def read(client: int, number: int) -> bytes:
            return await _request(*connections[client], "GET", f"/v1/trajectories/{number}")

        yield Server(write, read, [process]), payloads
        for _, writer in connections:
            writer.close()


async def _request(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, method: str, path: str, body: bytes = b""
) -> bytes:
    """The answer's body."""
    head = f"{method} {path} HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: {len(body)}"
    writer.writelines([f"{head}\r\n\r\n".encode(), body])
    await writer.drain()
    answer = (await reader.readuntil(b"\r\n\r\n")).lower()
    return await reader.readexactly(int(answer.partition(b"content-length:")[2].split()[0]))


async def leases_of(url: str, run_id: str, count: int) -> list[Lease]:
    trainer, client = BufferClient(url, TOKEN), AsyncBufferClient(url, TOKEN)
    trainer.register_trainer(run_id, 0)
    await client.register_engine("e", "http://e", 1)
    trainer.mark_engine("e", "dirty", None, 1)
    trainer.mark_engine("e", "clean", "1.0", 1)
    leases = await client.lease("bench", count, 0)
    await client.close()
    trainer.close()
    return leases


def measure_disk(directory: Path, payloads: list[bytes], group: int) -> Figures:
    """Sequential writes of ``group`` records each, then an fsync."""
    latencies = []
    with (directory / "disk").open("wb", buffering=0) as file:
        started = time.perf_counter()
        for first in range(0, len(payloads), group):
            begun = time.perf_counter()
            os.writev(file.fileno(), payloads[first : first + group])
            os.fsync(file.fileno())
            latencies.append(time.perf_counter() - begun)
        seconds = time.perf_counter() - started
    return figures(list(map(len, payloads)), seconds, latencies)


async def measure(case: Case, parent: Path | None) -> dict[str, Figures]:
    """One round, by system."""

    @contextmanager
    def fresh() -> Iterator[Path]:
        directory = Path(tempfile.mkdtemp(prefix="bench-", dir=parent))
        try:
            os.sync()  # what the one before has left for later
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)  # Ray's processes may still be writing their logs

    result = {}

    async def measured(name: str, server: Server) -> None:
        result[f"{name}, in"], result[f"{name}, out"] = await measure_server(server, case.writers, payloads)
        for way in ("in", "out"):
            print(result[f"{name}, {way}"].row(case, f"{name}, {way}"), file=sys.stderr)

    with fresh() as directory:
        async with buffer(directory, case) as (server, payloads):
            await measured("buffer", server)
    for name, start, _ in alternatives():
        if start:
            with fresh() as directory:
                async with start(directory, max(case.writers, READERS), case.count) as server:
                    await measured(name, server)
    for group in sorted({1, min(case.writers, GROUP_LIMIT)}):
        with fresh() as directory:
            result[f"disk, fsync per {group}"] = measure_disk(directory, payloads, group)
    return result


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, help="where to write (default: the temporary directory)")
    parser.add_argument("--tokens", type=int, help="cases of this many tokens alone")
    parser.add_argument("--writers", type=int, help="cases of this many writers alone")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(argv)
    for name, start, package in alternatives():
        if start is None:
            print(f"{name} is left out, for want of it: install {package}", file=sys.stderr)
    print("| tokens | writers | system | per second | MB/s | p50 ms | p99 ms | RSS MB | CPU ms |")
    print("|---|---|---|---|---|---|---|---|---|")
    for case in CASES:
        if options.tokens in (None, case.tokens) and options.writers in (None, case.writers):
            rounds = [asyncio.run(measure(case, options.dir)) for _ in range(options.rounds)]
            for system in rounds[0]:
                medians = Figures(*map(statistics.median, zip(*(round[system] for round in rounds), strict=True)))
                print(medians.row(case, system), flush=True)


if __name__ == "__main__":
    main()
