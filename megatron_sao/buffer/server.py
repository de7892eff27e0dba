"""The buffer's HTTP face: routes, authentication, bounds, long-polls and group commit around one Store.

The store runs on one thread of its own. Submissions that arrive while it is busy are written together, so the
cost of an fsync is shared under load.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
import socket
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from megatron_sao.buffer.database import StoreError
from megatron_sao.buffer.store import COUNTERS, Store
from megatron_sao.config import ConfigError, RunConfig
from megatron_sao.data.routing import RoutingShape
from megatron_sao.data.tasks import TaskError, load_tasks
from megatron_sao.data.trajectory import VERSION, Trajectory, TrajectoryError
from megatron_sao.logs import start_logging

log = logging.getLogger(__name__)

JSON_BODY_LIMIT = 64 * 2**10  # bytes; only a trajectory is larger
GROUP_LIMIT = 64  # submissions written with one fsync
POLL_INTERVAL = 1.0  # seconds; what no request announces (a lease or an engine timing out) is seen this late

Stage = Literal["sft", "value", "rl"]
Count = Annotated[int, Field(ge=0, lt=2**62)]
Wait = Annotated[float, Field(ge=0, le=600)]
Name = Annotated[str, Field(min_length=1, max_length=512)]
Version = Annotated[str, Field(pattern=f"^{VERSION.pattern}$")]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class TrainerBody(Body):
    run_id: Name
    policy_version: Count


class BatchBody(Body):
    incarnation: Count
    batch_size: Annotated[int, Field(ge=1, le=2**20)]
    policy_version: Count
    wait: Wait = 0.0


class IncarnationBody(Body):
    incarnation: Count


class ResultBody(IncarnationBody):
    wait: Wait = 0.0


class EvaluationBody(IncarnationBody):
    version: Version
    num_prompts: Count


class EngineBody(Body):
    id: Name
    url: Name
    tp: Annotated[int, Field(ge=1)]


class DirtyBody(IncarnationBody):
    state: Literal["dirty"]
    version: None = None


class CleanBody(IncarnationBody):
    state: Literal["clean"]
    version: Version


class LeaseBody(Body):
    worker_id: Name
    request_id: Name
    max_leases: Annotated[int, Field(ge=1, le=4096)]
    wait: Wait = 0.0


class RenewBody(Body):
    attempt: Count


class ReleaseBody(RenewBody):
    reason: Annotated[str, Field(max_length=4096)]


class Service:
    """Calls into the store from the event loop.

    Args:
        store: used from this service's thread only.
        vocab_size: ids in submitted trajectories are below it.
        routing: of the model; None if it has no routed experts.
    """

    def __init__(self, store: Store, config: RunConfig, vocab_size: int, routing: RoutingShape | None = None) -> None:
        self.store = store
        self.config = config
        self._vocab_size, self._routing = vocab_size, routing
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")
        self._changed = asyncio.Event()
        self._submissions: asyncio.Queue[tuple[tuple[Trajectory, bytes], asyncio.Future[str]]] = asyncio.Queue()
        self._closing = False

    async def call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, method, *arguments)

    async def change(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """A call that others may be polling for."""
        result = await self.call(method, *arguments)
        self.wake()
        return result

    def wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def poll(self, request: Request, wait: float, method: Callable[..., Any], *arguments: Any) -> Any:
        """The method's first result that is not None, or None when the wait is over. Ends early when the client is
        gone, so that nothing is granted to a dead connection."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait
        while True:
            changed = self._changed  # taken before the call, so that no change in between is missed
            result = await self.call(method, *arguments)
            left = deadline - loop.time()
            if result is not None or left <= 0 or self._closing:
                return result
            with suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), min(left, POLL_INTERVAL))
            if await request.is_disconnected():
                return None

    async def submit(self, payload: bytes) -> str:
        item = await asyncio.to_thread(self._admit, payload)
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._submissions.put_nowait((item, answer))
        return await answer

    async def write_submissions(self) -> None:
        """Forever: take what is waiting, store it with one fsync, answer."""
        while True:
            group = [await self._submissions.get()]
            while len(group) < GROUP_LIMIT and not self._submissions.empty():
                group.append(self._submissions.get_nowait())
            try:
                results = await self.change(self.store.submit, [item for item, _ in group])
            except Exception as error:  # handed to every waiting request, which reports it
                results = [error] * len(group)
            for (_, answer), result in zip(group, results, strict=True):
                if answer.cancelled():
                    continue
                if isinstance(result, Exception):
                    answer.set_exception(result)
                else:
                    answer.set_result(result)

    def close_polls(self) -> None:
        self._closing = True
        self.wake()

    async def close(self) -> None:
        await self.call(self.store.close)
        self._thread.shutdown()

    def _admit(self, payload: bytes) -> tuple[Trajectory, bytes]:
        trajectory = Trajectory.decode(payload)
        valid = trajectory.validate(self._vocab_size, self.config.rollout.max_tokens, self._routing)
        return (trajectory, payload) if valid is trajectory else (valid, valid.encode())


