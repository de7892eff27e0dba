"""The buffer's HTTP face: routes, authentication, bounds, long-polls and group commit around one Store.

The store runs on one thread of its own. Submissions that arrive while it is busy are written together, so the
cost of an fsync is shared under load.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import resource
import socket
import sqlite3
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi.security import HTTPBearer
from pydantic import create_model
from starlette.exceptions import HTTPException

from megatron_sao.buffer import schema
from megatron_sao.buffer.admission import admit
from megatron_sao.buffer.database import StoreError
from megatron_sao.buffer.guard import TRAJECTORIES, Guard, GuardedServer, Receive, Send, error_response, token_of
from megatron_sao.buffer.schema import Count, PageSize, Stage
from megatron_sao.buffer.segments import Frame, Record
from megatron_sao.buffer.store import COUNTERS, Store
from megatron_sao.config import ConfigError, RunConfig
from megatron_sao.data.routing import RoutingShape
from megatron_sao.data.tasks import TaskError, load_tasks
from megatron_sao.data.trajectory import Trajectory, TrajectoryError
from megatron_sao.launch.ports import port_of, reserve_port
from megatron_sao.logs import Seldom, start_logging
from megatron_sao.run_identity import run_identity

Endpoint = Callable[[Request], Awaitable[dict[str, Any]]]

log = logging.getLogger(__name__)
disk_log = logging.getLogger(f"{__name__}.disk")  # every client says it again and again
disk_log.addFilter(Seldom(10.0))

GROUP_LIMIT = 64  # submissions written with one fsync
LARGE_BODY = 4 * 2**20  # bytes; others are answered while a larger one is decoded and checked
KEPT_BYTES = 256 * 2**20  # of freed memory, see _keep_freed_memory
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
SWITCH_SECONDS = 0.0005  # that the event loop may keep the interpreter's lock from the store's thread
POLL_INTERVAL = 1.0  # seconds; what no request announces (a lease or an engine timing out) is seen this late

REQUEST_COUNTERS = ("requests_refused", "requests_put_off")  # since this process began

REFUSED = {  # status codes of any call, for the OpenAPI document
    401: "no token, or a wrong one",
    404: "no such thing",
    408: "the body came too slowly",
    409: "in conflict with what has happened; asking again will not help",
    410: "collected after a commit",
    413: "the body is too large",
    422: "malformed, or in conflict with the run's config",
    429: "full; try again after Retry-After",
    503: "the disk does not take it; try again after Retry-After",
}
Stats = create_model("Stats", __base__=schema.Stats, **dict.fromkeys(COUNTERS + REQUEST_COUNTERS, (int, ...)))
TRAJECTORY = {"content": {"application/msgpack": {"schema": {"type": "string", "format": "binary"}}}}


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
        self._submissions: asyncio.Queue[tuple[tuple[Trajectory, Record], asyncio.Future[str]]] = asyncio.Queue()
        self._closing = False
        self.requests: Callable[[], dict[str, int]] = dict  # the guard's, once there is one

    async def stats(self) -> dict[str, Any]:
        return await self.call(self.store.stats) | self.requests()

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

    async def submit(self, payload: bytes | memoryview, frame: Frame | None = None) -> str:
        arguments = (payload, self.config, self._vocab_size, self._routing, frame)
        # Decoding holds the interpreter's lock, so a thread of its own costs more than it gains, unless it takes long.
        item = await asyncio.to_thread(admit, *arguments) if len(payload) > LARGE_BODY else admit(*arguments)
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


def create_app(service: Service, token: str) -> Guard:
    """The ASGI application."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        writer = asyncio.create_task(service.write_submissions())
        yield
        writer.cancel()
        await service.close()

    app = FastAPI(
        title="megatron_sao buffer",
        version="1",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url="/v1/openapi.json",
        responses={status: {"model": schema.Refusal, "description": why} for status, why in REFUSED.items()},
        dependencies=[Depends(HTTPBearer(auto_error=False))],  # for the document; the guard checks it first
    )
    _add_trainer_routes(app, service)
    submit = _add_rollout_routes(app, service)
    _add_engine_routes(app, service)
    _add_observer_routes(app, service)
    for kind, handler in ERROR_HANDLERS.items():
        app.add_exception_handler(kind, handler)
    guard = Guard(_directly(submit, app), token, service.config.buffer.max_body_bytes)
    service.requests = lambda: dict(zip(REQUEST_COUNTERS, (guard.refused, guard.put_off), strict=True))
    return guard


