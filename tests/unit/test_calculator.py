"""The demo's task, its demonstrations, and the model directory that tools/make_tiny_model.py writes."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
from itertools import islice
from pathlib import Path

import pytest

from megatron_sao.data.tasks import Task, load_tasks
from megatron_sao.rollout.environments import calculator as calc
from megatron_sao.rollout.environments.calculator import ERROR, Calculator, apply_call, calls, demonstration, parse
from megatron_sao.rollout.turns import Turns

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    tool().main(["--out", str(directory)])
    return directory


def tool():
    spec = importlib.util.spec_from_file_location("make_tiny_model", REPOSITORY / "tools" / "make_tiny_model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Characters:
    """A tokenizer with one id per character of the alphabet."""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [calc.ALPHABET.index(character) for character in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(calc.ALPHABET[i] for i in ids)


class ScriptedSession:
    """Plays the given turns as the policy would, and records what the environment says."""

    def __init__(self, turns: list[str]) -> None:
        self.turns, self.metrics, self.heard, self.rewarded = list(turns), {}, [], None

    def prompt(self, ids: list[int]) -> None:
        self.heard.append(Characters().decode(ids))

    observe = prompt

    async def generate(self, max_new_tokens: int | None, stop_token_ids: list[int]) -> list[int]:
        assert max_new_tokens is None and Characters().decode(stop_token_ids) == ">."
        return Characters().encode(self.turns.pop(0))

    def finish(self, reward: float, truncated: bool = False) -> None:
        self.rewarded = reward


def play(prompt: str, label: int, turns: list[str]) -> ScriptedSession:
    session = ScriptedSession(turns)
    asyncio.run(Turns(lambda: Calculator(Characters())).run(session, Task("t", prompt, label, {})))
    assert not session.turns
    return session


@pytest.mark.parametrize(
    ("prompt", "call", "observation"),
    [
        ("7+3*8-2=", "<3*8>", "7+24-2="),
        ("7+3*8-2=", "<7+3>", "10*8-2="),  # the calculator obeys a wrong plan
        ("9-(2+3)=", "<2+3>", "9-5="),  # parentheses around a lone number go
        ("2*(9-(2+3))=", "<2+3>", "2*(9-5)="),
        ("2+3*2+3=", "<2+3>", "5*2+3="),  # the first occurrence, although neither may be taken first
        ("12-3=", "<2-3>", ERROR),  # part of a number is no operand
        ("7+3=", "<3+7>", ERROR),
        ("7+3=", "7+3>", ERROR),
        ("7+3=", "<7+3>>", ERROR),
        ("7+3=", "<7+3=>", ERROR),
        ("9999+1=", "<9999+1>", ERROR),
    ],
)
def test_the_calculator_replaces_the_named_operation_or_answers_with_an_error(prompt, call, observation):
    heard, expression = apply_call(parse(prompt), call)
    assert heard == observation
    assert calc.render(expression) == (prompt if observation == ERROR else observation)


def test_negative_intermediates_can_be_calculated_with():
    _, expression = apply_call(parse("3-9-2="), "<9-2>")
    _, expression = apply_call(expression, "<3-7>")
    assert expression == [-4]
    assert apply_call([9, "-", -4, "*", -2], "<-4*-2>")[0] == "9-8="


@pytest.mark.parametrize(
    ("prompt", "sound", "harmful"),
    [
        ("7+3*8-2=", ["3*8"], ["7+3", "8-2"]),
        ("9-4-2=", ["9-4"], ["4-2"]),
        ("1+2+3=", ["1+2"], []),  # taking 2+3 first breaks associativity but not the value
        ("9-(2+3)*4=", ["2+3"], []),
        ("2+3*2+3=", ["3*2"], ["2+3"]),
    ],
)
def test_calls_that_change_the_value_are_told_from_those_that_do_not(prompt, sound, harmful):
    expression = parse(prompt)
    names = [["".join(map(str, expression[i - 1 : i + 2])) for i in found] for found in calls(expression)]
    assert names == [sound, harmful]


def test_values_agree_with_python_and_every_prompt_has_a_harmful_first_call():
    for expression, value in islice(calc.expressions(random.Random(1), (2, 4), 99), 300):
        assert eval(calc.render(expression)[:-1]) == value == calc.evaluate(expression)
        assert parse(calc.render(expression)) == expression
        assert 0 <= value <= 99 and calls(expression)[1]


def test_every_demonstration_without_noise_earns_the_reward_and_harmful_ones_do_not():
    rng = random.Random(2)
    for noise, reward in ((0.0, 1.0), (1.0, 0.0)):
        for expression, value in islice(calc.expressions(rng, (2, 3), 99), 200):
            segments = demonstration(rng, expression, noise)
            if segments is None:
                continue
            session = play(calc.render(expression), value, [text for text, trained in segments if trained])
            assert session.rewarded == reward
            assert session.heard[1:] == [text for text, trained in segments if not trained]
            assert session.metrics == {"malformed_calls": 0.0, "planned_wrong": noise}


def test_slips_are_shown_with_their_error_and_never_learned():
    slips = 0
    for expression, value in islice(calc.expressions(random.Random(3), (2, 3), 99), 100):
        segments = demonstration(random.Random(value), expression, slips=0.5)
        if segments is None:
            continue
        session = play(calc.render(expression), value, [text for text, _ in segments if text[0] in "<A"])
        assert session.rewarded == 1
        assert session.heard[1:] == [text for text, _ in segments if text[0] not in "<A"]
        learned = {text for text, trained in segments if trained}
        shown = [segments[n - 1] for n, (text, _) in enumerate(segments) if text == ERROR]
        assert all(not trained and slip not in learned for slip, trained in shown)
        slips += len(shown)
    assert slips > 30


def test_a_malformed_call_is_counted_and_the_episode_goes_on():
    session = play("7+3=", 10, ["<3+7>", "<7+3>", "A10."])
    assert session.heard == ["7+3=", ERROR, "10="]
    assert session.metrics["malformed_calls"] == 1 and session.rewarded == 1


@pytest.mark.parametrize("answer", ["A11.", "10.", "A10>.", "A1 0.", "A.", "A+10.", "<7+3>A10."])
def test_only_the_exact_answer_is_rewarded(answer):
    if " " in answer:
        assert calc.answer(answer) is None
    else:
        assert play("7+3=", 10, [answer]).rewarded == 0


def test_train_eval_and_demonstration_prompts_are_disjoint(tiny):
    train, held_out = load_tasks(tiny / "train.jsonl"), load_tasks(tiny / "eval.jsonl")
    traces = [json.loads(line) for line in (tiny / "sft.jsonl").read_text().splitlines()]
    prompts = [{task.prompt for task in train}, {task.prompt for task in held_out}, {t["prompt"] for t in traces}]
    assert len(train) == 8192 and len(held_out) == 512 and len(traces) > 19000
    assert sum(map(len, prompts)) == len(set().union(*prompts))
    assert all(task.label == calc.evaluate(parse(task.prompt)) for task in held_out)


def test_the_tokenizer_gives_each_character_its_id_and_loses_nothing(tiny):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    assert tokenizer.encode(calc.ALPHABET, add_special_tokens=False) == list(range(len(calc.ALPHABET)))
    for text in ("7+3*8-2=", "<-4*-2>", "A-12.", ERROR, "<<==.._"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == Characters().encode(text) and tokenizer.decode(ids) == text
    assert len(tokenizer) == json.loads((tiny / "config.json").read_text())["vocab_size"]
    with pytest.raises(Exception, match="UNK"):
        tokenizer.encode("x")


def test_the_model_is_a_glm4_moe_that_transformers_loads(tiny):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny)
    assert type(model).__name__ == "Glm4MoeForCausalLM" and model.dtype == torch.float32
    kinds = [type(layer.mlp).__name__ for layer in model.model.layers]
    assert kinds == ["Glm4MoeMLP", "Glm4MoeMoE"]
    assert torch.isfinite(model(torch.arange(20)[None]).logits).all()


def test_making_the_model_again_changes_nothing_and_another_seed_does(tiny, tmp_path):
    weights = tiny / "model.safetensors"
    before = weights.stat().st_mtime_ns
    tool().main(["--out", str(tiny)])
    assert weights.stat().st_mtime_ns == before
    tool().write_model(tmp_path, seed=1)
    assert (tmp_path / "model.safetensors").read_bytes() != weights.read_bytes()
