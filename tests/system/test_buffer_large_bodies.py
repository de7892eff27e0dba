"""Trajectories that are received in place, against the real server: whole however they come, nothing left of a half."""

import http.client
import json
import os
import select
import signal
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from urllib.parse import urlsplit

import psutil
import pytest

from megatron_sao.buffer.body import LARGE
from megatron_sao.buffer.guard import TURN_SECONDS
from tests.system.buffer_process import LONG, PATIENCE, TOKEN, Buffer, on_async, serve_engine, serving
from tests.trajectories import make_long_trajectory

pytestmark = pytest.mark.system

MOST = 2_000_000
HEAD = f"POST /v1/trajectories HTTP/1.1\r\nHost: b\r\nAuthorization: Bearer {TOKEN}\r\n"
LEFT = f"GET /v1/stats HTTP/1.1\r\nHost: b\r\nAuthorization: Bearer {TOKEN}\r\nConnection: close\r\n\r\n".encode()
SECTIONS = {
    "buffer": {"max_body_bytes": MOST},
    "rollout": {"environment": "package.module:Class", "max_tokens": 200_000},
    "rl": {"batch_size": 16},
}


@pytest.fixture(scope="module")
def buffer(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("patient"), 2 * LONG, **SECTIONS) as buffer:
        yield buffer


@pytest.fixture(scope="module")
def impatient(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("impatient"), PATIENCE, **SECTIONS) as buffer:
        yield buffer


@pytest.fixture(autouse=True)
def unharmed(buffers):
    """After every test a large trajectory goes in as it is, and no error has been logged."""
    yield
    for buffer in buffers:
        assert buffer.process.is_alive()
        trajectory = large(buffer, "after")
        with buffer.connect() as connection:
            connection.sendall(request(trajectory.encode()))
            assert answers(connection, 1) == [(200, {"result": "accepted"})]
        assert_stored(buffer, trajectory)
        assert "Traceback" not in buffer.log()


def large(buffer, name, tokens=60_000):
    """For a visit of its own."""
    serve_engine(buffer)  # an engine that nobody hears of is down after 15 s
    (lease,) = on_async(buffer, lambda client: client.lease("w", 1, 5.0))
    return make_long_trajectory(
        tokens, id=f"{name}/{lease.visit_id}", task_id=lease.task["id"], epoch=lease.epoch, attempt=lease.attempt
    )


def request(body, length=None, headers=""):
    return f"{HEAD}{headers}Content-Length: {length or len(body)}\r\n\r\n".encode() + body


def answers(connection, count):
    """(status, JSON) of the next ``count`` answers."""
    data, found = b"", []
    while len(found) < count:
        head, end, rest = data.partition(b"\r\n\r\n")
        lines = head.decode().lower().split("\r\n")
        length = next((int(line.split(":")[1]) for line in lines if line.startswith("content-length")), 0)
        if not end or len(rest) < length:
            data += (chunk := connection.recv(65536))
            assert chunk, f"closed after {found} and {data!r}"
            continue
        found.append((int(lines[0].split()[1]), json.loads(rest[:length]) if length else None))
        data = rest[length:]
    return found


def assert_stored(buffer, trajectory):
    assert buffer.get(f"/v1/trajectories/{trajectory.id}").content == trajectory.encode()


@pytest.mark.parametrize("sizes", [[1, 2, 3], [65_535], [LARGE - 1], [10**9]], ids=str)
def test_a_body_is_stored_as_it_was_whatever_pieces_it_comes_in(buffer, sizes):
    trajectory = large(buffer, "pieces")
    sent = request(trajectory.encode())
    with buffer.connect() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for size in sizes * 50:
            connection.sendall(sent[:size])
            sent = sent[size:]
        connection.sendall(sent[:-1])
        time.sleep(0.1)  # the last byte alone is h11's
        connection.sendall(sent[-1:])
        assert answers(connection, 1) == [(200, {"result": "accepted"})]
    assert_stored(buffer, trajectory)


@pytest.mark.parametrize("length", [LARGE - 1, LARGE, LARGE + 1, 2 * LARGE])
def test_a_body_on_the_bound_to_large_is_read_to_its_end_and_no_further(buffer, length):
    with buffer.connect() as connection:
        connection.sendall(request(bytes(length)) + request(b"x" * length) + LEFT)
        (first, refused), (second, _), (third, _) = answers(connection, 3)
    assert (first, second, third) == (422, 422, 200) and "one msgpack message" in refused["error"]


def test_what_follows_large_bodies_on_the_connection_is_answered_in_its_turn(buffer):
    trajectories = [large(buffer, "follows") for _ in range(3)]
    with buffer.connect() as connection:
        for trajectory in trajectories:
            connection.sendall(request(trajectory.encode(), headers="Expect: 100-continue\r\n"))
            assert answers(connection, 2) == [(100, None), (200, {"result": "accepted"})]
        connection.sendall(request(trajectories[0].encode()) + LEFT)
        (status, duplicate), (_, stats) = answers(connection, 2)
    assert (status, duplicate) == (200, {"result": "duplicate"}) and "requests_refused" in stats
    for trajectory in trajectories:
        assert_stored(buffer, trajectory)


