"""Engine client and worker against small fakes: a failing server costs a retry, not a trajectory."""

from __future__ import annotations

import asyncio
import base64
import inspect
import math
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from aiohttp import web

from megatron_sao.buffer.client import BufferError, EngineInfo, Lease
from megatron_sao.config import ConfigError, RunConfig, SamplingConfig, parse_config
from megatron_sao.data.routing import RoutingShape
from megatron_sao.rollout.client import EngineClient, EngineError, ModelLimits, RequestRefused
from megatron_sao.rollout.environment import EnvironmentFailure, load_object
from megatron_sao.rollout.worker import Player, Worker
from tests.serving import eventually

LIMITS = ModelLimits(vocab_size=100, context=64)
Answer = Callable[[dict[str, Any]], web.Response | Awaitable[web.Response]]


def generated(ids: list[int], reason: str = "stop", version: str = "1.0") -> Answer:
    logprobs = [[-0.5, token, None] for token in ids]
    spans = [{"version": version, "start": 0, "end": len(ids)}] if ids else []
    meta = {"output_token_logprobs": logprobs, "weight_versions": spans, "finish_reason": {"type": reason}}
    return lambda body: web.json_response({"output_ids": ids, "meta_info": meta})


async def hanging(body: dict[str, Any]) -> web.Response:
    await asyncio.sleep(3600)


def http_error(status: int) -> Answer:
    return lambda body: web.Response(status=status, text="out of luck")


class FakeEngine:
    """Answers /generate with the next answer of a script (the last one for ever) and keeps what it was sent."""

    def __init__(self, id: str, *answers: Answer) -> None:
        self.id, self.answers, self.bodies = id, list(answers), []
        self.aborted = []  # ids of requests it was told to stop

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        answer = (self.answers.pop(0) if len(self.answers) > 1 else self.answers[0])(body)
        return await answer if inspect.isawaitable(answer) else answer

    async def abort(self, request: web.Request) -> web.Response:
        self.aborted.append((await request.json())["rid"])
        return web.Response()

    @asynccontextmanager
    async def serving(self):
        app = web.Application()
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/abort_request", self.abort)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield EngineInfo(self.id, f"http://127.0.0.1:{runner.addresses[0][1]}", "clean", "1.0", 1, 0.0)
        await runner.cleanup()


def with_engines(
    engines: list[FakeEngine], use: Callable[..., Awaitable[Any]], max_retries: int = 2, **options: Any
) -> Any:
    """Run ``use(client, registry)``; ``registry`` is the list the client sees."""

    async def run() -> Any:
        async with asyncio.timeout(20):
            registry: list[EngineInfo] = []
            contexts = [engine.serving() for engine in engines]
            for context in contexts:
                registry.append(await context.__aenter__())

            async def listed() -> list[EngineInfo]:
                return list(registry)

            async with EngineClient(LIMITS, "token", listed, max_retries, **options) as client:
                result = await use(client, registry)
            for context in contexts:
                await context.__aexit__(None, None, None)
            return result

    return asyncio.run(run())


def turn(client: EngineClient, tokens: int = 8, prefer: str | None = None) -> Awaitable[Any]:
    return client.generate([1, 2, 3], SamplingConfig(temperature=0.5), tokens, [9], prefer)


def test_a_failed_turn_is_sent_to_another_engine():
    broken, sound = FakeEngine("a", http_error(500)), FakeEngine("b", generated([4, 9]))
    answer = with_engines([broken, sound], lambda client, _: turn(client, prefer="a"))
    assert (answer.token_ids, answer.engine, answer.retries) == ([4, 9], "b", 1)
    sent = [{name: value for name, value in engine.bodies[0].items() if name != "rid"} for engine in (broken, sound)]
    assert sent[0] == sent[1]


