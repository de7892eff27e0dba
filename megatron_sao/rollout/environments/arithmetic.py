"""Arithmetic with a calculator tool, through the model's chat template: the task of the SmolLM2 recipe.

    user ``What is 84 - 49?``  action ``<calc>84-49</calc>``  tool ``35``  action ``35``

The system message names the tool and one worked example shows it. A turn with a call in it is answered by the
calculator, one without is the final answer: the reward is 1 if its last number is the label, else 0, whether the
calculator was asked or not. Tokens the policy sampled stay as they are; only the markup between turns is encoded.
"""

from __future__ import annotations

import operator
import random
import re
from typing import TYPE_CHECKING, Any

from megatron_sao.rollout.environments.chat import ChatMarkup

if TYPE_CHECKING:
    from megatron_sao.data.tasks import Task
    from megatron_sao.rollout.session import Session

SYSTEM = "Calculator"
EXAMPLES = ((40, "-", 17), (6, "*", 12), (36, "+", 52))
MALFORMED = "error"  # the observation after a call that is no calculation
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_CALL = re.compile(r"<calc>\s*(-?\d{1,4})\s*([-+*])\s*(-?\d{1,4})\s*</calc>", re.ASCII)
_NUMBER = re.compile(r"(?:(?<!\d)-)?\d+", re.ASCII)  # the minus of "50-49" is no sign


def question(left: int, symbol: str, right: int) -> str:
    return f"What is {left} {symbol} {right}?"


def calculator(turn: str) -> str | None:
    """What the calculator says to a turn: the value of its first call, ``MALFORMED``, or None if nothing is called."""
    if "<calc>" not in turn:
        return None
    call = _CALL.search(turn)
    return str(OPERATORS[call[2]](int(call[1]), int(call[3]))) if call else MALFORMED


def final_answer(turn: str) -> int | None:
    """The last number of a turn, or None."""
    numbers = _NUMBER.findall(turn)
    return int(numbers[-1]) if numbers else None


def tasks(seed: int, num_train: int, num_eval: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Disjoint (train, eval) tasks ``{"prompt", "label"}``; each operator is equally frequent.

    Operands are 1 to 99; a product has one factor below 10.
    """
    rng = random.Random(seed)
    drawn: dict[str, int] = {}
    while len(drawn) < num_train + num_eval:
        symbol = rng.choice(list(OPERATORS))
        left, right = rng.randint(1, 99), rng.randint(1, 9 if symbol == "*" else 99)
        drawn[question(left, symbol, right)] = OPERATORS[symbol](left, right)
    records = [{"prompt": prompt, "label": label} for prompt, label in drawn.items()]
    return records[:num_train], records[num_train:]


class Arithmetic:
    """The environment: ``task.prompt`` is the question as text, ``task.label`` its value as an integer.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template in which an assistant's turn ends with its
            end-of-sequence token.
        examples: worked examples in the prompt, 0 to 3; each costs about 45 tokens and makes the task easier.
    """

    def __init__(self, tokenizer: Any, examples: int = 1) -> None:
        if not 0 <= examples <= len(EXAMPLES):
            raise ValueError(f"examples={examples}: write a number from 0 to {len(EXAMPLES)}")
        self._chat = ChatMarkup(tokenizer, "tool")
        self._preamble: list[dict[str, str]] = [{"role": "system", "content": SYSTEM}]
        for left, symbol, right in EXAMPLES[:examples]:
            value = str(OPERATORS[symbol](left, right))
            self._preamble += [
                {"role": "user", "content": question(left, symbol, right)},
                {"role": "assistant", "content": f"<calc>{left}{symbol}{right}</calc>"},
                {"role": "tool", "content": value},
                {"role": "assistant", "content": value},
            ]

    async def run(self, session: Session, task: Task) -> None:
        """Play one episode. Session metrics: ``calls`` and ``malformed_calls``."""
        session.metrics |= {"calls": 0.0, "malformed_calls": 0.0}
        messages = [*self._preamble, {"role": "user", "content": task.prompt}]
        session.prompt(self._chat.encode(self._chat.render(messages)))
        while True:
            action = await session.generate(stop_token_ids=[self._chat.end])
            turn = self._chat.read(action)
            observation = calculator(turn)
            if observation is None:
                session.finish(float(final_answer(turn) == task.label))
                return
            session.metrics["calls"] += 1
            session.metrics["malformed_calls"] += observation == MALFORMED
            session.observe(self._chat.observation(action, observation))
