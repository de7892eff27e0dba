"""Environments in another process or on another machine: reset, act and close over HTTP.

:mod:`megatron_sao.rollout.environment_server` is the other side. Every call can be repeated: an episode has an id that
its client draws, and each act carries the number of its turn, so that one that arrives twice is applied once.

    PUT /v1/episodes/ID            {"task": {id, prompt, label, extra}}   → Answer, its token_ids being the prompt
    PUT /v1/episodes/ID/turns/N    {"token_ids": [...]}                   → Answer; N counts from 1
    DELETE /v1/episodes/ID

What the policy does wrong is an answer like any other. What is wrong with the service (5xx, silence, an episode that it
does not know, since it was restarted) is an :class:`EnvironmentFailure`: the visit is played again. A reset waits for a
service that is away, so that its restart costs the episodes that were open and no others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import httpx
from pydantic import BaseModel, ValidationError

from megatron_sao.config import ConfigError
from megatron_sao.data.tasks import Task
from megatron_sao.rollout.environment import EnvironmentFailure, Observation
from megatron_sao.rollout.turns import Turns

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 * 2**20  # of a request and of an answer
CONNECT_SECONDS = 5.0
CLOSE_SECONDS = 5.0
ACT_PATIENCE = 5.0  # seconds in which the network may come back; a service that was away has lost the episode
BUSY = 429  # all places are taken: wait for one, as long as the episode may take
PASSING = (502, 503, 504)  # of a proxy, or a service that is starting


class Answer(BaseModel):
    """To a reset and to an act: :class:`Observation`, and what a TurnEnvironment may have besides."""

    token_ids: list[int]
    reward: float = 0.0
    done: bool = False
    failure: str | None = None
    stop_token_ids: list[int] = []
    max_new_tokens: int | None = None
    metrics: dict[str, float] = {}


class Service(Turns):
    """``rollout.environment``: every episode is one of the service at ``url``.

    Args:
        url: e.g. ``http://127.0.0.1:8600``.
        token_variable: the environment variable with the service's token. By default it is the run's own, which a
            service of somebody else's should not know.
        timeout: seconds that the service may work on one call.
        outage: seconds that a reset waits for a service that cannot be reached.

    Raises:
        ConfigError: no URL, or the variable is not set.
    """

    def __init__(
        self,
        tokenizer: Any,
        url: str,
        token_variable: str = "MEGATRON_SAO_TOKEN",
        timeout: float = 120.0,
        outage: float = 300.0,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"rollout.environment_args.url = {url!r}: write http://HOST:PORT")
        if token_variable not in os.environ:
            raise ConfigError(
                f"rollout.environment_args.token_variable = {token_variable!r} is not set; set it to the token of {url}"
            )
        self._http = httpx.AsyncClient(
            base_url=url.rstrip("/"),
            headers={"Authorization": f"Bearer {os.environ[token_variable]}"},
            timeout=httpx.Timeout(timeout, connect=CONNECT_SECONDS, pool=None),
            trust_env=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=32),
        )
        super().__init__(lambda: RemoteEpisode(self._http, outage))

    async def close(self) -> None:
        await self._http.aclose()


class RemoteEpisode:
    """One episode of the service, as a TurnEnvironment."""

    def __init__(self, http: httpx.AsyncClient, outage: float) -> None:
        self._http, self._outage = http, outage
        self._path = f"/v1/episodes/{uuid.uuid4().hex}"
        self._turn = 0

    async def reset(self, task: Task) -> list[int]:
        return (await self._ask(self._path, {"task": asdict(task)}, self._outage)).token_ids

    async def act(self, token_ids: Sequence[int]) -> Observation:
        self._turn += 1
        body = {"token_ids": list(token_ids)}
        answer = await self._ask(f"{self._path}/turns/{self._turn}", body, ACT_PATIENCE)
        return Observation(answer.token_ids, answer.reward, answer.done, answer.failure)

    async def close(self) -> None:
        """A service that does not hear this ends the episode when it has been idle for long."""
        with contextlib.suppress(httpx.HTTPError):
            await self._http.delete(self._path, timeout=CLOSE_SECONDS)

    async def _ask(self, path: str, body: dict[str, Any], patience: float) -> Answer:
        give_up, pause = None, 0.1
        while True:
            answer = await self._try(path, body)
            if isinstance(answer, Answer):
                self.stop_token_ids, self.max_new_tokens = answer.stop_token_ids, answer.max_new_tokens
                self.metrics = answer.metrics
                return answer
            busy, reason = answer
            now = time.monotonic()
            if busy:
                give_up = None
            elif give_up is None:
                give_up = now + patience
                log.warning("%s; trying again for %g s", reason, patience)
            elif now >= give_up:
                raise EnvironmentFailure(reason)
            await asyncio.sleep(pause)
            pause = min(2 * pause, 2.0)

    async def _try(self, path: str, body: dict[str, Any]) -> Answer | tuple[bool, str]:
        """The answer; or why there is none yet, and whether that is for want of a place."""
        where = f"the environment service at {self._http.base_url}"
        try:
            async with self._http.stream("PUT", path, json=body) as response:
                content = bytearray()
                async for chunk in response.aiter_bytes():
                    content += chunk
                    if len(content) > MAX_BODY_BYTES:
                        raise EnvironmentFailure(f"{where} answers more than {MAX_BODY_BYTES} bytes")
        except httpx.ReadTimeout as error:  # it has been heard, and asking again would only wait for the same
            raise EnvironmentFailure(f"{where} took longer than {self._http.timeout.read:g} s for {path}") from error
        except httpx.TransportError as error:
            return False, f"{where} cannot be reached: {type(error).__name__} {error}"
        if response.is_success:
            try:
                return Answer.model_validate_json(bytes(content))
            except ValidationError as error:
                raise EnvironmentFailure(f"{where} answers what is no answer: {error}") from error
        reason = f"{where} refuses {path} ({response.status_code}): {content[:500].decode(errors='replace')}"
        if response.status_code not in (BUSY, *PASSING):
            raise EnvironmentFailure(reason)
        return response.status_code == BUSY, reason
