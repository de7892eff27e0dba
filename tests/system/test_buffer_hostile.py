"""Broken and hostile clients against the real server: nothing but a 4xx and a counter comes of it."""

import contextlib
import json
import socket
import struct
import time

import httpx
import numpy as np
import psutil
import pytest

from tests.system.buffer_process import LONG, PATIENCE, TOKEN, on_async, serve_engine, serving
from tests.trajectories import make_trajectory

pytestmark = pytest.mark.system

WAIT = json.dumps({"incarnation": 1, "batch_size": 2, "policy_version": 0, "wait": 100})  # for what never comes
UNKNOWN = "POST /v1/trajectories HTTP/1.1\r\nHost: b\r\n"
HEAD = f"POST /v1/trajectories HTTP/1.1\r\nHost: b\r\nAuthorization: Bearer {TOKEN}\r\n"
POLL = HEAD.replace("trajectories", "batches/rl/0") + "Content-Type: application/json\r\n"
SECTIONS = {"buffer": {"max_body_bytes": 100_000}}


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
    """After every test the process lives, has logged no error, and serves."""
    yield
    for buffer in buffers:
        assert buffer.process.is_alive()
        assert "Traceback" not in buffer.log()
        began = time.monotonic()
        assert buffer.client().stats()["trajectories_stored"] == 0
        assert time.monotonic() - began < LONG


def refusals(buffer):
    return buffer.client().stats()["requests_refused"]


def answer(connection):
    """All that comes until the other side closes."""
    data = b""
    while chunk := connection.recv(65536):
        data += chunk
    return data


def arrays_that_disagree():
    good = make_trajectory(versions=[("1.0", 2, 6)])
    return {
        name: make_trajectory(**{name: np.concatenate([getattr(good, name), [0]]).astype(getattr(good, name).dtype)})
        for name in ("loss_mask", "logprobs", "rewards")
    }


BODIES = {
    "nothing": b"",
    "no msgpack": b"\xc1\xff\x00",
    "a cut message": make_trajectory().encode()[:-7],
    "lists in lists": b"\x91" * 90_000,
    "a list of 2^32 - 1": b"\xdd\xff\xff\xff\xff",
    "another format": json.dumps({"token_ids": [1, 2]}).encode(),
    "an id beyond the vocabulary": make_trajectory(token_ids=np.array([1, 2, 3, 4, 5, 7], np.int32)).encode(),
    "NaN": make_trajectory(logprobs=np.array([0, 0, np.nan, -1, 0, -1], np.float32)).encode(),
    "an infinite reward": make_trajectory(rewards=np.array([0, 0, 0, 0, 0, np.inf], np.float32)).encode(),
    "a visit never leased": make_trajectory(task_id="train/3", epoch=99, versions=[("1.0", 2, 6)]).encode(),
    "another run's": make_trajectory(run_id="other", versions=[("1.0", 2, 6)]).encode(),
    "a version of the future": make_trajectory(versions=[("9.0", 2, 6)]).encode(),
    **{f"{name} too long": trajectory.encode() for name, trajectory in arrays_that_disagree().items()},
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_bad_body_is_a_422_with_a_sentence_and_a_count(buffer, body):
    before = refusals(buffer)
    response = buffer.post("/v1/trajectories", body)
    assert response.status_code == 422 and len(response.json()["error"]) > 10
    assert refusals(buffer) == before + 1


def test_wrong_tokens_and_wrong_paths_are_counted(buffer):
    before = refusals(buffer)
    assert buffer.get("/v1/stats", token="guess").status_code == 401
    assert buffer.get("/v1/stats", token="guess again").status_code == 401
    headers = {"Authorization": f"Bearer {TOKEN}"}
    assert httpx.delete(f"{buffer.url}/v1/stats", headers=headers, timeout=LONG).status_code == 405
    assert buffer.post("/v1/trajectories", b"x" * 100_001).status_code == 413
    assert buffer.get("/v1/secrets").status_code == 404
    assert buffer.post("/v1/commits/rl/0", b'{"incarnation": 7}').status_code == 409
    assert buffer.post("/v1/engines", b'{"id": "e", "url": "u", "tp": 9223372036854775808}').status_code == 422
    assert refusals(buffer) == before + 7


def test_an_id_that_is_taken_is_refused_and_a_replay_is_a_duplicate(buffer):
    """Leaves nothing stored behind: what it submits has failed."""
    serve_engine(buffer)  # here, since an engine that nobody hears of is down after 15 s

    async def scenario(client):
        first, second = await client.lease("w", 2, 5.0)

        def failed(lease, id):
            return make_trajectory(
                id=id, task_id=lease.task["id"], epoch=lease.epoch, attempt=lease.attempt, failure="x",
                versions=[("1.0", 2, 6)],
            )  # fmt: skip

        assert await client.submit(failed(first, "mine")) == "dropped"
        assert await client.submit(failed(first, "mine")) == "duplicate"
        response = buffer.post("/v1/trajectories", failed(second, "mine").encode())
        assert response.status_code == 422 and "another visit's trajectory" in response.text
        await client.release(second.visit_id, second.attempt, "enough")

    on_async(buffer, scenario)


@pytest.mark.parametrize(
    "bytes_sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200,  # a TLS client
        b"\x00\x01\x02\r\n\r\n",
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: b\r\nContent-Length: -5\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: b\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        f"{HEAD}Transfer-Encoding: chunked\r\n\r\n4\r\nxxxx\r\nzz\r\n".encode(),
    ],
)
def test_what_is_no_http_is_answered_400_or_closed(buffer, bytes_sent):
    before = refusals(buffer)
    with buffer.connect() as connection:
        try:
            connection.sendall(bytes_sent)
            data = answer(connection)
        except ConnectionError:
            data = b""
    assert data == b"" or b" 40" in data.split(b"\r\n")[0]
    assert refusals(buffer) >= before + 1


