"""A multi-turn calculator agent: the demo's task.

    prompt ``9-2*3=``  action ``<2*3>``  observation ``9-6=``  action ``<9-6>``  observation ``3=``  action ``A3.``

The policy names one binary operation per turn; the calculator replaces its first occurrence in the expression by its
value and shows the new expression. The calculator obeys whatever it is told, so precedence, associativity and
parentheses are the policy's to plan: ``<9-2>`` above would leave ``7*3=``. The reward is 1 for the right final answer.

Expressions are token lists such as ``[9, "-", 2, "*", 3]``; numbers in them may be negative.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_sao.data.tasks import Task
from megatron_sao.rollout.environment import Observation

ALPHABET = "_0123456789+-*()=<>;A.E"  # the first is padding
CALL_END, ANSWER_END = ">", "."
ERROR = "E;"  # the observation after a malformed call
LARGEST_RESULT = 9999
_PRECEDENCE = {"+": 1, "-": 1, "*": 2}
_CALL = re.compile(r"<(-?\d+)([-+*])(-?\d+)>", re.ASCII)
_ANSWER = re.compile(r"A(-?\d+)\.", re.ASCII)

Expression = list[int | str]


def parse(text: str) -> Expression:
    """The tokens of a prompt such as ``"9-(2+3)="``. Raises ValueError for any other character."""
    if not re.fullmatch(r"[-+*()0-9]+=", text):
        raise ValueError(f"prompt {text!r} is no expression; write digits, + - * ( ) and a final =")
    return [int(token) if token.isdigit() else token for token in re.findall(r"\d+|[-+*()]", text)]


def render(expression: Expression) -> str:
    """The text the policy sees, e.g. ``"9-(2+3)="``."""
    return "".join(map(str, expression)) + "="


def operate(left: int, operator: str, right: int) -> int:
    return left + right if operator == "+" else left - right if operator == "-" else left * right


def is_sound(expression: Expression, i: int) -> bool:
    """Whether precedence, associativity and parentheses allow the operator at ``i`` to be evaluated first."""
    before = expression[i - 2] if i >= 2 else "("
    after = expression[i + 2] if i + 2 < len(expression) else ")"
    binds_left = before == "(" or (_PRECEDENCE[before] < _PRECEDENCE[expression[i]])
    return binds_left and (after == ")" or _PRECEDENCE[after] <= _PRECEDENCE[expression[i]])


def evaluate(expression: Expression) -> int:
    """The value of an expression."""
    while len(expression) > 1:
        expression = reduce_at(expression, next(i for i in _operations(expression) if is_sound(expression, i)))
    return expression[0]


def calls(expression: Expression) -> tuple[list[int], list[int]]:
    """Operator positions the calculator would act on, as (sound, harmful): a harmful one changes the value.

    Only first occurrences count, because those are what the calculator replaces. Calls that break a rule without
    changing the value, as in ``1+2+3=``, are in neither list.
    """
    positions = list(_operations(expression))
    operations = [expression[i - 1 : i + 2] for i in positions]
    first = [i for n, i in enumerate(positions) if operations[n] not in operations[:n]]
    value = evaluate(expression)
    sound = [i for i in first if is_sound(expression, i)]
    return sound, [i for i in first if i not in sound and evaluate(reduce_at(expression, i)) != value]


def _operations(expression: Expression) -> Iterator[int]:
    """Positions of operators between two numbers."""
    for i in range(1, len(expression) - 1):
        if expression[i] in _PRECEDENCE and isinstance(expression[i - 1], int) and isinstance(expression[i + 1], int):
            yield i


def reduce_at(expression: Expression, i: int) -> Expression:
    """Replace the operation around position ``i`` by its value, and drop parentheses around a lone number."""
    out = [*expression[: i - 1], operate(*expression[i - 1 : i + 2]), *expression[i + 2 :]]
    if 1 < i < len(out) and out[i - 2] == "(" and out[i] == ")":
        out[i - 2 : i + 1] = [out[i - 1]]
    return out


def apply_call(expression: Expression, action: str) -> tuple[str, Expression]:
    """Let the calculator act on the text of a turn. Returns (observation, new expression).

    Anything but ``<number operator number>`` with an operation that stands in the expression, and a result of at most
    ``LARGEST_RESULT``, is answered by ``ERROR`` and changes nothing.
    """
    match = _CALL.fullmatch(action)
    if match is None:
        return ERROR, expression
    operation = [int(match[1]), match[2], int(match[3])]
    i = next((i for i in _operations(expression) if expression[i - 1 : i + 2] == operation), None)
    if i is None or abs(operate(*operation)) > LARGEST_RESULT:
        return ERROR, expression
    reduced = reduce_at(expression, i)
    return render(reduced), reduced


def answer(action: str) -> int | None:
    """The number in ``A<number>.``, or None if the turn is no answer."""
    match = _ANSWER.fullmatch(action)
    return int(match[1]) if match else None


def expressions(rng: random.Random, operations: tuple[int, int], largest: int) -> Iterator[tuple[Expression, int]]:
    """Endless (expression, value) pairs on which planning matters: some possible first call is harmful.

    Args:
        operations: fewest and most operations of one expression.
        largest: every intermediate value of the sound evaluation is in [0, largest].
    """
    while True:
        count = rng.randint(*operations)
        # Distinct operands: a small model can then copy an operation by looking up what followed its first digit.
        operands = rng.sample(range(1, 10), count + 1)
        built = _build(rng, count, operands, largest)
        if built is not None:
            expression, _, value = built
            if all(calls(expression)):
                yield expression, value


def _build(rng: random.Random, count: int, operands: list[int], largest: int) -> tuple[Expression, int, int] | None:
    """(expression, precedence of its outermost operator, value) with minimal parentheses; None if out of range."""
    if count == 0:
        value = operands.pop()
        return [value], 3, value
    split = rng.randint(0, count - 1)
    left = _build(rng, split, operands, largest)
    right = _build(rng, count - 1 - split, operands, largest)
    if left is None or right is None:
        return None
    operator = rng.choice("+-*")
    precedence, value = _PRECEDENCE[operator], operate(left[2], operator, right[2])
    if not 0 <= value <= largest:
        return None
    left_part = left[0] if left[1] >= precedence else ["(", *left[0], ")"]
    right_part = right[0] if right[1] > precedence else ["(", *right[0], ")"]
    return [*left_part, operator, *right_part], precedence, value


def demonstration(
    rng: random.Random, expression: Expression, noise: float = 0.0, slips: float = 0.0
) -> list[tuple[str, bool]] | None:
    """One trace as (text, is it to be learned) segments; None if the calculator refuses or no sound call is left.

    Args:
        noise: per turn, the probability of a harmful call where one is possible. Without noise the trace earns the
            reward; after a harmful call it goes on as if nothing had happened and ends in a wrong answer.
        slips: per turn, the probability of a malformed call before the proper one. It is not to be learned: it shows
            the error observation, so that the policy learns to go on after its own slips.
    """
    segments: list[tuple[str, bool]] = []
    while len(expression) > 1:
        sound, harmful = calls(expression)
        choices = harmful if harmful and rng.random() < noise else sound[:1]
        if not choices:
            return None
        if rng.random() < slips:
            numbers = [token for token in expression if isinstance(token, int)]
            slip = f"<{rng.choice(numbers)}{rng.choice('+-*')}{rng.choice(numbers)}>"
            if apply_call(expression, slip)[0] == ERROR:
                segments += [(slip, False), (ERROR, False)]
        i = rng.choice(choices)
        action = f"<{''.join(map(str, expression[i - 1 : i + 2]))}>"
        observation, expression = apply_call(expression, action)
        if observation == ERROR:
            return None
        segments += [(action, True), (observation, False)]
    return [*segments, (f"A{expression[0]}.", True)]


class Calculator:
    """The environment, by turns: prompts are expressions, ``task.label`` is the value as an integer.

    Args:
        tokenizer: a Hugging Face tokenizer that gives each character of ``ALPHABET`` a token of its own.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.stop_token_ids = self._encode(CALL_END + ANSWER_END)
        self.metrics = {"malformed_calls": 0.0, "planned_wrong": 0.0}  # the latter: a call changed the value

    async def reset(self, task: Task) -> list[int]:
        self._label, self._expression = task.label, parse(task.prompt)
        return self._encode(task.prompt)

    async def act(self, token_ids: Sequence[int]) -> Observation:
        action = self._tokenizer.decode(token_ids)
        if action.endswith(ANSWER_END):
            return Observation(reward=float(answer(action) == self._label), done=True)
        observation, self._expression = apply_call(self._expression, action)
        self.metrics["malformed_calls"] += observation == ERROR
        self.metrics["planned_wrong"] = float(evaluate(self._expression) != self._label)
        return Observation(self._encode(observation))

    async def close(self) -> None: ...

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)