def test_prefixes_are_shared_within_a_version_only_and_an_engine_that_has_moved_on_is_asked_anew():
    engine = FakeEngine("a", generated([4, 9], version="1.1"), generated([5, 9], version="1.0"))
    answer = with_engines([engine], lambda client, _: turn(client), max_retries=0, share_by_version=True)
    assert answer.token_ids == [5, 9] and answer.versions == [("1.0", 0, 2)]
    assert [body["extra_key"] for body in engine.bodies] == ["1.0", "1.0"]


def test_an_aborted_turn_goes_on_from_its_tokens_and_keeps_each_tokens_version():
    engine = FakeEngine("a", generated([4, 5], "abort"), generated([6, 9], version="1.1"))
    answer = with_engines([engine], lambda client, _: turn(client))
    assert answer.token_ids == [4, 5, 6, 9] and answer.versions == [("1.0", 0, 2), ("1.1", 2, 4)]
    assert engine.bodies[1]["input_ids"] == [1, 2, 3, 4, 5]
    assert engine.bodies[1]["sampling_params"]["max_new_tokens"] == 6


def truncated(ids: list[int], support: list[list[int]], reason: str = "stop", **changes: Any) -> Answer:
    """As SGLang answers ``return_sampling_mask``: the log-probabilities over the support come beside the others."""
    logprobs = [[-0.5, token, None] for token in ids]
    meta = {
        "output_token_logprobs": logprobs, "weight_versions": [{"version": "1.0", "start": 0, "end": len(ids)}],
        "finish_reason": {"type": reason}, "output_token_sampling_mask": support,
        "output_token_sampling_logprobs": [-0.25] * len(ids),
    }  # fmt: skip
    return lambda body: web.json_response({"output_ids": ids, "meta_info": meta | changes})


def test_truncated_sampling_brings_each_tokens_support_and_the_log_probability_over_it():
    engine = FakeEngine("a", truncated([4, 5], [[4, 7], [5]], "abort"), truncated([9], [[8, 9]]))

    def use(client, _):
        return client.generate([1, 2, 3], SamplingConfig(top_k=2, top_p=0.9), 8, [9])

    answer = with_engines([engine], use)
    assert answer.support == [[4, 7], [5], [8, 9]] and answer.logprobs == [-0.25] * 3
    assert all(body["return_sampling_mask"] for body in engine.bodies)


def test_a_support_without_its_token_costs_a_retry():
    engine = FakeEngine("a", truncated([4], [[5, 7]]), truncated([4], [[4, 7]]))
    answer = with_engines([engine], lambda client, _: client.generate([1], SamplingConfig(top_k=2), 1, []))
    assert (answer.support, answer.retries) == ([[4, 7]], 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output_token_sampling_mask": None}, "0 sampling supports and 2 log-probabilities over them for 2 tokens"),
        ({"output_token_sampling_mask": [[4]]}, "1 sampling supports and 2 log-probabilities over them for 2 tokens"),
        ({"output_token_sampling_logprobs": None}, "2 sampling supports and 0 log-probabilities"),
        ({"output_token_sampling_logprobs": [-1.0]}, "2 sampling supports and 1 log-probabilities"),
        ({"output_token_sampling_mask": [[4], None]}, "does not hold its 2 tokens"),
    ],
)
def test_a_support_that_does_not_fit_its_tokens_is_a_failed_attempt(changes, message):
    engine = FakeEngine("a", truncated([4, 5], [[4], [5]], **changes))
    with pytest.raises(EngineError, match=message):
        with_engines([engine], lambda client, _: client.generate([1], SamplingConfig(top_k=2), 2, []), max_retries=0)


def test_a_log_probability_of_null_over_the_support_is_minus_infinity():
    engine = FakeEngine("a", truncated([4, 5], [[4], [5]], output_token_sampling_logprobs=[None, -0.5]))
    answer = with_engines([engine], lambda client, _: client.generate([1], SamplingConfig(top_k=2), 2, []))
    assert answer.logprobs == [-math.inf, -0.5]