@pytest.mark.parametrize(
    ("start", "endless"),
    [
        ("GET /v1/stats HTTP/1.1\r\n", f"X-More: {'a' * 1000}\r\n"),
        ("GET /v1/stats HTTP/1.1\r\nX-Long: ", "a" * 1000),
        ("GET /", "a" * 1000),
        (f"{HEAD}Transfer-Encoding: chunked\r\n\r\n4\r\nxxxx\r\n0\r\n", f"X-Trailer: {'a' * 1000}\r\n"),
        (f"{POLL}Content-Length: {len(WAIT)}\r\n\r\n{WAIT}", "GET /healthz HTTP/1.1\r\nHost: b\r\n\r\n" * 30),
        (f"{POLL}Content-Length: {len(WAIT)}\r\n\r\n{WAIT}{HEAD}Content-Length: 4000000000\r\n\r\n", "x" * 1000),
        (f"{UNKNOWN}Transfer-Encoding: chunked\r\n\r\n0\r\n", f"X-Trailer: {'a' * 1000}\r\n"),
    ],
    ids=["headers", "header", "path", "trailers", "behind a long-poll", "a body behind it", "refused before"],
)  # fmt: skip
def test_what_goes_beside_a_body_is_bounded(buffer, start, endless):
    before = refusals(buffer)
    sent = 0
    with buffer.connect() as connection:
        connection.sendall(start.encode())
        time.sleep(0.2)  # so that the answer to a request that is refused at once is on its way
        with pytest.raises(ConnectionError):  # it is closed, long before patience or a limit on bodies would
            while sent < 2**24:
                connection.sendall(endless.encode())
                sent += len(endless)
    assert refusals(buffer) >= before + 1


def test_many_requests_without_reading_an_answer_cost_no_memory_and_leaving_no_error(buffer):
    process = psutil.Process(buffer.process.pid)
    before = process.memory_info().rss
    for _ in range(5):
        with buffer.connect() as connection:
            connection.settimeout(0.5)
            with contextlib.suppress(ConnectionError, TimeoutError):
                for _ in range(200):
                    connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: b\r\n\r\n" * 500)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # ends with a reset
    assert process.memory_info().rss < before + 2**26


