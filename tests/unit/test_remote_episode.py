"""What both sides of the environment service do with calls that fail, come twice, or do not fit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from megatron_sao.config import ConfigError
from megatron_sao.data.tasks import Task
from megatron_sao.rollout.environment import EnvironmentFailure, Observation
from megatron_sao.rollout.environment_server import Episodes, create_app, serve
from megatron_sao.rollout.environments.service import MAX_BODY_BYTES, RemoteEpisode, Service
from tests.serving import eventually

TASK = Task("t", "3", {"right": 3}, {"hint": "three"})
ID = "0" * 32


class Counting:
    """Answers with how often it has acted; "break", "fail" and "wait" are prompts that do so at the first act."""

    def __init__(self) -> None:
        self.acted, self.closed, self.metrics, self.stop_token_ids = 0, 0, {"acted": 0.0}, [4]

    async def reset(self, task: Task) -> list[int]:
        self.task = task
        return [1, 2]

    async def act(self, token_ids: list[int]) -> Observation:
        self.acted += 1
        self.metrics["acted"] += 1
        if self.task.prompt == "break":
            raise KeyError("typo")
        if self.task.prompt == "fail":
            return Observation(failure="the simulator is gone")
        if self.task.prompt == "wait":
            await asyncio.sleep(3600)
        return Observation([*token_ids, self.acted], reward=0.5, done=self.acted == 3)

    async def close(self) -> None:
        self.closed += 1


class Flaky(httpx.AsyncBaseTransport):
    """Loses the first ``lost`` answers to acts, after the service has given them; or has ``status`` in their place."""

    def __init__(self, app: Any, lost: int = 0, status: int | None = None) -> None:
        self.inner, self.lost, self.status, self.calls = httpx.ASGITransport(app), lost, status, 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await self.inner.handle_async_request(request)
        if "/turns/" in request.url.path:
            self.calls += 1
            if self.calls <= self.lost:
                await response.aread()
                if self.status is not None:
                    return httpx.Response(self.status)
                raise httpx.ReadError("connection reset")
        return response


def with_service(use: Callable[..., Awaitable[Any]], *, limit: int = 8, idle: float = 60.0, **flaky: Any) -> Any:
    """Run ``use(service)``: its ``http``, the environments it ``made``, its ``episodes`` and the ``transport``."""

    async def run() -> Any:
        made: list[Counting] = []

        def make() -> Counting:
            made.append(Counting())
            return made[-1]

        episodes = Episodes(make, limit, idle)
        transport = Flaky(create_app(episodes, "secret"), **flaky)
        headers = {"Authorization": "Bearer secret"}
        async with (
            asyncio.timeout(90),
            httpx.AsyncClient(transport=transport, base_url="http://service", headers=headers) as http,
        ):
            return await use(SimpleNamespace(http=http, made=made, episodes=episodes, transport=transport))

    return asyncio.run(run())


def test_task_tokens_and_figures_arrive_as_they_are():
    async def use(service):
        episode = RemoteEpisode(service.http, outage=0)
        assert await episode.reset(TASK) == [1, 2]
        assert (episode.stop_token_ids, episode.metrics) == ([4], {"acted": 0.0})
        seen = [await episode.act([7, 8]) for _ in range(3)]
        assert seen == [Observation([7, 8, n], 0.5, n == 3, None) for n in (1, 2, 3)]
        assert episode.metrics == {"acted": 3.0} and service.made[0].task == TASK
        await episode.close()
        await episode.close()
        assert service.made[0].closed == 1

    with_service(use)


@pytest.mark.parametrize("flaky", [{"lost": 2}, {"lost": 2, "status": 503}])
def test_an_act_whose_answer_was_lost_is_asked_for_again_and_applied_once(flaky):
    async def use(service):
        episode = RemoteEpisode(service.http, outage=0)
        await episode.reset(TASK)
        assert (await episode.act([7])).token_ids == [7, 1]
        assert service.transport.calls == 3 and service.made[0].acted == 1
        assert (await episode.act([7])).token_ids == [7, 2]

    with_service(use, **flaky)


def test_retries_are_bounded_and_their_end_is_a_failure_of_the_environment(monkeypatch):
    monkeypatch.setattr("megatron_sao.rollout.environments.service.ACT_PATIENCE", 0.2)

    async def use(service):
        episode = RemoteEpisode(service.http, outage=0)
        await episode.reset(TASK)
        with pytest.raises(EnvironmentFailure, match="service cannot be reached: ReadError connection reset"):
            await episode.act([7])
        assert service.transport.calls > 1 and service.made[0].acted == 1

    with_service(use, lost=100)


@pytest.mark.parametrize(("prompt", "reason"), [("break", r"\(500\).*KeyError: 'typo'"), ("fail", None)])
def test_what_the_environment_fails_is_not_asked_again(prompt, reason):
    async def use(service):
        episode = RemoteEpisode(service.http, outage=0)
        await episode.reset(Task("t", prompt, None, {}))
        if reason is None:
            assert (await episode.act([7])).failure == "the simulator is gone"
        else:
            with pytest.raises(EnvironmentFailure, match=reason):
                await episode.act([7])
        assert service.transport.calls == service.made[0].acted == 1

    with_service(use)


def test_an_answer_that_is_none_is_a_failure_of_the_environment():
    async def use(_):
        for answer in (b"<html>", b"{}", b'{"token_ids": ["a"]}', b'{"token_ids": [1], "reward": null}'):
            transport = httpx.MockTransport(lambda _, answer=answer: httpx.Response(200, content=answer))
            async with httpx.AsyncClient(transport=transport, base_url="http://service") as http:
                with pytest.raises(EnvironmentFailure, match="answers what is no answer"):
                    await RemoteEpisode(http, outage=0).reset(TASK)
        endless = httpx.MockTransport(lambda _: httpx.Response(200, content=b" " * (MAX_BODY_BYTES + 1)))
        async with httpx.AsyncClient(transport=endless, base_url="http://service") as http:
            with pytest.raises(EnvironmentFailure, match="answers more than 16777216 bytes"):
                await RemoteEpisode(http, outage=0).reset(TASK)

    with_service(use)


async def opened(service, prompt="3", id=ID):
    task = {"id": "t", "prompt": prompt, "label": None, "extra": {}}
    return await service.http.put(f"/v1/episodes/{id}", json={"task": task})


def test_calls_that_do_not_fit_are_refused_and_change_nothing():
    async def use(service):
        act = lambda turn, tokens, id=ID: service.http.put(  # noqa: E731
            f"/v1/episodes/{id}/turns/{turn}", json={"token_ids": tokens}
        )
        assert (await act(1, [7])).status_code == 404  # never opened, or by a service before this one
        assert (await opened(service)).status_code == 200
        assert (await opened(service)).json()["token_ids"] == [1, 2]
        assert len(service.made) == 1, "a reset that comes twice begins one episode"
        assert (await act(2, [7])).status_code == 409
        assert [(await act(1, [7])).json()["token_ids"] for _ in range(2)] == [[7, 1]] * 2
        assert (await act(1, [8])).status_code == (await opened(service)).status_code == 409
        assert (await act(2, [-1])).status_code == (await act(2, "7")).status_code == 422
        assert (await opened(service, id="../x")).status_code in (404, 405)
        large = await service.http.put(f"/v1/episodes/{ID}/turns/2", content=b" " * (MAX_BODY_BYTES + 1))
        assert large.status_code == 413
        for turn in (2, 3):
            assert (await act(turn, [7])).json()["done"] == (turn == 3)
        assert (await act(4, [7])).status_code == 409 and service.made[0].acted == 3
        service.http.headers["Authorization"] = "Bearer wrong"
        assert (await act(3, [7])).status_code == (await service.http.delete(f"/v1/episodes/{ID}")).status_code == 401
        assert (await service.http.get("/healthz")).status_code == 200
        assert service.made[0].closed == 0

    with_service(use)


def test_an_episode_waits_for_a_place_and_gets_it_when_another_ends():
    async def use(service):
        first, second = (RemoteEpisode(service.http, outage=0) for _ in range(2))
        await first.reset(TASK)
        waiting = asyncio.create_task(second.reset(TASK))
        await asyncio.sleep(0.5)
        assert not waiting.done() and len(service.made) == 1
        await first.close()
        assert await waiting == [1, 2]

    with_service(use, limit=1)


def test_an_episode_that_nobody_calls_is_closed_and_gives_up_what_it_was_doing():
    async def use(service):
        episode = RemoteEpisode(service.http, outage=0)
        await episode.reset(Task("t", "wait", None, {}))
        acting = asyncio.create_task(episode.act([7]))
        await eventually(lambda: service.made[0].acted)
        expiring = asyncio.create_task(service.episodes.expire())  # not before: the machine may have stalled since
        await eventually(lambda: service.made[0].closed)
        with pytest.raises(EnvironmentFailure, match=r"\(410\).*was closed during its turn 1"):
            await acting
        expiring.cancel()

    with_service(use, idle=0.3)


def test_an_address_that_is_no_url_is_refused_before_the_first_episode():
    with pytest.raises(ConfigError, match=r"environment_args.url = '10.0.0.7:8600': write http://HOST:PORT"):
        Service(None, "10.0.0.7:8600")


def test_without_its_token_neither_side_starts(monkeypatch):
    monkeypatch.delenv("MEGATRON_SAO_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="token_variable = 'SIMULATOR_TOKEN' is not set; set it to the token of http"):
        Service(None, "http://service", token_variable="SIMULATOR_TOKEN")
    with pytest.raises(ConfigError, match="MEGATRON_SAO_TOKEN is not set"):
        serve(Counting)
