"""The buffer as a process: real HTTP, real kills."""

import asyncio
import json
import os
import resource
import signal
import socket
import threading
import time

import httpx
import jsonschema
import pytest

from megatron_sao.buffer.client import BufferClient, BufferError, BufferUnavailable
from megatron_sao.buffer.server import main
from megatron_sao.buffer.store import Store
from megatron_sao.config import ConfigError
from tests.system.buffer_process import TOKEN, Buffer, on_async, serve_engine
from tests.trajectories import make_trajectory

pytestmark = pytest.mark.system


@pytest.fixture
def buffer(tmp_path):
    buffer = Buffer(tmp_path)
    buffer.start()
    yield buffer
    buffer.kill()


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """One process for the tests that leave nothing behind in it; it takes small bodies only."""
    buffer = Buffer(tmp_path_factory.mktemp("shared"), buffer={"max_body_bytes": 1000})
    buffer.start()
    yield buffer
    buffer.kill()


def played(lease, version="1.0", **changes):
    fields = {
        "id": f"{lease.kind}/{lease.visit_id}",
        "task_id": lease.task["id"],
        "epoch": lease.epoch,
        "attempt": lease.attempt,
        "kind": lease.kind,
        "versions": [(version, 2, 6)],
    }
    return make_trajectory(**(fields | changes))


def play(buffer, count, version="1.0"):
    async def scenario(client):
        leases = await client.lease("w", count, 5.0)
        return [await client.submit(played(lease, version)) for lease in leases]

    return on_async(buffer, scenario)


def test_trainer_worker_and_sidecar_go_through_a_step_and_an_evaluation(buffer):
    trainer = buffer.client()
    assert trainer.register_trainer("test", 0) == 1
    serve_engine(buffer)
    (engine,) = trainer.engines()
    assert (engine.id, engine.state, engine.version, engine.tp) == ("host/0", "clean", "1.0", 1)
    assert on_async(buffer, lambda client: client.heartbeat_engine("host/0")).state == "clean"
    assert trainer.batch("rl", 0, 1, 2, 0, wait=0) is None
    assert play(buffer, 2) == ["accepted", "accepted"]
    batch = trainer.batch("rl", 0, 1, 2, 0, wait=5)
    assert [(entry.num_tokens, entry.num_action_tokens) for entry in batch] == [(6, 3)] * 2
    assert [trainer.trajectory(entry.id).total_reward for entry in batch] == [1.0, 1.0]
    trainer.start_eval("rl", 0, 1, "1.0", 3)
    assert trainer.eval_result("rl", 0, 1, wait=0) is None
    assert play(buffer, 3) == ["accepted"] * 3
    ids = trainer.eval_result("rl", 0, 1, wait=5)
    assert [trainer.trajectory(id).task_id for id in ids] == ["eval/0", "eval/1", "eval/2"]
    trainer.commit("rl", 1, 1)
    stats = trainer.stats()
    assert (stats["train_trajectories_accepted"], stats["eval_trajectories_accepted"]) == (2, 3)
    with pytest.raises(BufferError) as caught:
        trainer.trajectory(batch[0].id)
    assert caught.value.status == 410


def test_leases_can_be_renewed_and_released_over_http(buffer):
    buffer.client().register_trainer("test", 0)
    serve_engine(buffer)

    async def scenario(client):
        (lease,) = await client.lease("w", 1, 0)
        assert 0 < lease.expires_in <= 120 and lease.task["prompt"] == lease.task["id"].removeprefix("train/")
        assert await client.renew(lease.visit_id, lease.attempt) == 120
        await client.release(lease.visit_id, lease.attempt, "shutting down")
        with pytest.raises(BufferError, match="stop its episode") as caught:
            await client.renew(lease.visit_id, lease.attempt)
        assert caught.value.status == 409
        (again,) = await client.lease("w", 1, 0)
        assert (again.visit_id, again.attempt) == (lease.visit_id, 2)
        assert await client.submit(played(again)) == "accepted"
        assert await client.submit(played(again)) == "duplicate"

    on_async(buffer, scenario)


