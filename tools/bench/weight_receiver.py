"""A receiver of weight pushes that takes one request at a time, as SGLang does, but receives into the same memory each
time and loads nothing. ``python -m tools.bench.weight_receiver PORT RECEIPTS``; RECEIPTS as in
timed_engine/sitecustomize.py."""

from __future__ import annotations

import json
import sys
import threading
import time
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _new_process_group_helper, _world

GROUPS: dict[str, dist.ProcessGroup] = {}
MEMORY = torch.empty(0, dtype=torch.uint8)
TIMEOUT = timedelta(seconds=60)


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int, receipts: Path) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.receipts, self.turn = receipts, threading.Lock()


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one packet: the second of two would wait for the client's acknowledgement

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or "{}")
        with self.server.turn:
            if self.path == "/init_weights_update_group":
                join(body)
            elif self.path == "/destroy_weights_update_group":
                dist.destroy_process_group(GROUPS.pop(body["group_name"]))
            elif body.get("names"):
                receipt = receive(body)
                with self.server.receipts.open("a") as file:
                    print(json.dumps(receipt), file=file)
        answer = b'{"success": true}'
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)
        self.wfile.flush()

    def log_message(self, *_: object) -> None: ...


def join(body: dict[str, Any]) -> None:
    name, size = body["group_name"], body["world_size"]
    store = PrefixStore(name, dist.TCPStore(body["master_address"], body["master_port"], size, timeout=TIMEOUT))
    group, _ = _new_process_group_helper(size, 1, [], dist.Backend("gloo"), store, group_name=name, timeout=TIMEOUT)
    _world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    GROUPS[name] = group


def receive(body: dict[str, Any]) -> dict[str, Any]:
    entered = time.monotonic()
    sizes = zip(body["shapes"], body["dtypes"], strict=True)
    nbytes = sum(torch.Size(shape).numel() * getattr(torch, dtype).itemsize for shape, dtype in sizes)
    if len(MEMORY) < nbytes:
        MEMORY.resize_(nbytes)
    dist.broadcast(MEMORY[:nbytes], 0, group=GROUPS[body["group_name"]])
    received = time.monotonic()
    return {"first": body["names"][0], "entered": entered, "received": received, "loaded": received}


if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    Server(int(sys.argv[1]), Path(sys.argv[2])).serve_forever()