ROUTING = RoutingShape(num_layers=2, moe_layers=(1,), top_k=2, num_experts=8)


def routed(ids: list[int], expert: int, reason: str = "stop", rows: int | None = None) -> Answer:
    """As SGLang answers ``return_routed_experts``; every token of the request went to ``expert`` and the one after."""

    def answer(body: dict[str, Any]) -> web.Response:
        logprobs = [[-0.5, token, None] for token in ids]
        meta = {
            "output_token_logprobs": logprobs, "weight_versions": [{"version": "1.0", "start": 0, "end": len(ids)}],
            "finish_reason": {"type": reason},
        }  # fmt: skip
        tokens = len(body["input_ids"]) + len(ids) - 1 if rows is None else rows
        if tokens:
            report = np.tile(np.array([[0, 0], [expert, expert + 1]], "<i4"), (tokens, 1, 1))
            meta["routed_experts"] = base64.b64encode(report.tobytes()).decode()
        return web.json_response({"output_ids": ids, "meta_info": meta})

    return answer


def test_routing_covers_the_whole_turn_and_each_token_keeps_that_of_the_request_it_was_sampled_in():
    lost = routed([7], 0, "abort", rows=0)  # aborted while it waited to be computed anew: nothing to replay
    engine = FakeEngine("a", routed([4, 5], 1, "abort"), lost, routed([6, 9], 3))
    answer = with_engines([engine], lambda client, _: turn(client), routing=ROUTING)
    assert answer.token_ids == [4, 5, 6, 9]
    assert answer.routed_experts.tolist() == [[[1, 2]]] * 4 + [[[3, 4]]] * 2
    assert all(body["return_routed_experts"] for body in engine.bodies)
    assert answer.retries == 2


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (generated([4]), "reported no routed experts: .* needs SGLang's enable_return_routed_experts"),
        (routed([4], 1, rows=2), r"answered 32 bytes of routed experts for 3 tokens, 2 layers and top 2: 48 are due"),
        (routed([4], 7), r"answered routed experts 7 to 8 outside \[0, 8\)"),
    ],
)
def test_routing_that_does_not_fit_is_a_failed_attempt(answer, message):
    with pytest.raises(EngineError, match=message):
        with_engines([FakeEngine("a", answer)], lambda client, _: turn(client), max_retries=0, routing=ROUTING)


def test_retries_are_bounded_and_the_error_says_what_happened():
    engine = FakeEngine("a", http_error(500))
    with pytest.raises(EngineError, match=r"failed 3 times.*max_retries = 2.*engine a .*HTTP 500: out of luck"):
        with_engines([engine], lambda client, _: turn(client))
    assert len(engine.bodies) == 3


def test_a_turn_waits_while_no_engine_is_clean_and_unreachable_engines_cost_no_attempt():
    async def use(client, registry):
        clean = registry[0]
        registry[0] = replace(clean, state="dirty")
        task = asyncio.create_task(turn(client))
        await asyncio.sleep(0.5)
        assert not task.done() and not engine.bodies
        registry[0] = replace(clean, url="http://127.0.0.1:9")  # nobody listens there
        await asyncio.sleep(1.5)
        assert not task.done()
        registry[0] = clean
        return await task

    engine = FakeEngine("a", generated([9]))
    assert with_engines([engine], use, max_retries=0).retries == 0


def test_an_answer_whose_parts_disagree_is_a_failed_attempt():
    def lying(body):
        meta = {"output_token_logprobs": [[-0.5, 4, None]], "weight_versions": [], "finish_reason": {"type": "stop"}}
        return web.json_response({"output_ids": [4], "meta_info": meta})

    with pytest.raises(EngineError, match="do not cover 1 tokens"):
        with_engines([FakeEngine("a", lying)], lambda client, _: turn(client), max_retries=0)
    with pytest.raises(EngineError, match="no tokens"):
        with_engines([FakeEngine("a", generated([]))], lambda client, _: turn(client), max_retries=0)