def _add_trainer_routes(app: FastAPI, service: Service) -> None:
    store = service.store

    @app.post("/v1/trainers", response_model=schema.Incarnation)
    async def register(body: schema.TrainerBody) -> dict[str, Any]:
        return {"incarnation": await service.change(store.register_trainer, body.run_id, body.policy_version)}

    @app.post("/v1/batches/{stage}/{step}", response_model=schema.Batch)
    async def batch(stage: Stage, step: Count, body: schema.BatchBody, request: Request) -> dict[str, Any]:
        arguments = (stage, step, body.incarnation, body.batch_size, body.policy_version)
        before = await service.change(store.batch, *arguments)  # asking may finish a step, which allows new leases
        return {"entries": before or await service.poll(request, body.wait, store.batch, *arguments)}

    @app.get("/v1/trajectories/{id:path}", response_class=Response, responses={200: TRAJECTORY})
    async def trajectory(id: str) -> Response:
        return Response(await service.call(store.archive.read, id), media_type="application/msgpack")

    @app.post("/v1/commits/{stage}/{step}", response_model=schema.Done)
    async def commit(stage: Stage, step: Count, body: schema.IncarnationBody) -> dict[str, Any]:
        await service.call(store.commit, stage, step, body.incarnation)
        return {}

    @app.post("/v1/evaluations/{stage}/{step}", response_model=schema.Done)
    async def start_evaluation(stage: Stage, step: Count, body: schema.EvaluationBody) -> dict[str, Any]:
        arguments = (stage, step, body.incarnation, body.version, body.num_prompts)
        await service.change(store.start_evaluation, *arguments)
        return {}

    @app.post("/v1/evaluations/{stage}/{step}/result", response_model=schema.EvaluationResult)
    async def evaluation_result(stage: Stage, step: Count, body: schema.ResultBody, request: Request) -> dict[str, Any]:
        return {"ids": await service.poll(request, body.wait, store.evaluation_result, stage, step, body.incarnation)}


def _add_rollout_routes(app: FastAPI, service: Service) -> Endpoint:
    """Returns what serves ``POST /v1/trajectories``."""
    visits = service.store.visits

    @app.post("/v1/tasks/lease", response_model=schema.Leases)
    async def lease(body: schema.LeaseBody, request: Request) -> dict[str, Any]:
        arguments = (body.worker_id, body.max_leases, body.request_id)
        return {"leases": await service.poll(request, body.wait, visits.lease, *arguments) or []}

    @app.post("/v1/tasks/{visit_id}/renew", response_model=schema.Renewal)
    async def renew(visit_id: Count, body: schema.RenewBody) -> dict[str, Any]:
        return {"expires_in": await service.call(visits.renew, visit_id, body.attempt)}

    @app.post("/v1/tasks/{visit_id}/release", response_model=schema.Done)
    async def release(visit_id: Count, body: schema.ReleaseBody) -> dict[str, Any]:
        await service.change(visits.release, visit_id, body.attempt, body.reason)
        return {}

    @app.post(
        TRAJECTORIES,
        response_model=schema.Submission,
        openapi_extra={"requestBody": TRAJECTORY | {"required": True}},
    )
    async def submit(request: Request) -> dict[str, Any]:
        whole = await request.receive()  # the guard's; request.body() would copy it
        return {"result": await service.submit(whole["body"], whole["frame"])}

    return submit


