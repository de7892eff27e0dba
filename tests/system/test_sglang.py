"""What our side promises about a real SGLang server: guards, log-probs, versions, retries, whole episodes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_sao.config import RolloutConfig, SamplingConfig
from megatron_sao.data.tasks import Task
from megatron_sao.rollout import evaluate, health
from megatron_sao.rollout.client import CONTEXT_MARGIN, EngineClient, ModelLimits, RequestRefused
from megatron_sao.rollout.session import Session
from megatron_sao.rollout.worker import load_tokenizer
from tests.serving import CHARACTERS, CONTEXT, TOKEN, Server, eventually, run_config

pytestmark = [pytest.mark.system, pytest.mark.timeout(480)]

SAMPLING = SamplingConfig()
ROLLOUT = RolloutConfig(environment="unused:Unused", max_tokens=128, max_turns=6)
PROMPT = [CHARACTERS.index(character) for character in "7+3*8-2="]


def with_client(server: Server, use: Callable[[EngineClient], Awaitable[Any]], max_retries: int = 5) -> Any:
    async def registry() -> list[Any]:
        return [server.engine]

    async def run() -> Any:
        limits = ModelLimits.of(server.model_path)
        async with EngineClient(limits, TOKEN, registry, max_retries) as client:
            return await use(client)

    return asyncio.run(run())


def reference(model: torch.nn.Module, token_ids: list[int], temperature: float) -> torch.Tensor:
    """float32 [L - 1]: log-probability of each token after the first, by transformers."""
    with torch.no_grad():
        logits = model(torch.tensor([token_ids])).logits[0, :-1].float() / temperature
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0]


@pytest.fixture(scope="session")
def hf_model(glm4_moe_path):
    return AutoModelForCausalLM.from_pretrained(glm4_moe_path, dtype=torch.float32).eval()


def post(server: Server, path: str, **body: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    return httpx.post(f"{server.engine.url}{path}", json=body, headers=headers, timeout=60)


@pytest.mark.parametrize(
    ("ids", "max_new_tokens", "complaint"),
    [
        ([1, 2, len(CHARACTERS)], 4, r"input_ids\[2\] = 23 is outside the vocabulary"),
        ([1, -1], 4, r"input_ids\[1\] = -1 is outside the vocabulary"),
        ([], 4, "input_ids is empty"),
        ([1] * (CONTEXT - 5), 4, "exceed the context of 256"),
        ([1, 2], 0, "max_new_tokens = 0"),
    ],
)
def test_what_would_kill_the_server_is_refused_and_the_server_lives(glm4_moe_server, ids, max_new_tokens, complaint):
    async def use(client):
        with pytest.raises(RequestRefused, match=complaint):
            await client.generate(ids, SAMPLING, max_new_tokens)
        return await client.generate(PROMPT, SAMPLING, 4)

    assert len(with_client(glm4_moe_server, use).token_ids) == 4


@pytest.mark.parametrize("tokens", [1, 40])
def test_at_the_last_allowed_context_position_no_token_is_missing(glm4_moe_server, tokens):
    prompt = [1] * (CONTEXT - CONTEXT_MARGIN - tokens)
    answer = with_client(glm4_moe_server, lambda client: client.generate(prompt, SAMPLING, tokens))
    assert len(answer.token_ids) == tokens and answer.finish_reason == "length"


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
def test_logprobs_equal_those_of_transformers_at_the_sampling_temperature(glm4_moe_server, hf_model, temperature):
    async def use(client):
        prompts = [[1 + (7 * i + j) % 22 for j in range(3 + i)] for i in range(16)]
        sampling = SamplingConfig(temperature=temperature)
        return prompts, await asyncio.gather(*(client.generate(ids, sampling, 48) for ids in prompts))

    for prompt, answer in zip(*with_client(glm4_moe_server, use), strict=True):
        expected = reference(hf_model, prompt + answer.token_ids, temperature)[len(prompt) - 1 :]
        np.testing.assert_allclose(answer.logprobs, expected.numpy(), atol=1e-5)


def test_truncated_sampling_reports_its_support_and_log_probabilities_over_it(glm4_moe_server, hf_model):
    sampling = SamplingConfig(temperature=1.3, top_k=5, top_p=0.5)

    async def use(client):
        prompts = [[1 + (7 * i + j) % 22 for j in range(3 + i)] for i in range(8)]
        return prompts, await asyncio.gather(*(client.generate(ids, sampling, 32) for ids in prompts))

    sizes = set()
    for prompt, answer in zip(*with_client(glm4_moe_server, use), strict=True):
        with torch.no_grad():
            logits = hf_model(torch.tensor([prompt + answer.token_ids])).logits[0, len(prompt) - 1 : -1] / 1.3
        for row, token, support, logprob in zip(logits, answer.token_ids, answer.support, answer.logprobs, strict=True):
            probabilities, order = row.softmax(-1).sort(descending=True)
            before = probabilities.cumsum(-1) - probabilities
            kept = [int(i) for rank, i in enumerate(order) if rank < 5 and before[rank] <= 0.5]
            assert sorted(support) == sorted(kept)
            assert logprob == pytest.approx(float(row[kept].log_softmax(-1)[kept.index(token)]), abs=1e-5)
            sizes.add(len(support))
    assert max(sizes) == 5 and min(sizes) < 5, "both limits must act"


def test_a_stop_token_ends_the_turn_and_is_part_of_it(glm4_moe_server):
    stops = list(range(0, 23, 2))
    answer = with_client(glm4_moe_server, lambda client: client.generate(PROMPT, SAMPLING, 60, stops))
    assert answer.finish_reason == "stop"
    assert answer.token_ids[-1] in stops and not set(answer.token_ids[:-1]) & set(stops)


def test_every_token_carries_the_version_the_server_was_started_with(glm4_moe_server):
    answer = with_client(glm4_moe_server, lambda client: client.generate(PROMPT, SAMPLING, 12))
    assert answer.versions == [("0.0", 0, 12)]


def test_an_aborted_turn_goes_on_from_the_tokens_it_had(glm4_moe_server, hf_model):
    async def use(client):
        for _ in range(20):  # until one is in the middle when it is aborted: this process, too, may stand still
            turn = asyncio.create_task(client.generate(PROMPT, SAMPLING, 240))
            await asyncio.sleep(0.3)
            await asyncio.to_thread(post, glm4_moe_server, "/abort_request", abort_all=True)
            answer = await turn
            assert len(answer.token_ids) == 240
            if answer.retries:
                return answer
        raise AssertionError("no turn was aborted")

    answer = with_client(glm4_moe_server, use)
    expected = reference(hf_model, PROMPT + answer.token_ids, 1.0)[len(PROMPT) - 1 :]
    np.testing.assert_allclose(answer.logprobs, expected.numpy(), atol=1e-5)


def test_wrong_key_is_refused_by_generate_and_by_the_admin_calls(glm4_moe_server):
    for path in ("/generate", "/pause_generation"):
        headers = {"Authorization": "Bearer no"}
        answer = httpx.post(f"{glm4_moe_server.engine.url}{path}", json={}, headers=headers, timeout=60)
        assert answer.status_code == 401


class Echo:
    """Two turns with an observation in between; reward 1 on the last token."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    async def run(self, session: Session, task: Task) -> None:
        session.prompt(self.tokenizer.encode(task.prompt))
        await session.generate(10)
        session.observe(self.tokenizer.encode("24;"))
        await session.generate(7)
        session.finish(1.0)


