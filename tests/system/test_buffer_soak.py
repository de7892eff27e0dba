"""500 steps of 32, 16,000 trajectories, in about a minute: at eleven a minute they are a day's. Memory and disk stay
where they are."""

import asyncio
import itertools
import sqlite3
from contextlib import closing

import psutil
import pytest

from megatron_sao.buffer.client import AsyncBufferClient
from tests.system.buffer_process import Buffer, on_async, serve_engine
from tests.trajectories import make_long_trajectory

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS, BATCH, COMMIT_EVERY = 500, 32, 10
TOKENS = 200
ROLL_BYTES = 2**20  # of a segment: dozens are filled, and deleted


def test_memory_and_disk_stay_flat(tmp_path):
    sections = {
        "rl": {"batch_size": BATCH, "max_staleness": 1},
        "rollout": {"environment": "package.module:Class", "max_tokens": TOKENS},
    }
    buffer = Buffer(tmp_path, roll_bytes=ROLL_BYTES, **sections)
    buffer.start()
    trainer, process = buffer.client(), psutil.Process(buffer.process.pid)
    trainer.register_trainer("test", 0)
    serve_engine(buffer)

    async def play(client: AsyncBufferClient) -> None:
        for _ in itertools.count():
            await client.heartbeat_engine("host/0")
            await asyncio.gather(*(submit(client, lease) for lease in await client.lease("w", 64, 1.0)))

    async def submit(client: AsyncBufferClient, lease) -> None:
        failure = "sandbox crashed" if int(lease.visit_id) % 50 == 0 and lease.attempt == 1 else None
        await client.submit(
            make_long_trajectory(
                TOKENS, id=f"{lease.visit_id}-{lease.attempt}", task_id=lease.task["id"], epoch=lease.epoch,
                attempt=lease.attempt, failure=failure,
            )
        )  # fmt: skip

    def learn() -> list[tuple[int, int, int]]:
        sizes = []
        for step in range(STEPS):
            while trainer.batch("rl", step, 1, BATCH, 0, wait=5.0) is None:
                pass
            if (step + 1) % COMMIT_EVERY == 0:
                payloads = sum(path.stat().st_size for path in (tmp_path / "buffer" / "segments").iterdir())
                index = (tmp_path / "buffer" / "index.sqlite").stat().st_size
                sizes.append((process.memory_info().rss, payloads, index))
                trainer.commit("rl", step + 1, 1)
        return sizes

    async def both(client: AsyncBufferClient) -> list[tuple[int, int, int]]:
        player = asyncio.create_task(play(client))
        sizes = await asyncio.to_thread(learn)
        player.cancel()
        return sizes

    sizes = on_async(buffer, both)
    buffer.kill()
    memory, payloads, index = zip(*sizes, strict=True)
    quarter = len(sizes) // 4
    assert memory[-1] < 1.1 * memory[quarter], f"{memory[quarter] / 1e6:.0f} MB → {memory[-1] / 1e6:.0f} MB"
    # Before a commit there is what ten steps wrote, in an open segment and what is left of older ones.
    written = STEPS * BATCH * len(make_long_trajectory(TOKENS).encode())
    assert max(payloads) < 3 * ROLL_BYTES < written / 10, f"{max(payloads)} of {written} bytes are there at once"
    assert index[-1] < 1.2 * index[quarter], f"{index[quarter]} → {index[-1]} bytes"
    # After the last one: its ten steps, known as collected, and what came for the next ones.
    kept = rows(tmp_path)
    assert kept["batches"] == 0
    assert max(kept["visits"], kept["trajectories"]) < 2 * COMMIT_EVERY * BATCH, kept


def rows(directory) -> dict[str, int]:
    with closing(sqlite3.connect(directory / "buffer" / "index.sqlite")) as index:
        return {
            table: index.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
            for table in ("visits", "trajectories", "batches")
        }
