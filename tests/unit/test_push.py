"""Engines that are gone, refuse or hang: no wait for a peer that will never come, and the others are served."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from megatron_sao.config import WeightsConfig
from megatron_sao.models.backend import Backend
from megatron_sao.models.hf import HFModel
from megatron_sao.weights.gather import Bucket, use_in_turn
from megatron_sao.weights.link import EngineControl, EngineUnreachable, PushError, SourceLink
from megatron_sao.weights.publish import Receiver
from megatron_sao.weights.push import WeightPusher

pytestmark = pytest.mark.unit


class OneBucket:
    """In place of a Gatherer: a source of one bucket with one tensor."""

    device = torch.device("cpu")
    is_source = True

    def buckets(self) -> Iterator[Bucket]:
        data = torch.zeros(8, dtype=torch.uint8)
        yield Bucket(data, [("a", data.view(torch.float32))])


class FakeEngine(ThreadingHTTPServer):
    """Answers every call with success, but for those in ``refused`` and, until it is ``closing``, those in ``hung``."""

    def __init__(self, refused: tuple[str, ...] = (), hung: tuple[str, ...] = ()) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.refused, self.hung, self.calls, self.resumes = refused, hung, [], False
        self.closing = threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    server: FakeEngine

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.calls.append(self.path)
        if self.path in self.server.hung:
            self.server.closing.wait(120)
            if not self.server.resumes:
                return
        refused = self.path in self.server.refused
        body = json.dumps({"success": not refused, "message": "no such backend" if refused else ""}).encode()
        self.send_response(400 if refused else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def engines() -> Iterator[list[FakeEngine]]:
    made: list[FakeEngine] = []
    yield made
    for engine in made:
        engine.closing.set()
        engine.shutdown()


def make_pusher(world: Backend, tmp_path: Path, timeout: float) -> WeightPusher:
    settings = WeightsConfig(timeout=timeout)
    return WeightPusher(OneBucket(), HFModel(tmp_path, {}, "llama"), settings, "t", "gloo", tmp_path, torch.float32)


def hurry(monkeypatch: pytest.MonkeyPatch, hung: FakeEngine) -> None:
    """Only the engine that is to hang has little time: no other exceeds its own where this machine stalls."""
    made = EngineControl.__init__

    def make(self: EngineControl, url: str, token: str, timeout: float) -> None:
        made(self, url, token, 1.0 if url == hung.url else timeout)

    monkeypatch.setattr(EngineControl, "__init__", make)


def receivers(*urls: str) -> list[Receiver]:
    return [Receiver(url, url, url, 1, fresh=True) for url in urls]


def test_engines_that_are_gone_or_refuse_cost_no_wait(world: Backend, tmp_path: Path, engines: list) -> None:
    engines.append(FakeEngine(refused=("/init_weights_update_group",)))
    pusher, gone = make_pusher(world, tmp_path, timeout=60), "http://127.0.0.1:9"
    started = time.monotonic()
    failed = pusher.push(receivers(gone, engines[0].url), "1.1")
    assert time.monotonic() - started < 40
    assert set(failed) == {gone, engines[0].url}
    assert "init_weights_update_group: 400" in failed[engines[0].url]
    pusher.close()


def test_an_engine_that_hangs_from_the_first_call_costs_no_timeout_of_a_push(
    world: Backend, tmp_path: Path, engines: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_sao.weights.link.CONNECT_SECONDS", 0.5)
    monkeypatch.setattr("megatron_sao.weights.link.CLEAN_UP_SECONDS", 0.5)
    engines.append(FakeEngine(hung=("/end_weight_update",)))
    pusher = make_pusher(world, tmp_path, timeout=10_000)
    assert "/end_weight_update: ReadTimeout" in pusher.push(receivers(engines[0].url), "1.1")[engines[0].url]
    pusher.close()


def test_an_engine_that_hangs_is_dropped_after_the_timeout_and_is_left_neither_paused_nor_in_an_update(
    world: Backend, tmp_path: Path, engines: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_sao.weights.link.SourceLink.connect", lambda self: None)
    monkeypatch.setattr("megatron_sao.weights.link.SourceLink.send", lambda self, bucket: None)
    engines += [FakeEngine(hung=("/begin_weight_update",)), FakeEngine(refused=("/end_weight_update",)), FakeEngine()]
    hung, refusing, good = engines
    hurry(monkeypatch, hung)
    monkeypatch.setattr("megatron_sao.weights.link.CLEAN_UP_SECONDS", 60.0)
    pusher = make_pusher(world, tmp_path, timeout=100)
    started = time.monotonic()
    failed = pusher.push(receivers(hung.url, refusing.url, good.url), "1.1")
    assert time.monotonic() - started < 60
    assert set(failed) == {hung.url, refusing.url}
    cleaned = ["/end_weight_update", "/abort_request", "/continue_generation"]
    assert hung.calls[-3:] == cleaned and refusing.calls[-3:] == cleaned
    assert good.calls == [
        "/end_weight_update", "/pause_generation", "/begin_weight_update", "/update_weights_from_distributed",
        "/end_weight_update", "/continue_generation",
    ]  # fmt: skip
    pusher.close()


UPDATE = "/update_weights_from_distributed"


class Broadcast:
    """In place of a collective with an engine's ranks, which take part as soon as they are asked to, or never."""

    def __init__(self, completes: bool) -> None:
        self.count, self._completes = 0, completes

    def __call__(self, *_: object, **__: object) -> Broadcast:
        self.count += 1
        return self

    def is_completed(self) -> bool:
        return self._completes

    def wait(self) -> None: ...