def create_app(service: Service, token: str) -> Guard:
    """The ASGI application."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        writer = asyncio.create_task(service.write_submissions())
        yield
        writer.cancel()
        await service.close()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    _add_trainer_routes(app, service)
    _add_rollout_routes(app, service)
    _add_engine_routes(app, service)
    _add_observer_routes(app, service)
    _add_error_handlers(app)
    return Guard(app, token, service.config.buffer.max_body_bytes)


def _add_trainer_routes(app: FastAPI, service: Service) -> None:
    store = service.store

    @app.post("/v1/trainers")
    async def register(body: TrainerBody) -> dict[str, Any]:
        return {"incarnation": await service.change(store.register_trainer, body.run_id, body.policy_version)}

    @app.post("/v1/batches/{stage}/{step}")
    async def batch(stage: Stage, step: Count, body: BatchBody, request: Request) -> dict[str, Any]:
        arguments = (stage, step, body.incarnation, body.batch_size, body.policy_version)
        before = await service.change(store.batch, *arguments)  # asking may finish a step, which allows new leases
        return {"entries": before or await service.poll(request, body.wait, store.batch, *arguments)}

    @app.get("/v1/trajectories/{id:path}")
    async def trajectory(id: str) -> Response:
        return Response(await service.call(store.archive.read, id), media_type="application/msgpack")

    @app.post("/v1/commits/{stage}/{step}")
    async def commit(stage: Stage, step: Count, body: IncarnationBody) -> dict[str, Any]:
        await service.call(store.commit, stage, step, body.incarnation)
        return {}

    @app.post("/v1/evaluations/{stage}/{step}")
    async def start_evaluation(stage: Stage, step: Count, body: EvaluationBody) -> dict[str, Any]:
        arguments = (stage, step, body.incarnation, body.version, body.num_prompts)
        await service.change(store.start_evaluation, *arguments)
        return {}

    @app.post("/v1/evaluations/{stage}/{step}/result")
    async def evaluation_result(stage: Stage, step: Count, body: ResultBody, request: Request) -> dict[str, Any]:
        return {"ids": await service.poll(request, body.wait, store.evaluation_result, stage, step, body.incarnation)}


def _add_rollout_routes(app: FastAPI, service: Service) -> None:
    visits = service.store.visits

    @app.post("/v1/tasks/lease")
    async def lease(body: LeaseBody, request: Request) -> dict[str, Any]:
        arguments = (body.worker_id, body.max_leases, body.request_id)
        return {"leases": await service.poll(request, body.wait, visits.lease, *arguments) or []}

    @app.post("/v1/tasks/{visit_id}/renew")
    async def renew(visit_id: Count, body: RenewBody) -> dict[str, Any]:
        return {"expires_in": await service.call(visits.renew, visit_id, body.attempt)}

    @app.post("/v1/tasks/{visit_id}/release")
    async def release(visit_id: Count, body: ReleaseBody) -> dict[str, Any]:
        await service.change(visits.release, visit_id, body.attempt, body.reason)
        return {}

    @app.post("/v1/trajectories")
    async def submit(request: Request) -> dict[str, Any]:
        return {"result": await service.submit(await request.body())}


def _add_engine_routes(app: FastAPI, service: Service) -> None:
    store = service.store

    @app.post("/v1/engines")
    async def register(body: EngineBody) -> dict[str, Any]:
        await service.change(store.engines.register, body.id, body.url, body.tp)
        return {}

    @app.get("/v1/engines")
    async def engines() -> dict[str, Any]:
        return {
            "engines": await service.call(store.engines.list),
            "current_version": await service.call(store.current_version),
        }

    @app.post("/v1/engines/{id:path}/heartbeat")
    async def heartbeat(id: str) -> dict[str, Any]:
        return await service.call(store.engines.heartbeat, id)

    @app.post("/v1/engines/{id:path}/state")
    async def mark(id: str, body: DirtyBody | CleanBody) -> dict[str, Any]:
        await service.change(store.mark_engine, id, body.state, body.version, body.incarnation)
        return {}


def _add_observer_routes(app: FastAPI, service: Service) -> None:
    @app.get("/healthz")
    async def healthz() -> dict[str, Any]:
        await service.call(service.store.incarnation)  # the store's thread answers
        return {"status": "ok"}

    @app.get("/v1/stats")
    async def stats() -> dict[str, Any]:
        return await service.call(service.store.stats)

    @app.get("/v1/trajectories")
    async def index() -> dict[str, Any]:
        return {"trajectories": await service.call(service.store.archive.index)}

    @app.get("/v1/batches")
    async def recorded_batches() -> dict[str, Any]:
        return {"batches": await service.call(service.store.archive.recorded_batches)}

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        lines = []
        for name, value in (await service.call(service.store.stats)).items():
            if isinstance(value, int):
                kind, metric = ("counter", f"{name}_total") if name in COUNTERS else ("gauge", name)
                lines += [f"# TYPE megatron_sao_buffer_{metric} {kind}", f"megatron_sao_buffer_{metric} {value}"]
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(StoreError)
    async def refused(_: Request, error: StoreError) -> JSONResponse:
        return _error(error.status, str(error))

    @app.exception_handler(TrajectoryError)
    async def malformed(_: Request, error: TrajectoryError) -> JSONResponse:
        return _error(422, str(error))

    @app.exception_handler(sqlite3.Error)
    async def unwritable(_: Request, error: sqlite3.Error) -> JSONResponse:
        return _error(503, f"the index cannot be used: {error}; look at the disk of the run directory")

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        return _error(422, f"{where} = {problem.get('input')!r:.200}: {problem['msg']}")

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> JSONResponse:
        return _error(error.status_code, f"{request.method} {request.url.path}: {error.detail}")


def _error(status: int, message: str) -> JSONResponse:
    headers = {"Retry-After": "1"} if status in (429, 503) else None
    return JSONResponse({"error": message}, status, headers)


class Guard:
    """ASGI middleware in front of everything: the token first, then a bounded body, read whole.

    Args:
        app: what it guards.
        max_body_bytes: of a trajectory; four of them may be in memory at once, then 429.
    """

    def __init__(self, app: Callable[..., Awaitable[None]], token: str, max_body_bytes: int) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()
        self._max_body_bytes = max_body_bytes
        self._held = 0

    async def __call__(self, scope: dict[str, Any], receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        if scope["path"] != "/healthz" and not hmac.compare_digest(given, self._expected):
            error = _error(401, "the bearer token is missing or wrong; set MEGATRON_SAO_TOKEN to the run's token")
            await error(scope, receive, send)
            return
        limit = self._max_body_bytes if scope["path"] == "/v1/trajectories" else JSON_BODY_LIMIT
        body = bytearray()
        try:
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return
                chunk = message.get("body", b"")
                body += chunk
                self._held += len(chunk)
                more = message.get("more_body", False)
                if len(body) > limit:
                    await _error(413, f"the body exceeds {limit} bytes (buffer.max_body_bytes)")(scope, receive, send)
                    return
                if self._held > 4 * max(self._max_body_bytes, JSON_BODY_LIMIT):
                    await _error(429, "too many large bodies at once; try again")(scope, receive, send)
                    return
            await self._app(scope, _replay(bytes(body), receive), send)
        finally:
            self._held -= len(body)


def _replay(body: bytes, receive: Callable[..., Any]) -> Callable[..., Any]:
    """A receive channel that yields the whole body once and then what really comes: the disconnect."""
    first = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> dict[str, Any]:
        return first.pop() if first else await receive()

    return replay


class _Server(uvicorn.Server):
    """Announces its address once it accepts connections, and ends long-polls at once when told to stop."""

    def __init__(self, config: uvicorn.Config, service: Service, announce: Callable[[], None]) -> None:
        super().__init__(config)
        self._service = service
        self._announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._announce()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.close_polls()
        await super().shutdown(sockets)


def main(config: RunConfig, run_dir: Path, host: str | None = None, port: int | None = None) -> None:
    """Serve until SIGTERM or SIGINT. Writes ``<run_dir>/buffer.json`` ({"url": ...}) once it listens.

    Args:
        host, port: default to the config's; port 0 takes the port of an earlier buffer.json of this run if it is
            free, so that clients find a restarted buffer, else any free one.

    Raises:
        ConfigError: no token, no vocabulary, unusable task files, port in use, store owned by another process.
    """
    start_logging("buffer")
    token = os.environ.get("MEGATRON_SAO_TOKEN", "")
    if not token:
        raise ConfigError("MEGATRON_SAO_TOKEN is not set: the buffer serves nobody without a token; set it to a secret")
    vocab_size = _vocab_size(config.model.path)
    host = config.buffer.host if host is None else host
    listener = _listen(host, config.buffer.port if port is None else port, run_dir / "buffer.json")
    try:
        eval_tasks = load_tasks(config.data.eval) if config.data.eval else []
        store = Store(run_dir / "buffer", config, load_tasks(config.data.train), eval_tasks)
    except (TaskError, StoreError) as error:
        listener.close()
        raise ConfigError(str(error)) from error
    service = Service(store, config, vocab_size, RoutingShape.of(config.model.path))
    settings = uvicorn.Config(
        create_app(service, token),
        log_config=None,  # its lines go where ours do
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=3,
        timeout_keep_alive=60,
    )
    url = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"

    def announce() -> None:
        temporary = run_dir / "buffer.json.tmp"
        temporary.write_text(json.dumps({"url": url}) + "\n")
        os.replace(temporary, run_dir / "buffer.json")
        log.info("serving %s at %s", config.name, url)

    _Server(settings, service, announce).run(sockets=[listener])


def _listen(host: str, port: int, last: Path) -> socket.socket:
    wanted = [port]
    if port == 0 and last.exists():
        wanted = [int(json.loads(last.read_text())["url"].rpartition(":")[2]), 0]
    for candidate in wanted:
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, candidate))
        except OSError as error:
            listener.close()
            problem = error
        else:
            return listener
    raise ConfigError(
        f"the buffer cannot listen on {host}:{port}: {problem.strerror}; change buffer.host or buffer.port"
    )


def _vocab_size(model: Path) -> int:
    try:
        config = json.loads((model / "config.json").read_text())
        return int(config.get("text_config", config)["vocab_size"])
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"model.path={model}: its config.json gives no vocab_size ({error!r}); name a Hugging Face model directory"
        ) from error