def test_a_body_behind_an_offer_to_upgrade_is_read(buffer):
    for upgrade in ("h2c", "websocket"):
        body = make_trajectory(run_id="another").encode()
        response = buffer.post("/v1/trajectories", body, Connection="Upgrade", Upgrade=upgrade)
        assert response.status_code == 422 and "run_id: 'another'" in response.text


@pytest.mark.parametrize("chunked", [False, True])
def test_a_large_body_with_a_wrong_token_is_told_so(buffer, chunked):
    body = make_trajectory().encode() * 4000
    content = (body[i : i + 2**14] for i in range(0, len(body), 2**14)) if chunked else body
    headers = {"Authorization": "Bearer wrong"}
    response = httpx.post(f"{buffer.url}/v1/trajectories", content=content, headers=headers, timeout=LONG)
    assert len(body) > 2**20 and response.status_code == 401


def test_a_client_that_leaves_in_the_middle_of_its_body_leaves_nothing(buffer):
    before = buffer.get("/v1/stats").json()
    for size in (0, 1, 500):
        with buffer.connect() as connection:
            connection.sendall(f"{HEAD}Content-Length: 1000\r\n\r\n".encode() + b"x" * size)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # ends with a reset
    after = buffer.get("/v1/stats").json()
    assert [after[name] for name in ("trajectories_stored", "stored_bytes")] == [
        before[name] for name in ("trajectories_stored", "stored_bytes")
    ]


def test_a_head_that_never_ends_is_closed_however_often_a_byte_of_it_comes(impatient):
    before = refusals(impatient)
    began = time.monotonic()
    with impatient.connect() as connection:
        connection.settimeout(0.2)
        connection.sendall(b"GET /")
        try:
            while time.monotonic() - began < LONG:
                connection.sendall(b"a")
                try:
                    if connection.recv(100) == b"":
                        break
                except TimeoutError:
                    pass
        except ConnectionError:
            pass
    assert PATIENCE * 0.9 < time.monotonic() - began < LONG
    assert refusals(impatient) == before + 1


def test_a_head_begun_behind_a_body_has_no_longer_than_another(impatient):
    before = refusals(impatient)
    with impatient.connect() as connection:
        began = time.monotonic()
        connection.sendall(f"{HEAD}Content-Length: 4\r\n\r\nbodyGET /v1/st".encode())
        assert answer(connection).startswith(b"HTTP/1.1 422 ")
        assert PATIENCE * 0.9 < time.monotonic() - began < LONG
    assert refusals(impatient) == before + 2


def test_a_body_that_trickles_is_a_408(impatient):
    before = refusals(impatient)
    began = time.monotonic()
    with impatient.connect() as connection:
        connection.sendall(f"{HEAD}Content-Length: 1000\r\nConnection: close\r\n\r\n".encode())
        connection.settimeout(0.2)
        data = b""
        while b"\r\n" not in data and time.monotonic() - began < LONG:
            connection.sendall(b"x")
            try:
                data += connection.recv(1000)
            except TimeoutError:
                continue
    assert data.startswith(b"HTTP/1.1 408 ")
    assert PATIENCE * 0.9 < time.monotonic() - began < LONG
    assert refusals(impatient) == before + 1


def test_a_body_of_another_content_type_is_refused_by_that_name(buffer):
    response = buffer.post("/v1/trainers", b'{"run_id": "test", "policy_version": 0}', **{"Content-Type": "text/plain"})
    assert response.status_code == 422
    assert response.json()["error"] == "the Content-Type is text/plain: send the body as application/json"


def test_two_thousand_idle_connections_stop_nobody_and_are_closed(impatient):
    process = psutil.Process(impatient.process.pid)
    before = process.memory_info().rss
    connections = [impatient.connect() for _ in range(2000)]
    try:
        began = time.monotonic()
        impatient.client().stats()
        assert time.monotonic() - began < LONG
        assert process.memory_info().rss - before < 150 * 2**20
        deadline = time.monotonic() + LONG
        while process.num_fds() > 200 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert process.num_fds() < 200
    finally:
        for connection in connections:
            connection.close()
