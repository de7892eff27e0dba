"""What ``tools.bench.buffer`` measures beside the buffer: Redis streams, straw-queue and TransferQueue.

None is a requirement of this project, and each is left out where it is not installed. All get the same payloads from as
many clients at once, with the nearest to the buffer's durability that they offer:

* Redis: ``--appendonly yes --appendfsync always``, on the disk before it answers. One server process.
* straw-queue: payload and queue journal are fsynced before a call returns. It is a library: writers are threads with a
  store each, as in its own benchmark, that share a coordinator without its RPC in between. No garbage collection.
* TransferQueue: holds everything in memory and loses it with its processes: **not durable**. Three Ray actors.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import shutil
import subprocess
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import psutil

from megatron_sao.launch.ports import port_of, reserve_port


class Server(NamedTuple):
    """What stores payloads, started. Payloads are numbered from 0, and so are the clients that call at once.

    ``write(client, number, payload)`` returns once the payload is acknowledged, ``read(client, number)`` gives it back.
    ``processes``: the servers, without the clients.
    """

    write: Callable[[int, int, bytes], Awaitable[None]]
    read: Callable[[int, int], Awaitable[bytes]]
    processes: list[psutil.Process]


class Alternative(NamedTuple):
    """``start(directory, clients, count)`` serves that many clients and payloads; None if it is not installed."""

    name: str
    start: Callable[[Path, int, int], AbstractAsyncContextManager[Server]] | None
    package: str


def alternatives() -> list[Alternative]:
    return [
        Alternative("Redis stream", redis if shutil.which("redis-server") else None, "redis-server"),
        Alternative("straw-queue", straw_queue if importlib.util.find_spec("straw") else None, "straw-queue"),
        Alternative(
            "TransferQueue (memory)",
            transfer_queue if importlib.util.find_spec("transfer_queue") else None,
            "TransferQueue",
        ),
    ]


@asynccontextmanager
async def redis(directory: Path, clients: int, count: int) -> AsyncIterator[Server]:
    reserved = reserve_port("127.0.0.1")
    port = port_of(reserved)
    options = ["--port", str(port), "--dir", str(directory), "--appendonly", "yes", "--appendfsync", "always"]
    process = subprocess.Popen(["redis-server", *options, "--save", ""], stdout=subprocess.DEVNULL)
    entries: dict[int, bytes] = {}
    try:
        connections = [await _connect_redis(port) for _ in range(clients)]

        async def write(client: int, number: int, payload: bytes) -> None:
            entries[number] = await _command(*connections[client], b"XADD", b"t", b"*", b"d", payload)

        async def read(client: int, number: int) -> bytes:
            entry = entries[number]
            [[_, [_, payload]]] = await _command(*connections[client], b"XRANGE", b"t", entry, entry)
            return payload

        yield Server(write, read, [psutil.Process(process.pid)])
        for _, writer in connections:
            writer.close()
    finally:
        process.kill()
        process.wait()
        reserved.close()


async def _connect_redis(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    for _ in range(200):
        try:
            return await asyncio.open_connection("127.0.0.1", port, limit=2**26)
        except ConnectionRefusedError:
            await asyncio.sleep(0.05)
    raise SystemExit("redis-server did not start")


async def _command(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *parts: bytes) -> object:
    """One command of the Redis protocol, and its reply."""
    writer.write(b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts))
    await writer.drain()
    return await _reply(reader)


async def _reply(reader: asyncio.StreamReader) -> object:
    line = (await reader.readline()).rstrip()
    kind, rest = line[:1], line[1:]
    if kind == b"*":
        return [await _reply(reader) for _ in range(int(rest))]
    if kind == b"$":
        return None if rest == b"-1" else (await reader.readexactly(int(rest) + 2))[:-2]
    if kind == b"-":
        raise SystemExit(f"Redis answered {rest.decode()}")
    return rest


@asynccontextmanager
async def straw_queue(directory: Path, clients: int, count: int) -> AsyncIterator[Server]:
    import straw

    loop, references = asyncio.get_running_loop(), {}
    with contextlib.ExitStack() as open_files:
        stores = [open_files.enter_context(straw.SharedFilesystemStore(directory, "bench")) for _ in range(clients)]
        coordinator = open_files.enter_context(straw.Coordinator(stores[0], exclusive_owner="bench"))
        coordinator.submit_tasks("tasks", [straw.TaskSpec(str(number)) for number in range(count)])
        leases = [assignment.lease for assignment in coordinator.acquire("bench", max_tasks=count).assignments]
        threads = open_files.enter_context(ThreadPoolExecutor(clients))

        def publish(client: int, number: int, payload: bytes) -> None:
            lease = leases[number]
            labels = {"task_id": lease.task_id, "attempt_id": lease.attempt_id}
            record = straw.Record(lease.task_id, payload, metadata=labels)
            reference = stores[client].publish([record], submission_id=lease.task_id)
            coordinator.complete_task(
                lease, submission_id=lease.task_id, result_ref=reference, result_digest=reference.digest
            )
            references[number] = reference

        async def write(client: int, number: int, payload: bytes) -> None:
            await loop.run_in_executor(threads, publish, client, number, payload)

        async def read(client: int, number: int) -> bytes:
            records = await loop.run_in_executor(threads, lambda: list(stores[client].read(references[number])))
            return bytes(records[0].payload)

        yield Server(write, read, [])


@asynccontextmanager
async def transfer_queue(directory: Path, clients: int, count: int) -> AsyncIterator[Server]:
    # Ray gives its workers niceness 15, which on a machine with other work would not compare.
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", "TQ_LOGGING_LEVEL": "ERROR"}
    import ray
    import torch
    import transfer_queue as queue
    from tensordict import TensorDict

    warnings.filterwarnings("ignore", message="The given buffer is not writable")
    # Each of its three actors asks for a CPU, which a small machine has not.
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, _temp_dir=str(directory))
    try:
        queue.init()
        processes = [
            process
            for process in psutil.Process().children(recursive=True)
            if process.cmdline()[:1] and process.cmdline()[0].startswith(("ray::TransferQueue", "ray::SimpleStorage"))
        ]

        async def write(client: int, number: int, payload: bytes) -> None:
            fields = TensorDict({"payload": torch.frombuffer(payload, dtype=torch.uint8)[None]}, batch_size=1)
            await queue.async_kv_batch_put(keys=[str(number)], partition_id="train", fields=fields)

        async def read(client: int, number: int) -> bytes:
            fields = await queue.async_kv_batch_get(keys=str(number), partition_id="train")
            return fields["payload"][0].numpy().tobytes()

        yield Server(write, read, processes)
        queue.close()
    finally:
        ray.shutdown()