def test_a_visit_is_not_granted_to_a_worker_that_has_gone(buffer):
    buffer.client().register_trainer("test", 0)

    async def leave(client):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.lease("gone", 1, 30.0), 0.5)

    on_async(buffer, leave)
    serve_engine(buffer)
    time.sleep(0.5)
    assert buffer.client().stats()["visits_leased"] == 0


def test_a_worker_waits_out_a_full_buffer(tmp_path):
    """However long it is full, and however soon the client would give up on an absent one."""
    size = len(make_trajectory().encode())
    buffer = Buffer(tmp_path, buffer={"max_stored_bytes": 3 * size})
    buffer.start()
    trainer = buffer.client()
    trainer.register_trainer("test", 0)
    serve_engine(buffer)

    async def scenario(client):
        *leases, last = await client.lease("w", 3, 5.0)
        assert [await client.submit(played(lease)) for lease in leases] == ["accepted"] * 2
        client.give_up_after = 0.3
        waiting = asyncio.create_task(client.submit(played(last)))
        await asyncio.sleep(2.5)
        assert not waiting.done()
        assert await client.renew(last.visit_id, last.attempt) == 120
        assert trainer.batch("rl", 0, 1, 2, 0, wait=5)
        trainer.commit("rl", 1, 1)
        assert await waiting == "accepted"
        buffer.kill()
        with pytest.raises(BufferUnavailable):
            await client.submit(played(last))

    on_async(buffer, scenario)


def test_a_batch_long_poll_answers_as_soon_as_the_last_trajectory_is_in(buffer):
    trainer = buffer.client()
    trainer.register_trainer("test", 0)
    serve_engine(buffer)
    play(buffer, 1)
    timer = threading.Timer(0.5, play, (buffer, 1))
    timer.start()
    start = time.monotonic()
    assert len(trainer.batch("rl", 0, 1, 2, 0, wait=100)) == 2
    assert time.monotonic() - start < 50
    timer.join()
    start = time.monotonic()
    assert trainer.batch("rl", 1, 1, 2, 1, wait=1.5) is None
    assert time.monotonic() - start >= 1.4


def test_registrations_leases_and_the_address_survive_a_kill(buffer):
    trainer = buffer.client()
    trainer.register_trainer("test", 0)
    serve_engine(buffer)
    (lease,) = on_async(buffer, lambda client: client.lease("w", 1, 0))
    url = buffer.url
    buffer.kill()
    buffer.start()
    assert buffer.url == url
    assert trainer.engines()[0].state == "clean"
    assert on_async(buffer, lambda client: client.renew(lease.visit_id, lease.attempt)) == 120
    assert trainer.register_trainer("test", 0) == 2


def test_everything_but_healthz_needs_the_token(shared):
    for path in ("/v1/stats", "/v1/engines", "/metrics", "/v1/trajectories/x", "/nowhere"):
        assert shared.get(path, token="wrong").status_code == 401
        assert httpx.get(shared.url + path, trust_env=False, timeout=60).status_code == 401
    assert shared.post("/v1/trainers", b"{}", token="x").status_code == 401
    assert httpx.get(f"{shared.url}/healthz", trust_env=False, timeout=60).json() == {"status": "ok"}
    with pytest.raises(BufferError, match="MEGATRON_SAO_TOKEN") as caught:
        BufferClient(shared.url, "wrong").stats()
    assert caught.value.status == 401


def test_bad_requests_get_a_status_and_a_sentence(shared):
    def problem(response):
        return response.status_code, response.json()["error"]

    assert problem(shared.get("/nowhere")) == (404, "GET /nowhere: Not Found")
    assert problem(shared.post("/v1/trainers", b'{"run_id": "test"}'))[0] == 422
    status, sentence = problem(shared.post("/v1/trainers", b'{"run_id": "test", "policy_version": -1}'))
    assert status == 422 and "body.policy_version = -1" in sentence
    status, sentence = problem(shared.post("/v1/trainers", b'{"run_id": "test", "policy_version": 0, "x": 1}'))
    assert status == 422 and "body.x" in sentence
    assert problem(shared.post("/v1/trainers", b'{"run_id": "other", "policy_version": 0}'))[0] == 409
    for id in ("..", "a\\nb"):  # which no heartbeat could name
        status, sentence = problem(shared.post("/v1/engines", f'{{"id": "{id}", "url": "u", "tp": 1}}'.encode()))
        assert status == 422 and "body.id" in sentence and "no URL can name" in sentence
    assert problem(shared.post("/v1/trainers", b" " * 70_000))[0] == 413
    bad = make_trajectory(token_ids=make_trajectory().token_ids + 1).encode()
    status, sentence = problem(shared.post("/v1/trajectories", bad))
    assert status == 422 and sentence.startswith("token_ids[5]: 7 is outside the vocabulary")
    assert problem(shared.post("/v1/trajectories", b"junk"))[0] == 422
    assert problem(shared.get("/v1/trajectories/a/b")) == (404, "there is no trajectory 'a/b'")


