"""The study's long task: its rules by hand, its demonstrations, and the directory that make_orchard.py writes."""

from __future__ import annotations

import asyncio
import json
import random
from itertools import islice
from pathlib import Path

import pytest

from megatron_sao.config import RolloutConfig, SamplingConfig
from megatron_sao.data.tasks import Task, load_tasks
from megatron_sao.rollout.session import Session
from megatron_sao.rollout.worker import load_tokenizer
from tools.study import make_orchard
from tools.study.engine import InProcessEngine
from tools.study.orchard import (
    ALPHABET,
    STORMS,
    TURNS,
    Orchard,
    Turn,
    best,
    days,
    demonstration,
    render,
    spills,
    tempting,
    turns_of_day,
)

TREES = [("A", 7), ("b", 3), ("c", 5)]


class Characters:
    """A tokenizer with one id per character of the alphabet."""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [ALPHABET.index(character) for character in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(ALPHABET[i] for i in ids)


class ScriptedSession:
    """Plays the given actions as the policy would, and records what the environment says."""

    def __init__(self, actions: str) -> None:
        self.actions, self.metrics, self.heard, self.rewarded = list(actions), {}, [], None

    def prompt(self, ids: list[int]) -> None:
        self.heard.append(Characters().decode(ids))

    observe = prompt

    async def generate(self, max_new_tokens: int) -> list[int]:
        assert max_new_tokens == 1
        return Characters().encode(self.actions.pop(0))

    def finish(self, reward: float) -> None:
        self.rewarded = reward


async def episode(seed: int, actions: str) -> ScriptedSession:
    session = ScriptedSession(actions)
    prompt = render(turns_of_day(seed)[0], len(TURNS), whole=True)
    await Orchard(Characters()).run(session, Task("t", prompt, seed, {}))
    return session


def play(seed: int, actions: str) -> ScriptedSession:
    return asyncio.run(episode(seed, actions))


def actions_of(segments: list[tuple[str, bool]]) -> str:
    return "".join(text for text, learned in segments if learned)


def test_the_best_tree_pays_for_its_hours_and_the_tempting_one_need_not():
    assert best(TREES) == ("c", 5)  # 5 - 4 > 7 - 8
    assert best([("A", 8), ("b", 3), ("c", 2)]) == ("A", 8)  # 8 - 8 > 3 - 4
    assert tempting(TREES) == ("A", 7)


@pytest.mark.parametrize(
    ("storm", "action", "lost"),
    [
        (True, "c", False),
        (True, "A", True),
        (True, "b", True),
        (True, "7", True),
        (False, "A", False),
        (False, "7", False),
    ],
)
def test_only_a_storm_punishes_and_only_the_best_tree_escapes_it(storm, action, lost):
    assert spills(Turn(TREES, storm), action) == lost


def test_the_policy_sees_trees_turns_sky_and_basket():
    assert render(Turn(TREES, storm=False), 18, whole=True) == "A7b3c5X-o"
    assert render(Turn(TREES, storm=True), 1, whole=False) == "A7b3c5G!x"


def test_a_day_shows_near_and_far_trees_with_distinct_letters_and_is_the_same_again():
    for seed in range(50):
        day = turns_of_day(seed)
        assert day == turns_of_day(seed) and len(day) == len(TURNS) == 18
        assert sum(turn.storm for turn in day) == STORMS
        for trees, _ in day:
            assert {label.isupper() for label, _ in trees} == {True, False}
            assert len({label.lower() for label, _ in trees}) == 3
            assert all((3 <= apples <= 8) if label.isupper() else (1 <= apples <= 5) for label, apples in trees)


def test_every_character_shown_has_a_token_of_its_own():
    assert len(set(ALPHABET)) == len(ALPHABET)
    for seed in range(50):
        for number, turn in enumerate(turns_of_day(seed)):
            assert set(render(turn, number + 1, True) + render(turn, number + 1, False)) <= set(ALPHABET[1:-1])


def test_the_basket_is_shown_spilt_from_the_first_storm_on_that_was_not_met_with_the_best_tree():
    day = turns_of_day(3)
    first = next(number for number, turn in enumerate(day) if turn.storm)
    session = play(3, "7" * len(TURNS))
    assert [text[-1] for text in session.heard] == ["o"] * (first + 1) + ["x"] * (len(TURNS) - first - 1)
    assert session.rewarded == 0.0
    assert session.metrics == {"malformed": 18.0, "poor_choices": 0.0}


def test_demonstrations_without_noise_earn_the_reward_and_noise_costs_most_of_them():
    async def earned(noise: float) -> float:
        rng = random.Random(0)
        seeds = [seed for _, seed in islice(days(random.Random(1)), 200)]
        played = [await episode(seed, actions_of(demonstration(rng, seed, noise))) for seed in seeds]
        return sum(session.rewarded for session in played)

    assert asyncio.run(earned(0.0)) == 200
    assert 60 < asyncio.run(earned(0.5)) < 100  # the cold start
    assert asyncio.run(earned(1.0)) < 30


def test_a_demonstration_is_what_the_environment_would_have_said():
    segments = demonstration(random.Random(0), 7, noise=0.5)
    session = play(7, actions_of(segments))
    assert session.heard[1:] == [text for text, learned in segments if not learned]
    assert session.actions == []


def test_the_directory_holds_a_model_that_plays_and_data_with_disjoint_prompts(tmp_path, monkeypatch):
    monkeypatch.setattr(make_orchard, "DATA", make_orchard.DATA | {"train": 40, "eval": 10, "sft": 30})
    path: Path = tmp_path / "orchard"
    make_orchard.main(["--out", str(path)])
    tasks = {name: load_tasks(path / f"{name}.jsonl") for name in ("train", "eval")}
    traces = [json.loads(line) for line in (path / "sft.jsonl").read_text().splitlines()]
    prompts = [task.prompt for name in tasks for task in tasks[name]] + [trace["prompt"] for trace in traces]
    assert len(set(prompts)) == len(prompts) == 80

    engine = InProcessEngine(path)
    environment = Orchard(load_tokenizer(path))
    sessions = [Session(engine, RolloutConfig(environment="a:b", max_turns=18), SamplingConfig()) for _ in range(10)]
    engine.play(
        [lambda s=s, t=t: environment.run(s, t) for s, t in zip(sessions, tasks["eval"], strict=True)],
        seed=0,
    )
    assert all(session.finished and not session.truncated for session in sessions)
    assert all(len(session.token_ids) <= 180 < engine.limits.context for session in sessions)
