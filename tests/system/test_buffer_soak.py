"""A day's worth of steps in minutes: memory and disk stay where they are."""

import asyncio
import itertools

import psutil
import pytest

from megatron_sao.buffer.client import AsyncBufferClient
from tests.system.buffer_process import Buffer, on_async, serve_engine
from tests.trajectories import make_trajectory

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS, BATCH, COMMIT_EVERY = 500, 32, 10


def test_memory_and_disk_stay_flat(tmp_path):
    buffer = Buffer(tmp_path, rl={"batch_size": BATCH, "max_staleness": 1})
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
            make_trajectory(
                id=f"{lease.visit_id}-{lease.attempt}", task_id=lease.task["id"], epoch=lease.epoch,
                attempt=lease.attempt, versions=[("1.0", 2, 6)], failure=failure, metrics={"padding": 1.0},
            )
        )  # fmt: skip

    def learn() -> list[tuple[int, int]]:
        sizes = []
        for step in range(STEPS):
            while trainer.batch("rl", step, 1, BATCH, 0, wait=5.0) is None:
                pass
            if (step + 1) % COMMIT_EVERY == 0:
                trainer.commit("rl", step + 1, 1)
                disk = sum(path.stat().st_size for path in (tmp_path / "buffer").rglob("*") if path.is_file())
                sizes.append((process.memory_info().rss, disk))
        return sizes

    async def both(client: AsyncBufferClient) -> list[tuple[int, int]]:
        player = asyncio.create_task(play(client))
        sizes = await asyncio.to_thread(learn)
        player.cancel()
        return sizes

    sizes = on_async(buffer, both)
    buffer.kill()
    (memory, disk), (memory_later, disk_later) = sizes[len(sizes) // 4], sizes[-1]
    assert memory_later < 1.1 * memory, f"{memory / 1e6:.0f} MB → {memory_later / 1e6:.0f} MB"
    assert disk_later < 64 * 2**20 + 1.2 * disk, f"{disk / 1e6:.0f} MB → {disk_later / 1e6:.0f} MB"  # an open segment
