"""The engine client against small fakes: a failing server costs a retry, not a turn."""

from __future__ import annotations

import asyncio
import base64
import math
from collections.abc import Awaitable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from megatron_sao.buffer.client import EngineInfo
from megatron_sao.config import SamplingConfig
from megatron_sao.data.routing import RoutingShape
from megatron_sao.rollout.client import EngineClient, EngineError, RequestRefused
from tests.fake_engines import LIMITS, Answer, FakeEngine, generated, hanging, http_error, with_engines
from tests.serving import eventually, skip_time


@pytest.fixture(autouse=True)
def cool_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that failed is passed over for the whole test, however slow the machine is."""
    monkeypatch.setattr("megatron_sao.rollout.client.COOL_OFF", 3600.0)


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


def test_a_turn_that_takes_a_day_is_waited_for():
    answered = asyncio.Event()

    async def slow(body):
        await answered.wait()
        return generated([4, 9])(body)

    async def use(client, _):
        task = asyncio.create_task(turn(client))
        await eventually(lambda: engine.bodies)
        skip_time(24 * 3600)  # every timeout that has been set so far is over
        await asyncio.sleep(0.3)
        assert not task.done() and not engine.aborted
        answered.set()
        return await task

    engine = FakeEngine("a", slow)
    answer = with_engines([engine], use, max_retries=0, seconds=48 * 3600)
    assert (answer.token_ids, answer.retries, len(engine.bodies)) == ([4, 9], 0, 1)


def test_an_answer_whose_parts_disagree_is_a_failed_attempt():
    def lying(body):
        meta = {"output_token_logprobs": [[-0.5, 4, None]], "weight_versions": [], "finish_reason": {"type": "stop"}}
        return web.json_response({"output_ids": [4], "meta_info": meta})

    with pytest.raises(EngineError, match="do not cover 1 tokens"):
        with_engines([FakeEngine("a", lying)], lambda client, _: turn(client), max_retries=0)
    with pytest.raises(EngineError, match="no tokens"):
        with_engines([FakeEngine("a", generated([]))], lambda client, _: turn(client), max_retries=0)


def answering(text: bytes, status: int = 200) -> Answer:
    return lambda body: web.Response(body=text, status=status, content_type="application/json")


@pytest.mark.parametrize(
    "text", [b"{}", b"[]", b"null", b'{"error": 1}', b"\xff", b'{"meta_info": {}, "output_ids": 1}']
)
@pytest.mark.parametrize("status", [200, 500])
def test_an_answer_of_another_form_is_a_failed_attempt(text, status):
    engine = FakeEngine("a", answering(text, status), generated([4, 9]))
    answer = with_engines([engine], lambda client, _: turn(client))
    assert (answer.token_ids, answer.retries) == ([4, 9], 1)


def test_a_turn_that_was_ended_for_no_reason_is_a_failed_attempt():
    meta = {"output_token_logprobs": [[-0.5, 4, None]], "weight_versions": [], "finish_reason": None}
    lying = lambda body: web.json_response({"output_ids": [4], "meta_info": meta})  # noqa: E731
    answer = with_engines([FakeEngine("a", lying, generated([4, 9]))], lambda client, _: turn(client))
    assert (answer.token_ids, answer.retries) == ([4, 9], 1)


@pytest.mark.parametrize(
    "logprobs",
    [None, [], [[-0.5, 4, None]], [[-0.5, 4, None], [-0.5, 6, None]], [[-0.5, token, None] for token in (4, 5, 5)]],
)
@pytest.mark.parametrize("reason", ["stop", "abort"])
def test_log_probabilities_that_are_missing_or_of_other_tokens_are_a_failed_attempt(logprobs, reason):
    spans = [{"version": "1.0", "start": 0, "end": 2}]
    meta = {"output_token_logprobs": logprobs, "weight_versions": spans, "finish_reason": {"type": reason}}
    engine = FakeEngine("a", lambda body: web.json_response({"output_ids": [4, 5], "meta_info": meta}), generated([9]))
    answer = with_engines([engine], lambda client, _: turn(client))
    assert (answer.token_ids, answer.logprobs, answer.retries) == ([9], [-0.5], 1)
    assert engine.bodies[1]["input_ids"] == [1, 2, 3]  # nothing of the answer was kept


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


@pytest.mark.parametrize("prefer", ["a", "b"])
def test_a_turn_goes_to_the_engine_that_has_its_prefix_wherever_the_prompt_belongs(prefer):
    engines = [FakeEngine("a", generated([9])), FakeEngine("b", generated([9]))]
    assert with_engines(engines, lambda client, _: turn(client, prefer=prefer)).engine == prefer


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


@pytest.mark.parametrize("state", ["sick", "down", None])  # None: it has left the registry
def test_a_turn_on_an_engine_that_falls_sick_moves_to_another_within_seconds_and_is_aborted(state):
    hung, sound = FakeEngine("a", hanging), FakeEngine("b", generated([4, 9]))

    async def use(client, registry):
        task = asyncio.create_task(turn(client, prefer="a"))
        await eventually(lambda: hung.bodies)
        registry[0] = replace(registry[0], state="dirty")  # a push is under way: wait
        await asyncio.sleep(1.5)
        assert not task.done() and not sound.bodies
        registry[:1] = [replace(registry[0], state=state)] if state else []
        async with asyncio.timeout(30):
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
        await eventually(lambda: engine.aborted)

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
