"""Grouping of tensors into buckets, and engines that refuse: no wait for a peer that will never come."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch

from megatron_sao.weights.push import EngineLink, buckets, push_weights

pytestmark = pytest.mark.unit


def test_buckets_keep_order_and_bound_and_give_a_larger_tensor_one_of_its_own() -> None:
    tensors = [(name, torch.zeros(size)) for name, size in (("a", 2), ("b", 2), ("c", 9), ("d", 1), ("e", 3))]
    names = [[name for name, _ in bucket] for bucket in buckets(iter(tensors), max_bytes=16)]
    assert names == [["a", "b"], ["c"], ["d", "e"]]
    assert list(buckets(iter([]), 16)) == []


@pytest.fixture
def refusing_engine() -> Iterator[str]:
    """Answers every call, and refuses to join a group."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            body = json.dumps({"success": False, "message": "no such backend"}).encode()
            self.send_response(400 if self.path == "/init_weights_update_group" else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_an_engine_that_is_gone_or_refuses_costs_no_wait_and_does_not_stop_the_push(refusing_engine: str) -> None:
    links = [EngineLink(url, 1, "token", "gloo") for url in ("http://127.0.0.1:9", refusing_engine)]
    started = time.monotonic()
    failed = push_weights(links, iter([("a", torch.zeros(2))]), "1.1", bucket_bytes=16)
    assert time.monotonic() - started < 10
    assert set(failed) == {"http://127.0.0.1:9", refusing_engine}
    assert "init_weights_update_group: 400" in failed[refusing_engine]