def test_a_refused_request_is_not_repeated():
    engine = FakeEngine("a", http_error(400))
    with pytest.raises(RequestRefused, match="refused a request: out of luck"):
        with_engines([engine], lambda client, _: turn(client))
    assert len(engine.bodies) == 1


def test_every_field_that_shapes_the_distribution_is_sent():
    engine = FakeEngine("a", generated([9]))
    with_engines([engine], lambda client, _: turn(client))
    assert engine.bodies[0]["return_logprob"] is True
    assert engine.bodies[0]["sampling_params"] == {
        "temperature": 0.5, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
        "frequency_penalty": 0.0, "presence_penalty": 0.0, "max_new_tokens": 8, "stop_token_ids": [9],
    }  # fmt: skip


def test_turns_of_new_episodes_spread_over_engines():
    engines = [FakeEngine("a", generated([9])), FakeEngine("b", generated([9]))]

    async def use(client, _):
        await asyncio.gather(*(turn(client) for _ in range(10)))

    with_engines(engines, use)
    assert max(len(engine.bodies) for engine in engines) <= 7  # 1.25 times the even share, rounded up


def placed(client: EngineClient, engines: list[EngineInfo], prompts: int = 200) -> dict[int, str]:
    return {prompt: client._place(engines, [prompt, 1, 2]).id for prompt in range(prompts)}


def test_every_worker_sends_a_prompt_to_the_same_engine_and_a_change_of_engines_moves_few():
    engines = [EngineInfo(f"engine-{i}", f"http://e{i}", "clean", "1.0", 1, 0.0) for i in range(4)]
    one, other = (EngineClient(LIMITS, "token", None) for _ in range(2))
    before = placed(one, engines)
    assert placed(other, engines[::-1]) == before
    assert min(list(before.values()).count(engine.id) for engine in engines) > 25  # of 200, an even share being 50
    after = placed(one, engines[1:])
    assert all(after[prompt] == engine for prompt, engine in before.items() if engine != "engine-0")
    assert placed(one, engines) == before  # the one that returns gets its own back


def test_a_turn_on_an_engine_that_falls_sick_moves_to_another_within_seconds_and_is_aborted():
    hung, sound = FakeEngine("a", hanging), FakeEngine("b", generated([4, 9]))

    async def use(client, registry):
        task = asyncio.create_task(turn(client, prefer="a"))
        await eventually(lambda: hung.bodies)
        registry[0] = replace(registry[0], state="dirty")  # a push is under way: wait
        await asyncio.sleep(1.5)
        assert not task.done() and not sound.bodies
        registry[0] = replace(registry[0], state="sick")
        async with asyncio.timeout(4):
            answer = await task
        await eventually(lambda: hung.aborted)
        return answer

    answer = with_engines([hung, sound], use)
    assert (answer.token_ids, answer.engine, answer.retries) == ([4, 9], "b", 1)
    assert sound.bodies[0]["input_ids"] == [1, 2, 3]
    assert hung.aborted == [hung.bodies[0]["rid"]]


def test_a_turn_whose_engine_was_replaced_moves_to_the_new_one():
    hung, fresh = FakeEngine("a", hanging), FakeEngine("new", generated([9]))

    async def use(client, registry):
        new = registry.pop()
        task = asyncio.create_task(turn(client))
        await eventually(lambda: hung.bodies)
        registry[0] = replace(registry[0], url=new.url)  # restarted by its sidecar on another port
        return await task

    assert with_engines([hung, fresh], use).engine == "a" and fresh.bodies


def test_a_cancelled_turn_is_aborted_at_once():
    engine = FakeEngine("a", hanging)

    async def use(client, _):
        task = asyncio.create_task(turn(client))
        await eventually(lambda: engine.bodies)
        task.cancel()
        await eventually(lambda: engine.aborted, seconds=2)

    with_engines([engine], use)
    assert engine.aborted == [engine.bodies[0]["rid"]]