@pytest.mark.parametrize("reset", [False, True])
def test_clients_that_leave_in_the_middle_leave_no_file_and_no_memory_behind(buffer, reset):
    process = psutil.Process(buffer.process.pid)
    files, memory = process.num_fds(), process.memory_info().rss
    for _ in range(10):
        connections = [buffer.connect() for _ in range(4)]
        for part, connection in enumerate(connections):
            connection.sendall(request(bytes(part * MOST // 3 - 1 if part else 0), MOST))
        for connection in connections:
            if reset:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
    deadline = time.monotonic() + LONG
    while process.num_fds() > files + 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert process.num_fds() <= files + 2
    assert process.memory_info().rss < memory + 10 * MOST  # 40 halves would be more


def test_clients_that_stay_after_their_body_hold_no_memory(buffer):
    process = psutil.Process(buffer.process.pid)
    connections = [buffer.connect() for _ in range(40)]
    memory = []
    for connection in connections:
        connection.sendall(request(bytes(MOST)))
        assert answers(connection, 1)[0][0] == 422
        memory.append(process.memory_info().rss)
    for connection in connections:
        connection.close()
    assert memory[-1] < memory[3] + 10 * MOST


def test_however_many_large_bodies_come_at_once_all_are_taken(buffer):
    """20 of 2 MB are far more than may be in memory. They take turns, so none is told to come again."""
    body, address = bytes(MOST), urlsplit(buffer.url)

    def post(_):
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=2 * LONG)
        connection.request("POST", "/v1/trajectories", body, {"Authorization": f"Bearer {TOKEN}"})
        status = connection.getresponse().status
        connection.close()
        return status

    with ThreadPoolExecutor(20) as pool:
        assert list(pool.map(post, range(20))) == [422] * 20


def test_slow_clients_keep_a_large_body_waiting_for_no_longer_than_their_turns(buffer):
    with ExitStack() as stack:
        began = time.monotonic()
        for _ in range(2):
            stack.enter_context(buffer.connect()).sendall(request(bytes(MOST // 2), MOST))
        buffer.wait_until_read()
        connection = stack.enter_context(buffer.connect())
        connection.sendall(request(bytes(LARGE)))
        assert answers(connection, 1)[0][0] == 422
        assert TURN_SECONDS < time.monotonic() - began < LONG


def test_a_client_that_does_not_read_its_answers_is_closed(impatient):
    """It asks for 300 times 65 kB, which is more than the kernel keeps for it."""
    trajectory = large(impatient, "unread", 5_000)
    assert on_async(impatient, lambda client: client.submit(trajectory)) == "accepted"
    ask = f"GET /v1/trajectories/{trajectory.id} HTTP/1.1\r\nHost: b\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
    before = impatient.client().stats()["requests_refused"]
    with impatient.connect() as connection:
        began = time.monotonic()
        connection.sendall(ask.encode() * 300)
        ended = select.poll()
        ended.register(connection, 0)  # an end is reported in any case
        assert ended.poll(1000 * LONG) and time.monotonic() - began > PATIENCE
    assert impatient.client().stats()["requests_refused"] == before + 1


def test_more_large_bodies_than_there_is_memory_for_are_told_to_come_again(buffer):
    unannounced = f"{HEAD}Transfer-Encoding: chunked\r\n\r\n{MOST:x}\r\n".encode() + bytes(MOST - 10)
    held = [buffer.connect() for _ in range(4)]  # bodies of no known length take no turns
    for connection in held:
        connection.sendall(unannounced)
    buffer.wait_until_read()
    statuses = []
    for _ in range(3):
        with buffer.connect() as connection:
            connection.sendall(request(bytes(MOST - 10), MOST))
            statuses.append(answers(connection, 1)[0][0])
    assert statuses == [429] * 3
    for connection in held:
        connection.sendall(bytes(10) + b"\r\n0\r\n\r\n")
        assert answers(connection, 1)[0][0] == 422
        connection.close()


@pytest.mark.parametrize(("at_once", "pause", "status"), [(10**6, 0.3, 422), (0, 1.0, 408)])
def test_a_large_body_may_come_as_slowly_as_the_bound_and_no_slower(impatient, at_once, pause, status):
    """The bound is 64 KiB per second after the patience of 1 s: what came at once gives 15 s to what comes slowly."""
    piece = bytes(24 * 2**10)
    with impatient.connect() as connection:
        connection.sendall(request(bytes(at_once), at_once + 8 * len(piece)))
        for _ in range(8):
            connection.sendall(piece)
            if select.select([connection], [], [], pause)[0]:
                break
        assert answers(connection, 1)[0][0] == status


def test_a_buffer_that_is_stopped_waits_for_no_body(tmp_path):
    """Three in the middle of their bodies, one of them small, and three large ones whose turn has not come."""
    buffer = Buffer(tmp_path, buffer={"max_body_bytes": MOST})
    buffer.start()
    halves = [request(bytes(MOST // 2), MOST)] * 5 + [request(b"half", 1000)]
    with ExitStack() as stack:
        connections = [stack.enter_context(buffer.connect()) for _ in halves]
        for connection, half in zip(connections, halves, strict=True):
            connection.sendall(half)
        assert buffer.get("/healthz").is_success  # which came after them
        began = time.monotonic()
        os.kill(buffer.process.pid, signal.SIGTERM)
        stopped = (503, {"error": "the buffer is being stopped; send it again"})
        assert [answers(connection, 1) for connection in connections] == [[stopped]] * 6
        buffer.process.join(60)
        assert buffer.process.exitcode is not None
        assert time.monotonic() - began < 20  # its patience is 30 s
    assert "Traceback" not in buffer.log() and "Cancel" not in buffer.log()
