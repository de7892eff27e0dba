"""The arithmetic environment, played by a scripted policy through a real session and a ChatML tokenizer."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_sao.config import RolloutConfig, SamplingConfig
from megatron_sao.data.tasks import Task
from megatron_sao.data.trajectory import Trajectory
from megatron_sao.rollout.client import Generation, ModelLimits
from megatron_sao.rollout.environments.arithmetic import Arithmetic, calculator, final_answer, tasks
from megatron_sao.rollout.session import BudgetExceeded, Session

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>"]
CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]
VOCABULARY = [*SPECIAL, *CHARACTERS, "19"]  # text never encodes to the last one, but the policy may sample it


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    characters = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters, bos_token=SPECIAL[0], eos_token=SPECIAL[1], chat_template=CHATML
    )


def play(tokenizer: PreTrainedTokenizerFast, *turns: list[int], **arguments) -> tuple[Trajectory, list[str]]:
    """The recorded episode of "What is 12 + 7?" and its turns as text."""
    script = list(turns)

    async def generate(input_ids, sampling, max_new_tokens, stop_token_ids=(), prefer=None) -> Generation:
        assert list(stop_token_ids) == [tokenizer.eos_token_id]
        ids = script.pop(0)
        return Generation(ids, [-0.5] * len(ids), [("1.0", 0, len(ids))], "stop", "e1")

    engine = SimpleNamespace(limits=ModelLimits(vocab_size=len(VOCABULARY), context=2000), generate=generate)
    session = Session(engine, RolloutConfig(environment="a:b", max_turns=3), SamplingConfig())
    task = Task(id="t", prompt="What is 12 + 7?", label=19, extra={})
    try:
        asyncio.run(Arithmetic(tokenizer, **arguments).run(session, task))
    except BudgetExceeded:
        session.finish(truncated=True)
    trajectory = session.trajectory(id="x", run_id="r", task_id="t", epoch=0, attempt=1, kind="train")
    trajectory.validate(vocab_size=len(VOCABULARY), max_tokens=2000)
    return trajectory, [tokenizer.decode(trajectory.token_ids[start:end]) for _, start, end in trajectory.turns]


def ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def test_a_right_call_and_answer_earn_the_reward_and_read_like_the_chat_template(tokenizer) -> None:
    trajectory, turns = play(
        tokenizer, ids(tokenizer, "<calc>12+7</calc><|im_end|>"), ids(tokenizer, "19<|im_end|>"), examples=0
    )
    assert trajectory.total_reward == 1.0 and trajectory.metrics["calls"] == 1
    assert turns[2] == "\n<|im_start|>tool\n19<|im_end|>\n<|im_start|>assistant\n"
    messages = [
        {"role": "system", "content": "Calculator"},
        {"role": "user", "content": "What is 12 + 7?"},
        {"role": "assistant", "content": "<calc>12+7</calc>"},
        {"role": "tool", "content": "19"},
        {"role": "assistant", "content": "19"},
    ]
    assert "".join(turns) + "\n" == tokenizer.apply_chat_template(messages, tokenize=False)


def test_sampled_tokens_are_never_tokenised_again(tokenizer) -> None:
    unusual = [VOCABULARY.index("19"), tokenizer.eos_token_id]
    trajectory, _ = play(tokenizer, ids(tokenizer, "<calc>12+7</calc><|im_end|>"), unusual)
    assert trajectory.token_ids[-2:].tolist() == unusual and trajectory.total_reward == 1.0


def test_a_turn_cut_short_is_closed_by_an_observation_that_carries_no_loss(tokenizer) -> None:
    cut = ids(tokenizer, "<calc>12+7</calc> an")
    trajectory, turns = play(tokenizer, cut, ids(tokenizer, "19<|im_end|>"))
    assert turns[2].startswith("<|im_end|>\n<|im_start|>tool\n19<|im_end|>")
    assert trajectory.num_action_tokens == len(cut) + 3


@pytest.mark.parametrize(
    ("answer", "reward"), [("12 + 7 = 19.", 1.0), ("19, or rather 20", 0.0), ("-19", 0.0), ("no idea", 0.0)]
)
def test_an_answer_without_a_call_counts_by_its_last_number(tokenizer, answer: str, reward: float) -> None:
    trajectory, turns = play(tokenizer, ids(tokenizer, answer + "<|im_end|>"))
    assert trajectory.total_reward == reward and len(turns) == 2 and trajectory.metrics["calls"] == 0


def test_a_malformed_call_gets_an_error_and_may_be_repaired(tokenizer) -> None:
    trajectory, turns = play(
        tokenizer,
        ids(tokenizer, "<calc>twelve<|im_end|>"),
        ids(tokenizer, "<calc>12+7</calc><|im_end|>"),
        ids(tokenizer, "19<|im_end|>"),
    )
    assert "error" in turns[2] and trajectory.total_reward == 1.0 and trajectory.metrics["malformed_calls"] == 1


def test_calling_for_ever_runs_into_the_turn_limit_without_reward(tokenizer) -> None:
    trajectory, _ = play(tokenizer, *[ids(tokenizer, "<calc>1+1</calc><|im_end|>")] * 3)
    assert trajectory.truncated and trajectory.total_reward == 0.0


def test_the_calculator_takes_the_first_call_and_nothing_but_one_operation() -> None:
    assert calculator("<calc> 09 * -3 </calc> <calc>1+1</calc>") == "-27"
    assert calculator("12 + 7 = 19") is None
    for malformed in ("<calc>1+2+3</calc>", "<calc>12345*1</calc>", "<calc>1+2", "<calc>x</calc>", "<calc>٣+1</calc>"):
        assert calculator(malformed) == "error"
    assert final_answer("49 - 50 is -1.") == -1 and final_answer("50-49") == 49 and final_answer("") is None


def test_tasks_are_disjoint_right_and_reproducible() -> None:
    train, evaluation = tasks(seed=3, num_train=300, num_eval=100)
    assert (len(train), len(evaluation)) == (300, 100)
    assert not {task["prompt"] for task in train} & {task["prompt"] for task in evaluation}
    for task in train + evaluation:
        assert task["label"] == eval(task["prompt"].removeprefix("What is ").removesuffix("?"))
    for symbol in "+-*":
        assert 60 < sum(f" {symbol} " in task["prompt"] for task in train) < 140
    assert (train, evaluation) == tasks(seed=3, num_train=300, num_eval=100)


def test_a_chat_template_that_cannot_carry_a_tool_is_refused(tokenizer) -> None:
    template, tokenizer.chat_template = tokenizer.chat_template, "{{ messages[0]['content'] }}"
    try:
        with pytest.raises(ValueError, match="chat template"):
            Arithmetic(tokenizer)
    finally:
        tokenizer.chat_template = template


def test_the_number_of_examples_is_bounded(tokenizer) -> None:
    with pytest.raises(ValueError, match="examples=4"):
        Arithmetic(tokenizer, examples=4)
