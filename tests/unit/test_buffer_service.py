"""The buffer's event loop answers others, whatever one request costs."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

from megatron_sao.buffer import server
from megatron_sao.buffer.server import LARGE_BODY, Service
from megatron_sao.data.trajectory import TrajectoryError

pytestmark = pytest.mark.unit


def test_while_a_large_body_is_checked_the_loop_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    others_were_served = threading.Event()

    def admit(payload: bytes, *_: object) -> None:
        assert others_were_served.wait(5), "the body was checked on the loop's own thread"
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
