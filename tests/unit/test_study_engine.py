"""The study's in-process engine behind real sessions: exact log-probabilities, reproducible, strict about weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_sao.config import RolloutConfig, SamplingConfig
from megatron_sao.data.trajectory import Trajectory
from megatron_sao.rollout.client import RequestRefused
from megatron_sao.rollout.session import Session
from tests.tiny_models import VOCAB_SIZE, write_glm4_moe, write_llama
from tools.study.engine import InProcessEngine

STOPS = (3, 4)
Episode = Callable[[], Coroutine[Any, Any, Trajectory]]


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return write_glm4_moe(tmp_path_factory.mktemp("models") / "glm4_moe", layers=2)


@pytest.fixture(scope="module")
def engine(path) -> InProcessEngine:
    return InProcessEngine(path, version="1.7")


def episode(
    engine: InProcessEngine,
    prompt: Sequence[int],
    turns: int = 3,
    temperature: float = 1.0,
    pause: float = 0.0,
    **limits,
) -> Episode:
    """``turns`` turns of at most 6 tokens; turn t is answered by t observed tokens."""

    async def play() -> Trajectory:
        sampling = SamplingConfig(temperature=temperature)
        session = Session(engine, RolloutConfig(environment="a:b", max_tokens_per_turn=6), sampling)
        session.prompt(prompt)
        for turn in range(turns):
            if pause:
                await asyncio.sleep(pause)
            await session.generate(stop_token_ids=STOPS)
            if turn + 1 < turns:
                session.observe([7] * turn)
        session.finish(1.0)
        return session.trajectory(id="x", run_id="r", task_id="t", epoch=0, attempt=0, kind="train")

    return play


def mixed(engine: InProcessEngine, pause: float = 0.0) -> list[Episode]:
    """Rows of different prompt lengths, numbers of turns and temperatures."""
    return [
        episode(
            engine, list(range(5, 6 + i % 4)), turns=1 + i % 5, temperature=(1.0, 0.7)[i % 2], pause=pause * (i % 3)
        )
        for i in range(12)
    ]


def full_logprobs(engine: InProcessEngine, trajectory: Trajectory) -> torch.Tensor:
    ids = torch.from_numpy(trajectory.token_ids).long()
    with torch.inference_mode():
        logits = engine.model(input_ids=ids[None, :-1]).logits[0] / trajectory.sampling["temperature"]
    return logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]


def test_logprobs_are_those_of_a_full_forward_over_the_finished_sequence(engine):
    played = engine.play(mixed(engine), seed=0)
    for trajectory in played:
        trajectory.validate(VOCAB_SIZE, max_tokens=256)
        mask = torch.from_numpy(trajectory.loss_mask[1:]).bool()
        recorded = torch.from_numpy(trajectory.logprobs[1:])[mask]
        assert (recorded - full_logprobs(engine, trajectory)[mask]).abs().max() <= 1e-5


def test_rows_of_different_length_and_number_of_turns_finish_each_in_its_own_time(engine):
    played = engine.play(mixed(engine), seed=0)
    assert [sum(kind == "action" for kind, _, _ in t.turns) for t in played] == [1 + i % 5 for i in range(12)]
    assert len({t.num_tokens for t in played}) > 4


def test_the_same_seed_gives_the_same_trajectories_however_the_episodes_are_scheduled(engine):
    first, again, other = (engine.play(mixed(engine, pause), seed) for pause, seed in ((0, 5), (0.001, 5), (0, 6)))
    for a, b in zip(first, again, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist() and a.logprobs.tolist() == b.logprobs.tolist()
    assert any(a.token_ids.tolist() != b.token_ids.tolist() for a, b in zip(first, other, strict=True))


def test_equal_prompts_draw_differently_and_follow_the_distribution(engine):
    played = engine.play([episode(engine, [5, 6], turns=1)] * 2000, seed=1)
    counts = torch.bincount(torch.tensor([t.token_ids[2] for t in played]), minlength=VOCAB_SIZE) / 2000
    with torch.inference_mode():
        expected = engine.model(input_ids=torch.tensor([[5, 6]])).logits[0, -1].softmax(-1)
    assert (counts - expected).abs().max() < 4 * 0.5 / 2000**0.5


def test_a_turn_ends_with_a_stop_token_or_at_its_limit(engine):
    turns = [
        t.token_ids[start:end].tolist()
        for t in engine.play(mixed(engine), seed=0)
        for kind, start, end in t.turns
        if kind == "action"
    ]
    assert all(turn[-1] in STOPS or len(turn) == 6 for turn in turns)
    assert not any(token in STOPS for turn in turns for token in turn[:-1])
    assert any(turn[-1] in STOPS for turn in turns) and any(len(turn) == 6 for turn in turns)


def test_end_of_sequence_tokens_of_the_models_own_config_end_a_turn(path):
    engine = InProcessEngine(path)
    engine._eos = frozenset(range(VOCAB_SIZE))
    [trajectory] = engine.play([episode(engine, [5, 6], turns=1)], seed=0)
    assert trajectory.num_action_tokens == 1


def test_turns_carry_the_version_of_the_weights_they_were_sampled_with(path):
    engine = InProcessEngine(path, version="1.7")
    [before] = engine.play([episode(engine, [5, 6])], seed=0)
    state = load_file(path / "model.safetensors")
    engine.load_weights({name: tensor * 0.5 for name, tensor in state.items()}, version="1.8")
    [after] = engine.play([episode(engine, [5, 6])], seed=0)
    assert (before.action_versions, after.action_versions) == ({"1.7"}, {"1.8"})
    assert before.logprobs[2] != after.logprobs[2]


@pytest.mark.parametrize("write", [write_glm4_moe, write_llama])
def test_weights_named_as_in_the_files_restore_the_model(write, tmp_path):
    engine = InProcessEngine(write(tmp_path / "model"))
    wanted = {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.zero_()
    engine.load_weights(load_file(tmp_path / "model" / "model.safetensors"), version="0.1")
    for name, tensor in engine.model.state_dict().items():
        assert torch.equal(tensor, wanted[name]), name


def test_a_missing_unknown_or_misshapen_weight_is_refused_and_changes_nothing(path):
    engine = InProcessEngine(path)
    state = load_file(path / "model.safetensors")
    before = engine.model.lm_head.weight.clone()
    changed = state | {"lm_head.weight": torch.zeros_like(before)}
    with pytest.raises(ValueError, match=r"gate_up_proj has shape \(3, "):
        engine.load_weights({n: t for n, t in changed.items() if ".experts.3.up_proj" not in n}, "0.1")
    with pytest.raises(ValueError, match=r"model\.norm\.weight is missing"):
        engine.load_weights({n: t for n, t in changed.items() if n != "model.norm.weight"}, "0.1")
    with pytest.raises(ValueError, match="no weight 'surplus'"):
        engine.load_weights(changed | {"surplus": before}, "0.1")
    assert torch.equal(engine.model.lm_head.weight, before) and engine.version == "0.0"


def test_an_episode_that_raises_ends_the_play_with_its_own_error(engine):
    async def broken() -> Trajectory:
        raise RuntimeError("the orchard burnt down")

    with pytest.raises(RuntimeError, match="burnt down"):
        engine.play([episode(engine, [5, 6]), broken], seed=0)


def test_an_episode_may_end_or_time_out_while_the_others_go_on(engine):
    async def impatient() -> str:
        try:
            async with asyncio.timeout(0):
                await episode(engine, [5, 6])()
        except TimeoutError:
            return "timed out"
        return "played"

    async def idle() -> str:
        return "never asked"

    results = engine.play([idle, impatient, episode(engine, [5, 6])], seed=0)
    assert results[:2] == ["never asked", "timed out"] and results[2].num_action_tokens > 2


def test_a_turn_that_rewrites_its_past_or_leaves_the_context_is_refused(engine):
    async def rewrite() -> None:
        await engine.generate([5, 6], SamplingConfig(), 2)
        await engine.generate([5, 7, 8, 9], SamplingConfig(), 2)

    async def overlong() -> None:
        await engine.generate([5] * 200, SamplingConfig(), 60)

    with pytest.raises(RequestRefused, match="do not continue"):
        engine.play([rewrite], seed=0)
    with pytest.raises(RequestRefused, match="context of 256"):
        engine.play([overlong], seed=0)
    with pytest.raises(RequestRefused, match="outside"):
        asyncio.run(engine.generate([5], SamplingConfig(), 1))