def test_a_body_over_the_limit_is_refused_with_or_without_a_length(shared):
    assert shared.post("/v1/trajectories", b"x" * 1001).status_code == 413
    assert shared.post("/v1/trajectories", iter([b"x" * 600, b"x" * 600])).status_code == 413
    assert shared.post("/v1/trajectories", b"x" * 1000).status_code == 422


def test_the_openapi_document_describes_every_call_and_every_answer(buffer):
    """Each call is made once, and its answer and its status are those of the document."""
    document = buffer.get("/v1/openapi.json").json()
    jsonschema.Draft202012Validator.check_schema(document["components"]["schemas"])
    trajectory = make_trajectory(task_id="train/0", versions=[("1.0", 2, 6)], id="mine").encode()
    calls = [
        ("get", "/healthz", {}, None, 200),
        ("post", "/v1/trainers", {}, {"run_id": "test", "policy_version": 0}, 200),
        ("post", "/v1/engines", {}, {"id": "e", "url": "http://e", "tp": 1}, 200),
        ("post", "/v1/engines/{id}/state", {"id": "e"}, {"state": "dirty", "version": None, "incarnation": 1}, 200),
        ("post", "/v1/engines/{id}/state", {"id": "e"}, {"state": "clean", "version": "1.0", "incarnation": 1}, 200),
        ("post", "/v1/engines/{id}/heartbeat", {"id": "e"}, {"sick": None}, 200),
        ("get", "/v1/engines", {}, None, 200),
        ("post", "/v1/evaluations/{stage}/{step}", {"stage": "rl", "step": "0"},
            {"incarnation": 1, "version": "1.0", "num_prompts": 1}, 200),
        ("post", "/v1/evaluations/{stage}/{step}/result", {"stage": "rl", "step": "0"}, {"incarnation": 1}, 200),
        ("post", "/v1/tasks/lease", {}, {"worker_id": "w", "request_id": "r", "max_leases": 2}, 200),
        ("post", "/v1/tasks/{visit_id}/renew", {"visit_id": "1"}, {"attempt": 1}, 200),
        ("post", "/v1/tasks/{visit_id}/release", {"visit_id": "1"}, {"attempt": 1, "reason": "enough"}, 200),
        ("post", "/v1/trajectories", {}, trajectory, 422),  # not the first task of the shuffled order
        ("post", "/v1/batches/{stage}/{step}", {"stage": "rl", "step": "0"},
            {"incarnation": 1, "batch_size": 2, "policy_version": 0}, 200),
        ("post", "/v1/commits/{stage}/{step}", {"stage": "rl", "step": "0"}, {"incarnation": 7}, 409),
        ("post", "/v1/commits/{stage}/{step}", {"stage": "rl", "step": "0"}, {"incarnation": 1}, 200),
        ("get", "/v1/trajectories/{id}", {"id": "nobody"}, None, 404),
        ("get", "/v1/dropped", {}, None, 200),
        ("get", "/v1/aside", {}, None, 200),
        ("get", "/v1/stats", {}, None, 200),
        ("get", "/v1/trajectories", {}, None, 200),
        ("get", "/v1/batches", {}, None, 200),
    ]  # fmt: skip
    for method, path, parameters, body, status in calls:
        content = body if isinstance(body, bytes) else json.dumps(body).encode() if body is not None else b""
        url = path.format(**parameters)
        response = buffer.get(url) if method == "get" else buffer.post(url, content)
        assert response.status_code == status, (path, response.text)
        described = document["paths"][path][method]["responses"][str(status)]["content"]["application/json"]["schema"]
        jsonschema.validate(response.json(), described | {"components": document["components"]})
    documented = {(method, path) for path, methods in document["paths"].items() for method in methods}
    assert documented - {(method, path) for method, path, *_ in calls} == {("get", "/metrics")}