@pytest.fixture
def link_to(engines: list, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[SourceLink, Broadcast]]:
    def make(engine: FakeEngine, completes: bool = True, timeout: float = 100.0) -> tuple[SourceLink, Broadcast]:
        engines.append(engine)
        broadcast = Broadcast(completes)
        monkeypatch.setattr("megatron_sao.weights.link.dist.broadcast", broadcast)
        return SourceLink(EngineControl(engine.url, "t", timeout), 1, "gloo", timeout), broadcast

    return make


def test_a_bucket_is_on_its_way_while_the_engine_loads_the_one_before(link_to: Callable) -> None:
    engine = FakeEngine(hung=(UPDATE,))
    engine.resumes = True
    link, broadcast = link_to(engine)
    bucket = next(OneBucket().buckets())
    link.send(bucket)
    later = threading.Thread(target=link.send, args=(bucket,))
    later.start()
    deadline = time.monotonic() + 60
    while (len(engine.calls), broadcast.count) != (2, 2) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (engine.calls, broadcast.count) == ([UPDATE] * 2, 2), "the second is sent while the first is loaded"
    assert later.is_alive(), "a third bucket must wait until the first is loaded"
    engine.closing.set()
    later.join(60)
    assert not later.is_alive()
    link.finish()


def test_an_engine_that_refused_a_bucket_is_not_left_waiting_for_the_next(link_to: Callable) -> None:
    link, broadcast = link_to(FakeEngine(refused=(UPDATE,)))
    bucket = next(OneBucket().buckets())
    link.send(bucket)
    with pytest.raises(PushError, match=f"{UPDATE}: 400"):
        link.send(bucket)
    assert broadcast.count == 2


def test_what_the_last_bucket_met_with_is_raised_at_the_end(link_to: Callable) -> None:
    link, _ = link_to(FakeEngine(refused=(UPDATE,)))
    link.send(next(OneBucket().buckets()))
    with pytest.raises(PushError, match="no such backend"):
        link.finish()


@pytest.mark.parametrize(
    ("engine", "error"), [({"refused": (UPDATE,)}, PushError), ({"hung": (UPDATE,)}, EngineUnreachable)]
)
def test_an_engine_that_takes_no_part_ends_the_wait_for_it(
    engine: dict[str, tuple[str, ...]], error: type[PushError], link_to: Callable
) -> None:
    link, _ = link_to(FakeEngine(**engine), completes=False, timeout=1.0)
    started = time.monotonic()
    with pytest.raises(error):
        link.send(next(OneBucket().buckets()))
    assert time.monotonic() - started < 40


def test_a_bucket_is_used_while_the_next_is_gathered_and_before_that_is_used() -> None:
    asked, used = [threading.Event() for _ in range(4)], []

    def buckets() -> Iterator[Bucket | None]:
        for number in range(3):
            asked[number].set()
            yield next(OneBucket().buckets())
        asked[3].set()
        yield None

    def use(number: int, _bucket: Bucket) -> None:
        assert asked[number + 1].wait(60), "the next one is asked for only when this one has been used"
        assert number == 2 or not asked[number + 2].is_set(), "it would overwrite this one"
        used.append(number)

    use_in_turn(buckets(), use)
    assert used == [0, 1, 2]


def test_an_error_in_the_use_of_a_bucket_is_not_lost() -> None:
    def use(_number: int, _bucket: Bucket) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        use_in_turn(OneBucket().buckets(), use)