def _directly(submit: Endpoint, app: FastAPI) -> Callable[..., Awaitable[None]]:
    """The application, but trajectories go straight to their endpoint: all that FastAPI does around one takes as long
    as decoding and checking it."""

    async def application(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (scope["method"], scope["path"]) != ("POST", TRAJECTORIES):
            await app(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            response = JSONResponse(await submit(request))
        except (StoreError, TrajectoryError, sqlite3.Error) as error:
            kind = next(kind for kind in type(error).__mro__ if kind in ERROR_HANDLERS)
            response = await ERROR_HANDLERS[kind](request, error)
        await response(scope, receive, send)

    return application


def _add_engine_routes(app: FastAPI, service: Service) -> None:
    store = service.store

    @app.post("/v1/engines", response_model=schema.Done)
    async def register(body: schema.EngineBody) -> dict[str, Any]:
        await service.change(store.engines.register, body.id, body.url, body.tp)
        return {}

    @app.get("/v1/engines", response_model=schema.Engines)
    async def engines() -> dict[str, Any]:
        return {
            "engines": await service.call(store.engines.list),
            "current_version": await service.call(store.current_version),
        }

    @app.post("/v1/engines/{id:path}/heartbeat", response_model=schema.Engine)
    async def heartbeat(id: str, body: schema.HeartbeatBody) -> dict[str, Any]:
        return await service.change(store.engines.heartbeat, id, body.sick)

    @app.post("/v1/engines/{id:path}/state", response_model=schema.Done)
    async def mark(id: str, body: schema.DirtyBody | schema.CleanBody) -> dict[str, Any]:
        await service.change(store.mark_engine, id, body.state, body.version, body.incarnation)
        return {}


def _add_observer_routes(app: FastAPI, service: Service) -> None:
    @app.get("/healthz", response_model=schema.Health)
    async def healthz() -> dict[str, Any]:
        await service.call(service.store.incarnation)  # the store's thread answers
        return {"status": "ok"}

    @app.get("/v1/stats", response_model=Stats)
    async def stats() -> dict[str, Any]:
        return await service.stats()

    @app.get("/v1/dropped", response_model=schema.DroppedPage)
    async def dropped(after: Count = 0, limit: PageSize = 100) -> dict[str, Any]:
        return {"dropped": await service.call(service.store.drops.list, after, limit)}

    @app.get("/v1/aside", response_model=schema.AsidePage)
    async def aside(after: Count = 0, limit: PageSize = 100) -> dict[str, Any]:
        return {"aside": await service.call(service.store.visits.aside, after, limit)}

    @app.get("/v1/trajectories", response_model=schema.Index)
    async def index() -> dict[str, Any]:
        return {"trajectories": await service.call(service.store.archive.index)}

    @app.get("/v1/batches", response_model=schema.RecordedBatches)
    async def recorded_batches() -> dict[str, Any]:
        return {"batches": await service.call(service.store.archive.recorded_batches)}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> PlainTextResponse:
        lines = []
        for name, value in (await service.stats()).items():
            if isinstance(value, int | float):
                counts = name in COUNTERS + REQUEST_COUNTERS
                kind, metric = ("counter", f"{name}_total") if counts else ("gauge", name)
                lines += [f"# TYPE megatron_sao_buffer_{metric} {kind}", f"megatron_sao_buffer_{metric} {value}"]
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")


async def _refused(_: Request, error: StoreError) -> JSONResponse:
    if error.status == 503:
        disk_log.error("%s", error)
    return error_response(error.status, str(error))


async def _malformed(_: Request, error: TrajectoryError) -> JSONResponse:
    return error_response(422, str(error))


async def _unwritable(_: Request, error: sqlite3.Error) -> JSONResponse:
    disk_log.error("%s", problem := f"the index cannot be used: {error}; look at the disk of the run directory")
    damaged = getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
    return error_response(500 if damaged else 503, problem)  # 503 is waited for


async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
    if isinstance(error.body, bytes):  # FastAPI has not decoded it
        given = request.headers.get("content-type", "missing")
        return error_response(422, f"the Content-Type is {given:.100}: send the body as application/json")
    problem = error.errors()[0]
    where = ".".join(str(part) for part in problem["loc"])
    return error_response(422, f"{where} = {problem.get('input')!r:.200}: {problem['msg']}")


async def _unknown(request: Request, error: HTTPException) -> JSONResponse:
    return error_response(error.status_code, f"{request.method} {request.url.path}: {error.detail}")


ERROR_HANDLERS = {
    StoreError: _refused, TrajectoryError: _malformed, sqlite3.Error: _unwritable, RequestValidationError: _invalid,
    HTTPException: _unknown,
}  # fmt: skip


class _Server(GuardedServer):
    """Announces its address once it accepts connections, and ends long-polls at once when told to stop."""

    def __init__(self, guard: Guard, service: Service, announce: Callable[[], None]) -> None:
        super().__init__(guard)
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
    _keep_freed_memory()
    sys.setswitchinterval(SWITCH_SECONDS)
    token = token_of("the buffer")
    vocab_size = _vocab_size(config.model.path)
    host = config.buffer.host if host is None else host
    listener = listen(host, config.buffer.port if port is None else port, run_dir / "buffer.json")
    try:
        eval_tasks = load_tasks(config.data.eval) if config.data.eval else []
        store = Store(
            run_dir / "buffer",
            config,
            load_tasks(config.data.train),
            eval_tasks,
            run_id=run_identity(run_dir, config.name),
        )
    except (TaskError, StoreError) as error:
        listener.close()
        raise ConfigError(str(error)) from error
    except (OSError, sqlite3.Error) as error:
        listener.close()
        raise ConfigError(f"the buffer cannot use {run_dir / 'buffer'}: {error}; look at the disk under it") from error
    service = Service(store, config, vocab_size, RoutingShape.of(config.model.path))
    guard = create_app(service, token)
    # Idle connections cost a file each until they are closed.
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    url = f"http://{f'[{host}]' if ':' in host else host}:{port_of(listener)}"

    def announce() -> None:
        temporary = run_dir / "buffer.json.tmp"
        temporary.write_text(json.dumps({"url": url}) + "\n")
        os.replace(temporary, run_dir / "buffer.json")
        log.info("serving %s at %s", store.run_id, url)

    _Server(guard, service, announce).run(sockets=[listener])


def _keep_freed_memory() -> None:
    """Have glibc use the memory of one body for the next: it would give it back to the kernel, which clears it, page by
    page, before it is there again."""
    with suppress(AttributeError, OSError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)
        libc.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


def listen(host: str, port: int, last: Path) -> socket.socket:
    """A socket bound to ``port``; if that is 0, to the port that the file ``last`` names if it is free, else to any.
    Raises ConfigError."""
    wanted = [port]
    if port == 0:
        with suppress(OSError, ValueError, LookupError, TypeError):  # none yet, or one that a power cut left empty
            wanted = [int(json.loads(last.read_text())["url"].rpartition(":")[2]), 0]
    for candidate in wanted:
        try:
            return reserve_port(host, candidate)
        except OSError as error:
            problem = error
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
