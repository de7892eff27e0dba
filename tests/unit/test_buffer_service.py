"""The buffer's event loop answers others, whatever one request costs."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_sao.buffer import server
from megatron_sao.buffer.server import LARGE_BODY, Service
from megatron_sao.data.trajectory import TrajectoryError

pytestmark = pytest.mark.unit


def test_while_a_large_body_is_checked_the_loop_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    others_were_served = threading.Event()

    def admit(payload: bytes, *_: object) -> None:
        assert others_were_served.wait(60), "the body was checked on the loop's own thread"
        raise TrajectoryError(f"body: {len(payload)} bytes are none")

    async def submit_and_serve_others() -> None:
        service = Service(SimpleNamespace(), SimpleNamespace(), vocab_size=7)
        submission = asyncio.create_task(service.submit(bytes(LARGE_BODY + 1)))
        await asyncio.sleep(0.05)
        others_were_served.set()
        with pytest.raises(TrajectoryError, match=f"{LARGE_BODY + 1} bytes are none"):
            await submission

    monkeypatch.setattr(server, "admit", admit)
    asyncio.run(submit_and_serve_others())


@pytest.mark.parametrize(("content", "status"), [(b"no database" * 1000, 500), (b"", 503)])
def test_an_index_that_is_damaged_is_not_waited_for_and_one_without_room_is(
    tmp_path: Path, content: bytes, status: int
) -> None:
    (tmp_path / "index").write_bytes(content)
    connection = sqlite3.connect(tmp_path / "index")
    with pytest.raises(sqlite3.Error) as caught:
        connection.execute("CREATE TABLE first(x)")
        connection.execute("PRAGMA max_page_count=1")
        connection.execute("CREATE TABLE second(x)")
    answer = asyncio.run(server._unwritable(None, caught.value))
    assert answer.status_code == status and b"the index cannot be used" in answer.body