def test_an_engine_that_has_just_failed_gets_no_new_turns_while_there_are_others():
    broken, sound = FakeEngine("a", http_error(500), generated([9])), FakeEngine("b", generated([9]))

    async def use(client, _):
        await turn(client, prefer="a")
        for _ in range(8):
            await turn(client, prefer="a")

    with_engines([broken, sound], use)
    assert (len(broken.bodies), len(sound.bodies)) == (1, 9)


def test_an_answer_longer_than_asked_for_is_a_failed_attempt():
    with pytest.raises(EngineError, match="2 tokens, more than it was asked for"):
        with_engines([FakeEngine("a", generated([4, 5]))], lambda client, _: turn(client, tokens=1), max_retries=0)


def test_a_turns_budget_holds_across_aborts_to_the_token():
    parts = [generated([4] * n, "abort") for n in (3, 1, 2)] + [generated([5, 5], "length")]
    engine = FakeEngine("a", *parts)
    answer = with_engines([engine], lambda client, _: turn(client, tokens=8), max_retries=3)
    assert len(answer.token_ids) == 8 and answer.finish_reason == "length"
    assert [body["sampling_params"]["max_new_tokens"] for body in engine.bodies] == [8, 5, 4, 2]


# --- worker ---------------------------------------------------------------------------------------------------------


def config(tmp_path: Path, environment: str, **rollout: Any) -> RunConfig:
    return parse_config(
        {
            "name": "test",
            "model": {"path": tmp_path, "device": "cpu"},
            "data": {"train": "unused.jsonl"},
            "rollout": {"environment": f"{__name__}:{environment}", "concurrency": 2} | rollout,
        }
    )


class OneTurn:
    """Pays 1 for any action; prompts "crash" and "silent" misbehave."""

    cancelled: ClassVar[list[str]] = []  # ids of tasks

    def __init__(self, tokenizer: Any, prompt: int = 1) -> None:
        self.prompt = prompt

    async def run(self, session, task) -> None:
        if task.prompt == "crash":
            raise EnvironmentFailure("the sandbox is gone")
        session.prompt([self.prompt])
        if task.prompt == "silent":
            return
        if task.prompt == "slow tool":
            await session.generate(4)
            await asyncio.sleep(3600)
        if task.prompt == "own timeout":
            raise TimeoutError("the service did not answer")
        if task.prompt == "two turns":
            await session.generate(4)
            await session.generate(4)
        if task.prompt == "endless":
            while True:
                await session.generate()
        if task.prompt == "buggy":
            raise KeyError("typo")
        try:
            await session.generate(4)
        except asyncio.CancelledError:
            self.cancelled.append(task.id)
            raise
        session.finish(1.0)


class Digits:
    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def half(task, transcript) -> float:
    assert transcript == [("prompt", "1"), ("action", "4 9")]
    return 0.5


class FakeBuffer:
    """Leases the given prompts once each, then waits for ever."""

    def __init__(self, *prompts: str) -> None:
        self.leases = [
            Lease(
                str(i), "train", {"id": f"t{i}", "prompt": prompt, "label": 0, "extra": {}}, 0, 1, 60.0, group=f"t{i}/0"
            )
            for i, prompt in enumerate(prompts)
        ]
        self.submitted, self.released, self.lost = [], [], set()
        self.all_ended = asyncio.Event()
        self._open = len(prompts)

    def _end(self) -> None:
        self._open -= 1
        if not self._open:
            self.all_ended.set()

    async def lease(self, worker_id, max_leases, wait):
        if not self.leases:
            await asyncio.sleep(3600)
        given, self.leases = self.leases[:max_leases], self.leases[max_leases:]
        return given

    async def renew(self, visit_id, attempt):
        if visit_id in self.lost:
            raise BufferError(409, "the lease is lost")

    async def release(self, visit_id, attempt, reason):
        self.released.append((visit_id, attempt, reason))
        self._end()

    async def submit(self, trajectory):
        self.submitted.append(trajectory)
        self._end()
        return "accepted"


