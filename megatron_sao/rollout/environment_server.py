"""Serves an environment by turns over HTTP, for :mod:`megatron_sao.rollout.environments.service`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException, Path
from pydantic import BaseModel, Field

from megatron_sao.buffer.guard import Guard, GuardedServer, token_of
from megatron_sao.config import ConfigError, RunConfig
from megatron_sao.data.tasks import Task
from megatron_sao.launch.ports import port_of, reserve_port
from megatron_sao.logs import start_logging
from megatron_sao.rollout.environment import TurnEnvironment
from megatron_sao.rollout.environments.service import MAX_BODY_BYTES, Answer
from megatron_sao.rollout.loading import load_turns
from megatron_sao.rollout.turns import CLOSE_SECONDS, metrics_of, options_of

log = logging.getLogger(__name__)

EXPIRY_SECONDS = 10.0  # between two looks for idle episodes

EpisodeId = Annotated[str, Path(pattern="^[0-9a-f]{32}$")]


class TaskBody(BaseModel):
    id: str
    prompt: str | list[dict[str, Any]]
    label: Any = None
    extra: dict[str, Any] = {}


class ResetBody(BaseModel):
    task: TaskBody


class ActBody(BaseModel):
    token_ids: list[Annotated[int, Field(ge=0)]]


@dataclass
class _Episode:
    environment: TurnEnvironment
    turn: int  # of the last call; 0 is the reset
    said: Any  # in the last call
    answer: asyncio.Task[Answer]  # to it
    used: float  # when it was last called

    def waits(self) -> bool:
        """Whether it is the policy's turn."""
        return self.answer.done() and self.answer.exception() is None and not self.answer.result().done


class Episodes:
    """The open episodes by the ids that their clients drew.

    Args:
        make: an environment for one episode.
        limit: of open episodes.
        idle: seconds without a call after which an episode is closed.
    """

    def __init__(self, make: Callable[[], TurnEnvironment], limit: int, idle: float) -> None:
        self._make, self._limit, self._idle = make, limit, idle
        self._open: dict[str, _Episode] = {}

    async def reset(self, id: str, task: Task) -> Answer:
        episode = self._open.get(id)
        if episode is None:
            if len(self._open) >= self._limit:
                raise HTTPException(429, f"all {self._limit} episodes are open; try again", {"Retry-After": "1"})
            environment = self._make()
            answer = asyncio.create_task(_reset(environment, task))
            episode = self._open[id] = _Episode(environment, 0, task, answer, time.monotonic())
        return await self._answer(id, episode, 0, task)

    async def act(self, id: str, turn: int, token_ids: list[int]) -> Answer:
        episode = self._open.get(id)
        if episode is None:
            raise HTTPException(404, f"no episode {id} is open: it was closed, or this service has been restarted")
        if turn == episode.turn + 1 and episode.waits():
            episode.turn, episode.said = turn, token_ids
            episode.answer = asyncio.create_task(_act(episode.environment, token_ids))
        return await self._answer(id, episode, turn, token_ids)

    async def close(self, id: str) -> None:
        episode = self._open.pop(id, None)
        if episode is None:
            return
        episode.answer.cancel()
        await asyncio.wait([episode.answer], timeout=CLOSE_SECONDS)
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await episode.environment.close()
        except Exception:  # the user's own code may raise anything, and the client has nothing to do with it
            log.exception("episode %s did not close well", id)

    async def expire(self) -> None:
        """Forever: close what nobody calls any more."""
        while True:
            await asyncio.sleep(min(EXPIRY_SECONDS, self._idle / 2))
            overdue = time.monotonic() - self._idle
            for id in [id for id, episode in self._open.items() if episode.used < overdue]:
                log.warning("episode %s is closed: nobody has called it for %g s", id, self._idle)
                await self.close(id)

    async def close_all(self) -> None:
        for id in list(self._open):
            await self.close(id)

    async def _answer(self, id: str, episode: _Episode, turn: int, said: Any) -> Answer:
        """The answer to this call, or to the very same one that came before it and is worked on already."""
        if turn != episode.turn or said != episode.said:
            raise HTTPException(409, f"turn {turn} of episode {id} does not follow from its turn {episode.turn}")
        episode.used = time.monotonic()
        await asyncio.wait([episode.answer])  # a caller that leaves does not cancel it
        episode.used = time.monotonic()
        if episode.answer.cancelled():
            raise HTTPException(410, f"episode {id} was closed during its turn {turn}")
        if (error := episode.answer.exception()) is not None:
            log.error("episode %s, turn %d: the environment raised", id, turn, exc_info=error)
            raise HTTPException(500, f"{type(error).__name__}: {error}")
        return episode.answer.result()


async def _reset(environment: TurnEnvironment, task: Task) -> Answer:
    prompt = await environment.reset(task)
    return Answer(
        token_ids=[int(token) for token in prompt], metrics=metrics_of(environment), **options_of(environment)
    )


async def _act(environment: TurnEnvironment, token_ids: list[int]) -> Answer:
    seen = await environment.act(token_ids)
    return Answer(
        token_ids=[int(token) for token in seen.token_ids], reward=seen.reward, done=seen.done, failure=seen.failure,
        metrics=metrics_of(environment), **options_of(environment),
    )  # fmt: skip


def create_app(episodes: Episodes, token: str) -> Guard:
    """The ASGI application. ``/healthz`` needs no token."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        expiring = asyncio.create_task(episodes.expire())
        yield
        expiring.cancel()
        await episodes.close_all()

    app = FastAPI(title="megatron_sao environment", version="1", lifespan=lifespan, docs_url=None, redoc_url=None)

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.put("/v1/episodes/{id}", response_model=Answer)
    async def reset(id: EpisodeId, body: ResetBody) -> Answer:
        return await episodes.reset(id, Task(**body.task.model_dump()))

    @app.put("/v1/episodes/{id}/turns/{turn}", response_model=Answer)
    async def act(id: EpisodeId, turn: int, body: ActBody) -> Answer:
        return await episodes.act(id, turn, body.token_ids)

    @app.delete("/v1/episodes/{id}")
    async def close(id: EpisodeId) -> dict[str, str]:
        await episodes.close(id)
        return {}

    return Guard(app, token, MAX_BODY_BYTES, json_limit=MAX_BODY_BYTES)


def serve(
    make: Callable[[], TurnEnvironment],
    host: str = "127.0.0.1",
    port: int = 0,
    max_episodes: int = 1024,
    idle_seconds: float = 3600.0,  # a turn of the policy may take long
) -> None:
    """Serve until SIGTERM or SIGINT; says where in the log. ``port`` 0: a free one.

    Raises:
        ConfigError: no token, or the port is in use.
    """
    token = token_of("the environment")
    try:
        listener = reserve_port(host, port)
    except OSError as error:
        raise ConfigError(f"cannot listen on --host {host} --port {port}: {error.strerror}; choose others") from error
    guard = create_app(Episodes(make, max_episodes, idle_seconds), token)
    log.info("serving episodes at http://%s:%d", f"[{host}]" if ":" in host else host, port_of(listener))
    GuardedServer(guard).run(sockets=[listener])


def main(config: RunConfig, host: str, port: int, max_episodes: int, idle_seconds: float) -> None:
    """Serve ``rollout.environment``, which must be one by turns."""
    from megatron_sao.rollout.worker import load_tokenizer

    start_logging("environment")
    make = load_turns(config.rollout, load_tokenizer(config.model.path))
    serve(make, host, port, max_episodes, idle_seconds)
