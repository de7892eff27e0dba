"""Routing replay between a real SGLang server and the trainer: the experts are the engine's, whatever the trainer's
router would have chosen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter

from megatron_sao.config import ModelConfig, OptimizerConfig, ParallelConfig, RolloutConfig, SamplingConfig
from megatron_sao.data.routing import replayed_routing
from megatron_sao.data.trajectory import Trajectory
from megatron_sao.models.backend import Backend
from megatron_sao.models.build import build_policy
from megatron_sao.models.hf import read_hf_model, transformer_config
from megatron_sao.rollout.client import EngineClient, ModelLimits
from megatron_sao.rollout.session import Session
from megatron_sao.trainer.microbatch import MicroBatch, build_microbatches
from megatron_sao.trainer.policy import Policy
from megatron_sao.trainer.trainable import Trainable
from megatron_sao.weights.load import load_hf_weights
from tests.serving import CHARACTERS, TOKEN, Server

pytestmark = [pytest.mark.system, pytest.mark.timeout(480)]

EPISODES = 16


async def three_turns(session: Session, prompt: list[int]) -> Trajectory:
    session.prompt(prompt)
    for turn in range(3):
        await session.generate(12 + turn)
        session.observe([1 + turn, 2, 3])  # after the last turn too: tokens that the engine never routes
    session.finish(1.0)
    return session.trajectory(id=str(prompt), run_id="r", task_id="t", epoch=0, attempt=1, kind="train")


@pytest.fixture(scope="module")
def episodes(glm4_moe_server: Server) -> list[Trajectory]:
    routing = replayed_routing(glm4_moe_server.config)

    async def registry() -> list[Any]:
        return [glm4_moe_server.engine]

    async def play() -> list[Trajectory]:
        limits = ModelLimits.of(glm4_moe_server.model_path)
        rollout = RolloutConfig(environment="unused:Unused", max_tokens=128)
        async with EngineClient(limits, TOKEN, registry, routing=routing) as client:
            prompts = [[1 + (7 * i + j) % 22 for j in range(3 + i)] for i in range(EPISODES)]
            sessions = [Session(client, rollout, SamplingConfig()) for _ in prompts]
            return await asyncio.gather(*map(three_turns, sessions, prompts))

    return [t.validate(len(CHARACTERS), 128, routing) for t in asyncio.run(play())]


@pytest.fixture
def policy(world: Backend, glm4_moe_server: Server) -> Policy:
    """With the engine's weights."""
    settings = ModelConfig(path=glm4_moe_server.model_path)
    model = read_hf_model(settings.path)
    config = transformer_config(model, settings, ParallelConfig())
    chunks = build_policy(model, config, "native")
    load_hf_weights(chunks, model, config, "policy")
    return Policy(Trainable(chunks, config, OptimizerConfig(), 1, ParallelConfig()), model.vocab_size, temperature=1.0)


def routers(policy: Policy) -> list[TopKRouter]:
    return [module for module in policy.trainable.chunks[0].modules() if isinstance(module, TopKRouter)]


def packed(episodes: list[Trajectory], replay: bool) -> list[MicroBatch]:
    batch = build_microbatches(episodes, 0, 1, 300, 1, torch.device("cpu"), routing_replay=replay)
    assert len(batch) > 2 and max(len(micro.trajectories) for micro in batch) > 2
    return batch


def differences(policy: Policy, episodes: list[Trajectory], replay: bool) -> torch.Tensor:
    """|log-prob of the trainer − of the engine| of every action token."""
    batch = packed(episodes, replay)
    current = policy.logprobs(batch, temperature=1.0)
    pairs = zip(batch, current, strict=True)
    return torch.cat([(logprobs - micro.rollout_logprobs)[micro.loss_mask].abs() for micro, logprobs in pairs])


def test_the_engine_reports_the_experts_that_the_trainer_would_choose(
    episodes: list[Trajectory], policy: Policy
) -> None:
    maps: list[list[torch.Tensor]] = []
    for router in routers(policy):
        maps.append([])
        router.register_forward_hook(lambda _module, _inputs, output, seen=maps[-1]: seen.append(output[1]))
    assert differences(policy, episodes, replay=False).max() < 1e-5
    chosen = torch.stack([torch.cat(layer) for layer in maps], dim=1)  # [tokens, layers, experts]
    reported = torch.cat([micro.routed_experts for micro in packed(episodes, replay=True)]).long()
    routed = reported[:, 0, 0] >= 0
    assert (~routed).sum() == 4 * EPISODES, "the last sampled token and the last observation are not routed"
    engine = torch.zeros_like(chosen[routed]).scatter(2, reported[routed], True)
    assert torch.equal(chosen[routed], engine)
    assert len(chosen.any(0).nonzero()) > 12, "both layers must use most of their eight experts"
    assert not torch.equal(chosen[:, 0], chosen[:, 1])


def noisy_logits(router: TopKRouter, generator: torch.Generator) -> None:
    """It decides where two experts are nearly equal, and elsewhere moves probabilities by less than a hundredth."""
    gating = router.gating
    router.gating = lambda hidden: (logits := gating(hidden)) + 1e-2 * torch.randn(logits.shape, generator=generator)


def noisy_bias(router: TopKRouter, generator: torch.Generator) -> None:
    """Noise that decides the choice alone: the expert bias is no part of the probabilities."""
    router.expert_bias += 0.2 * torch.randn(router.expert_bias.shape, generator=generator)


@pytest.mark.parametrize(("noise", "limit"), [(noisy_logits, 2.5e-2), (noisy_bias, 1e-5)])
def test_with_noise_in_the_router_log_probs_match_under_replay_and_not_without(
    noise: Callable[[TopKRouter, torch.Generator], None], limit: float, episodes: list[Trajectory], policy: Policy
) -> None:
    generator = torch.Generator().manual_seed(0)
    for router in routers(policy):
        noise(router, generator)
    assert differences(policy, episodes, replay=False).max() > 4 * limit
    assert differences(policy, episodes, replay=True).max() < limit