def work(
    settings: RunConfig,
    prompts: list[str],
    engine: FakeEngine,
    during: Callable[[FakeBuffer], Awaitable[None]] | None = None,
) -> FakeBuffer:
    """Let a worker play ``prompts`` until all visits have ended and ``during(buffer)`` has returned; then stop it."""

    async def use(client, _):
        buffer = FakeBuffer(*prompts)
        worker = asyncio.create_task(Worker(settings, "w0", buffer, Player(settings, client, Digits())).run())
        await (during(buffer) if during else buffer.all_ended.wait())
        worker.cancel()
        await asyncio.wait([worker], timeout=3)
        assert worker.cancelled()
        return buffer

    return with_engines([engine], use, max_retries=0)


def test_the_worker_plays_every_visit_and_submits_valid_trajectories(tmp_path):
    buffer = work(config(tmp_path, "OneTurn"), ["p"] * 5, FakeEngine("a", generated([4, 9])))
    assert [trajectory.validate(100, 10).total_reward for trajectory in buffer.submitted] == [1.0] * 5
    assert {(t.run_id, t.kind, t.attempt) for t in buffer.submitted} == {("test", "train", 1)}
    assert sorted(t.task_id for t in buffer.submitted) == ["t0", "t1", "t2", "t3", "t4"]
    assert all(t.group == f"{t.task_id}/0" for t in buffer.submitted)
    assert len({t.id for t in buffer.submitted}) == 5


def test_what_the_environment_fails_is_recorded_with_its_reason_and_limits_truncate(tmp_path):
    prompts = ["crash", "silent", "buggy", "endless"]
    buffer = work(config(tmp_path, "OneTurn", max_turns=3), prompts, FakeEngine("a", generated([4, 9])))
    ended = {prompt: next(t for t in buffer.submitted if t.task_id == f"t{i}") for i, prompt in enumerate(prompts)}
    assert ended["crash"].failure == "the sandbox is gone"
    assert "without calling session.finish" in ended["silent"].failure
    assert ended["buggy"].failure == "KeyError: 'typo'"
    assert ended["endless"].failure is None and ended["endless"].truncated and ended["endless"].num_tokens == 7


async def slow_second_turn(body: dict[str, Any]) -> web.Response:
    if len(body["input_ids"]) > 1:
        await asyncio.sleep(3600)
    return generated([4, 9])(body)


def test_whose_time_was_up_decides_what_becomes_of_the_episode(tmp_path):
    """The environment's is a failure; the policy's truncates what it has said so far, unless it has said nothing."""
    prompts = ["slow tool", "own timeout", "two turns"]
    settings = config(tmp_path, "OneTurn", episode_timeout=1.0, concurrency=3)
    buffer = work(settings, prompts, FakeEngine("a", slow_second_turn))
    ended = {prompt: next(t for t in buffer.submitted if t.task_id == f"t{i}") for i, prompt in enumerate(prompts)}
    assert ended["slow tool"].failure == "the environment timed out (rollout.episode_timeout = 1 s)"
    assert ended["own timeout"].failure == "TimeoutError in the environment: the service did not answer"
    assert ended["two turns"].failure is None and ended["two turns"].truncated
    assert ended["two turns"].validate(100, 10).token_ids.tolist() == [1, 4, 9]  # without the turn in flight
    silent = work(settings, ["p"], FakeEngine("a", hanging)).submitted[0]
    assert silent.failure.startswith("the policy could not act")


