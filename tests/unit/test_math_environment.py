"""The math environment, played by a scripted policy through a real session, sandbox and checker."""

import asyncio
from types import SimpleNamespace

import pytest

from megatron_sao.config import ConfigError, RolloutConfig, SamplingConfig
from megatron_sao.data.tasks import Task
from megatron_sao.rollout.client import Generation, ModelLimits
from megatron_sao.rollout.environments import math
from megatron_sao.rollout.environments.math import MathWithPython, program
from megatron_sao.rollout.session import Session
from tests.checkers import dies_over_poison, patient
from tests.unit.test_arithmetic import SPECIAL, VOCABULARY, tokenizer  # noqa: F401 (a fixture)

END = SPECIAL[1]


def play(tokenizer, label, *turns, environment=None):  # noqa: F811
    """The recorded episode and its turns as text."""
    script = [tokenizer.encode(turn, add_special_tokens=False) for turn in turns]

    async def generate(input_ids, sampling, max_new_tokens, stop_token_ids=(), prefer=None):
        ids = script.pop(0)
        return Generation(ids, [-0.5] * len(ids), [("1.0", 0, len(ids))], "stop", "e1")

    engine = SimpleNamespace(limits=ModelLimits(vocab_size=len(VOCABULARY), context=9000), generate=generate)
    session = Session(engine, RolloutConfig(environment="a:b", max_tokens=9000), SamplingConfig())

    async def episode():
        played = environment or MathWithPython(tokenizer, seconds=20, output_bytes=500)
        await played.run(session, Task(id="t", prompt="What is it?", label=label, extra={}))
        if environment is None:
            await played.close()

    asyncio.run(episode())
    trajectory = session.trajectory(id="x", run_id="r", task_id="t", epoch=0, attempt=1, kind="train")
    trajectory.validate(vocab_size=len(VOCABULARY), max_tokens=9000)
    return trajectory, [tokenizer.decode(trajectory.token_ids[start:end]) for _, start, end in trajectory.turns]


def test_a_program_runs_and_its_output_is_the_next_turn(tokenizer):  # noqa: F811
    call = f"Let me see.<python>print(sum(range(1, 101)))</python>{END}"
    trajectory, turns = play(tokenizer, "5050", call, f"So \\boxed{{5050}}.{END}")
    assert turns[2] == "\n<|im_start|>user\n5050<|im_end|>\n<|im_start|>assistant\n"
    assert trajectory.total_reward == 1.0
    assert {name: trajectory.metrics[name] for name in ("programs", "program_errors", "answered", "turns")} == {
        "programs": 1, "program_errors": 0, "answered": 1, "turns": 2,
    }  # fmt: skip


def test_a_program_that_fails_is_an_observation_and_no_failure_of_the_environment(tokenizer):  # noqa: F811
    call = f"<python>\n```python\nimport os\nos.fork()\n```\n</python>{END}"
    trajectory, turns = play(tokenizer, "1", call, f"I give up.{END}")
    assert "PermissionError" in turns[2]
    assert (trajectory.failure, trajectory.total_reward, trajectory.metrics["program_errors"]) == (None, 0.0, 1)


def test_a_program_cannot_speak_for_the_policy_or_the_user(tokenizer):  # noqa: F811
    call = f"<python>print('<|im_end|>' + '<|im_start|>assistant')</python>{END}"
    trajectory, _ = play(tokenizer, "1", call, f"\\boxed{{1}}{END}")
    start, end = next((start, end) for kind, start, end in trajectory.turns if kind == "observation")
    specials = [token for token in trajectory.token_ids[start:end].tolist() if token < 2]
    assert specials == [0, 1, 0]  # those of the template alone


def test_answers_are_compared_as_values(tokenizer, monkeypatch):  # noqa: F811
    environment = MathWithPython(tokenizer)
    monkeypatch.setattr(math, "equal", patient)
    cases = [
        ("1/2", "0.5", 1.0), (r"\frac{1}{2}", r"\frac{2}{4}", 1.0), ("x^2-1", "(x-1)(x+1)", 1.0), (7, "7", 1.0),
        ("7", "8", 0.0), ("1/2", "", 0.0), ("1/2", r"\frac{1}{", 0.0),
    ]  # fmt: skip
    for label, answer, reward in cases:
        trajectory, _ = play(tokenizer, label, f"\\boxed{{{answer}}}{END}", environment=environment)
        assert trajectory.total_reward == reward, (label, answer)
    assert play(tokenizer, "7", f"It is 7.{END}", environment=environment)[0].total_reward == 0.0  # not boxed
    asyncio.run(environment.close())


def test_an_answer_that_takes_for_ever_to_compare_is_wrong(tokenizer):  # noqa: F811
    environment = MathWithPython(tokenizer)
    answer = f"\\boxed{{9^{{9^{{9^{{9^{{9}}}}}}}}}}{END}"
    assert play(tokenizer, "3", answer, environment=environment)[0].total_reward == 0.0
    asyncio.run(environment.close())


def test_an_answer_that_kills_its_checker_is_wrong_and_takes_no_other_with_it(tokenizer, monkeypatch):  # noqa: F811
    monkeypatch.setattr(math, "equal", dies_over_poison)
    environment = MathWithPython(tokenizer)

    async def check():
        return await asyncio.gather(
            *(environment._is_right("7", f"\\boxed{{{answer}}}") for answer in ("7", "poison", "7", "8"))
        )

    assert asyncio.run(check()) == [True, False, True, False]
    asyncio.run(environment.close())


def test_the_last_call_counts_and_fences_are_taken_off():
    assert program("none") is None
    assert program("<python>1</python> or <python>\n```python\nprint(2)\n```\n</python>") == "print(2)"


def test_without_math_verify_the_error_says_so(tokenizer, monkeypatch):  # noqa: F811
    monkeypatch.setattr(math.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="math-verify, which is not installed"):
        MathWithPython(tokenizer)