def test_metrics_are_in_the_prometheus_format(shared):
    lines = shared.get("/metrics").text.splitlines()
    assert "megatron_sao_buffer_dropped_stale_total 0" in lines
    assert "megatron_sao_buffer_dropped_stale_fraction 0.0" in lines
    assert "# TYPE megatron_sao_buffer_trajectories_stored gauge" in lines
    assert all(line.startswith("# TYPE ") or len(line.split(" ")) == 2 for line in lines)


def test_whatever_keeps_the_buffer_from_starting_is_a_sentence(tmp_path, monkeypatch):
    config = Buffer(tmp_path).config
    with socket.socket() as occupant:
        occupant.bind(("127.0.0.1", 0))
        occupant.listen()
        port = occupant.getsockname()[1]
        monkeypatch.setenv("MEGATRON_SAO_TOKEN", TOKEN)
        with pytest.raises(ConfigError, match=rf"cannot listen on 127.0.0.1:{port}: Address already in use"):
            main(config, tmp_path, "127.0.0.1", port)
    (tmp_path / "buffer").write_text("a file")
    with pytest.raises(ConfigError, match=r"cannot use .*/buffer: .*File exists.*; look at the disk under it"):
        main(config, tmp_path, port=0)
    (tmp_path / "buffer").unlink()
    Store(tmp_path / "buffer", config, [], [], run_id="another").close()
    with pytest.raises(ConfigError, match="filled by the run 'another'"):
        main(config, tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"gives no vocab_size"):
        main(config, tmp_path)
    monkeypatch.setenv("MEGATRON_SAO_TOKEN", "two words")
    with pytest.raises(ConfigError, match="MEGATRON_SAO_TOKEN has characters that no HTTP header carries; use ASCII"):
        main(config, tmp_path)
    monkeypatch.delenv("MEGATRON_SAO_TOKEN")
    with pytest.raises(ConfigError, match="MEGATRON_SAO_TOKEN is not set"):
        main(config, tmp_path)


def test_sigterm_ends_it_within_seconds_although_clients_are_polling(buffer):
    trainer = buffer.client(give_up_after=0)
    trainer.register_trainer("test", 0)
    outcome = []

    def poll():
        try:
            outcome.append(trainer.batch("rl", 0, 1, 3, 0, wait=100))
        except BufferUnavailable as error:
            outcome.append(error)

    limit = trainer.stats()["outstanding_limit"]
    thread = threading.Thread(target=poll)
    thread.start()
    while buffer.client().stats()["outstanding_limit"] == limit:
        time.sleep(0.02)  # until it has been asked for a batch of another size than the config's
    os.kill(buffer.process.pid, signal.SIGTERM)
    buffer.process.join(40)
    assert buffer.process.exitcode is not None
    thread.join(60)
    assert outcome == [None]


def test_a_disk_that_takes_nothing_is_logged_once_and_counted(buffer):
    buffer.client().register_trainer("test", 0)
    more_than_the_log = 2**15
    resource.prlimit(buffer.process.pid, resource.RLIMIT_FSIZE, (more_than_the_log, resource.RLIM_INFINITY))
    for _ in range(3):
        assert buffer.post("/v1/trainers", b'{"run_id": "test", "policy_version": 0}').status_code == 503
    assert buffer.log().count("the index cannot be used: ") == 1
    assert buffer.get("/v1/stats").json()["requests_put_off"] == 3


def test_a_client_gives_up_on_an_absent_buffer_with_a_sentence():
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        client = BufferClient(f"http://127.0.0.1:{reserved.getsockname()[1]}", TOKEN, give_up_after=0.5)
        with pytest.raises(BufferUnavailable, match="has not served a call for"):
            client.stats()