def test_an_episode_that_ran_out_of_time_for_want_of_engines_goes_back(tmp_path):
    settings = config(tmp_path, "OneTurn", episode_timeout=1.0)

    async def use(client, registry):
        registry[0] = replace(registry[0], state="dirty")
        buffer = FakeBuffer("p")
        worker = asyncio.create_task(Worker(settings, "w0", buffer, Player(settings, client, Digits())).run())
        await buffer.all_ended.wait()
        worker.cancel()
        await asyncio.wait([worker])
        return buffer

    buffer = with_engines([FakeEngine("a", generated([9]))], use)
    assert not buffer.submitted and "no engine was clean" in buffer.released[0][2]


def test_an_environment_that_only_fails_ends_the_worker(tmp_path):
    async def use(client, _):
        settings = config(tmp_path, "OneTurn", concurrency=200)
        buffer = FakeBuffer(*["crash"] * 150)
        await Worker(settings, "w0", buffer, Player(settings, client, Digits())).run()

    with pytest.raises(ExceptionGroup) as caught:
        with_engines([FakeEngine("a", generated([9]))], use)
    assert "100 episodes in a row failed" in str(caught.value.exceptions[0])


def test_engines_that_fail_an_episode_give_the_visit_back(tmp_path):
    buffer = work(config(tmp_path, "OneTurn"), ["p"], FakeEngine("a", http_error(500)))
    assert not buffer.submitted
    assert buffer.released[0][:2] == ("0", 1) and "HTTP 500" in buffer.released[0][2]


def test_a_reward_function_replaces_the_environments_reward(tmp_path):
    settings = config(tmp_path, "OneTurn", reward=f"{__name__}:half")
    assert work(settings, ["p"], FakeEngine("a", generated([4, 9]))).submitted[0].total_reward == 0.5


def test_a_stopped_worker_gives_back_what_it_was_playing_and_a_lost_lease_ends_its_episode(tmp_path):
    async def during(buffer):
        await asyncio.sleep(0.2)
        buffer.lost.add("0")
        await eventually(lambda: OneTurn.cancelled == ["t0"])

    OneTurn.cancelled.clear()
    settings = config(tmp_path, "OneTurn")
    settings = settings.model_copy(update={"buffer": settings.buffer.model_copy(update={"lease_seconds": 0.6})})
    buffer = work(settings, ["p", "p"], FakeEngine("a", hanging), during)
    assert not buffer.submitted
    assert buffer.released == [("1", 1, "the worker stopped")]


class Closing(OneTurn):
    closed = 0

    async def close(self) -> None:
        Closing.closed += 1


def test_an_environment_is_closed_with_its_worker_where_it_can_be(tmp_path):
    asyncio.run(Player(config(tmp_path, "Closing"), None, Digits()).close())
    asyncio.run(Player(config(tmp_path, "OneTurn"), None, Digits()).close())
    assert Closing.closed == 1


def test_an_environment_may_be_named_by_its_entry_point(monkeypatch):
    entry = EntryPoint("one-turn", f"{__name__}:OneTurn", "megatron_sao.environment")
    found = {"megatron_sao.environment": EntryPoints([entry])}
    monkeypatch.setattr("megatron_sao.rollout.environment.entry_points", lambda group: found.get(group, EntryPoints()))
    assert load_object("one-turn", "rollout.environment") is OneTurn
    with pytest.raises(ConfigError, match=r"'two-turns' is not an import path.*installed packages declare one-turn"):
        load_object("two-turns", "rollout.environment")
    with pytest.raises(ConfigError, match="is not an import path"):
        load_object("one-turn", "rollout.reward")


def test_an_import_path_that_leads_nowhere_is_a_sentence():
    with pytest.raises(ConfigError, match=r"is not an import path; write package.module:name"):
        load_object("nowhere", "rollout.environment")
    with pytest.raises(ConfigError, match=r"rollout.reward = 'nowhere.at:all': no module named 'nowhere'"):
        load_object("nowhere.at:all", "rollout.reward")
    with pytest.raises(ConfigError, match="defines no 'Missing'"):
        load_object(f"{__name__}:Missing", "rollout.environment")