def test_an_episode_becomes_a_trajectory_with_exact_logprobs_at_another_temperature(glm4_moe_server, hf_model):
    async def use(client):
        session = Session(client, ROLLOUT, SamplingConfig(temperature=0.6))
        await Echo(load_tokenizer(glm4_moe_server.model_path)).run(session, Task("t", "7+3*8-2=", 29, {}))
        return session.trajectory(id="x", run_id="r", task_id="t", epoch=0, attempt=1, kind="train")

    trajectory = with_client(glm4_moe_server, use)
    trajectory.validate(len(CHARACTERS), ROLLOUT.max_tokens)
    assert trajectory.turns == [
        ("prompt", 0, 8), ("action", 8, 18), ("observation", 18, 21), ("action", 21, 28),
    ]  # fmt: skip
    assert trajectory.versions == [("0.0", 8, 18), ("0.0", 21, 28)]
    assert trajectory.rewards.nonzero()[0].tolist() == [27]
    expected = np.zeros(28, np.float32)
    expected[1:] = reference(hf_model, trajectory.token_ids.tolist(), 0.6).numpy()
    np.testing.assert_allclose(trajectory.logprobs, expected * trajectory.loss_mask, atol=1e-5)


def test_evaluation_of_a_running_server_prints_one_line(glm4_moe_server, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MEGATRON_SAO_TOKEN", TOKEN)
    held_out = tmp_path / "eval.jsonl"
    held_out.write_text("".join(f'{{"prompt": "{i}+3*8=", "label": 0}}\n' for i in range(9)))
    config = run_config(
        glm4_moe_server.model_path,
        data={"train": "unused.jsonl", "eval": held_out},
        rollout={"environment": f"{__name__}:Echo", "max_tokens": 128, "concurrency": 3},
    )
    assert evaluate.main(config, tmp_path, None, [glm4_moe_server.engine.url], prompts=8) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["success_rate"] == 1.0 and printed["prompts"] == 8 and printed["failed"] == 0
    assert printed["tokens"] == 8 * (6 + 10 + 3 + 7) and printed["action_tokens"] == 8 * 17
    assert printed["weight_versions"] == ["0.0"]


def test_a_server_that_gives_no_tokens_is_sick_until_it_goes_on(glm4_moe_server, monkeypatch):
    monkeypatch.setattr(health, "PROBE_SECONDS", 0.2)
    children = psutil.Process(glm4_moe_server.process.pid).children(recursive=True)
    scheduler = next(child for child in children if "sglang::scheduler" in " ".join(child.cmdline()))

    async def run() -> None:
        probe = health.HealthProbe(glm4_moe_server.engine.url, TOKEN, timeout=0)
        probe.heed("clean")
        answers = []
        ask = probe._ask

        async def asked(http) -> str | None:
            answers.append(await ask(http))
            return answers[-1]

        probe._ask = asked
        task = asyncio.create_task(probe.run())
        await eventually(lambda: answers[-3:] == [None] * 3)
        assert probe.sick is None
        scheduler.suspend()
        try:
            await eventually(lambda: probe.sick is not None, seconds=60)
            assert "ReadTimeout" in probe.sick
        finally:
            scheduler.resume()
        await eventually(lambda: probe.sick is None, seconds=60)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(run())
