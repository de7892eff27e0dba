"""A long task with one reward at its end: bring the basket home whole.

    prompt ``A7b3c5X-o``  action ``c``  observation ``d2E8f1W!o``  action ``E``  observation ``B4a5d2V-o``  ...

Every turn shows three trees, each a label and the apples on it, then the turns left (one character of ``TURNS``), the
sky (``-`` fair, ``!`` storm) and the basket (``o`` whole, ``x`` spilt). The policy answers with the label of the tree
to pick. A tree with a small label is near and takes one hour; one with a capital label is far, takes two and tends to
carry more. The best tree is the one with most apples after the price of its hours; the tempting one has most apples.
In a storm anything but the best tree spills the basket for good, in fair weather any tree will do. The reward is 1 if
the basket is whole after 18 turns and 180 tokens, three of them in a storm.

Fifteen choices of eighteen do not matter, and which ones did shows at once, whereas the reward comes at the end: a
critic can tell the choices apart, a baseline of whole episodes gives all of them the same credit.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_sao.data.tasks import Task

if TYPE_CHECKING:
    from megatron_sao.rollout.session import Session

NEAR, FAR = "abcdef", "ABCDEF"  # labels; two trees of one turn never share a letter
TURNS = "GHIJKLMNOPQRSTUVWX"  # 1 to 18 turns left
FAIR, STORM, WHOLE, SPILT = "-!ox"
ALPHABET = (
    "_0123456789" + NEAR + FAR + TURNS + FAIR + STORM + WHOLE + SPILT + "."
)  # padding first, end last; neither is shown
STORMS = 3  # of a day, at any turns
APPLES_NEAR, APPLES_FAR = (1, 5), (3, 8)
HOUR_PRICE = 4  # apples that an hour is worth: what a far tree must offer more

Tree = tuple[str, int]  # label, apples


class Turn(NamedTuple):
    trees: list[Tree]
    storm: bool


def best(trees: list[Tree]) -> Tree:
    """The tree with most apples after the price of the hours that picking it takes."""
    return max(trees, key=lambda tree: tree[1] - HOUR_PRICE * (2 if tree[0] in FAR else 1))


def tempting(trees: list[Tree]) -> Tree:
    """The tree with most apples."""
    return max(trees, key=lambda tree: tree[1])


def turns_of_day(seed: int) -> list[Turn]:
    """Three trees for each turn of a day, near and far ones among them, and its storms: the same whatever is picked."""
    rng = random.Random(seed)
    storms = rng.sample(range(len(TURNS)), STORMS)
    day = []
    for number in range(len(TURNS)):
        far = rng.sample(range(3), rng.randint(1, 2))
        letters = rng.sample(range(len(NEAR)), 3)
        trees = [
            (FAR[letter], rng.randint(*APPLES_FAR)) if i in far else (NEAR[letter], rng.randint(*APPLES_NEAR))
            for i, letter in enumerate(letters)
        ]
        day.append(Turn(trees, number in storms))
    return day


def spills(turn: Turn, action: str) -> bool:
    """Whether the basket is lost by picking ``action``, a label or anything else."""
    return turn.storm and action != best(turn.trees)[0]


def render(turn: Turn, turns_left: int, whole: bool) -> str:
    """The text the policy sees, e.g. ``"A7b3c5X-o"``; ``turns_left`` counts this one."""
    trees = "".join(f"{label}{apples}" for label, apples in turn.trees)
    return f"{trees}{TURNS[turns_left - 1]}{STORM if turn.storm else FAIR}{WHOLE if whole else SPILT}"


def days(rng: random.Random) -> Iterator[tuple[str, int]]:
    """Endless (prompt, seed of the day)."""
    while True:
        seed = rng.randrange(2**48)
        yield render(turns_of_day(seed)[0], len(TURNS), whole=True), seed


def demonstration(rng: random.Random, seed: int, noise: float = 0.0) -> list[tuple[str, bool]]:
    """A day as (text, is it to be learned) segments after the prompt.

    Args:
        noise: per turn, the probability of the tempting tree instead of the best. Without noise the reward is earned.
    """
    day = turns_of_day(seed)
    segments: list[tuple[str, bool]] = []
    whole = True
    for number, turn in enumerate(day):
        if number:
            segments.append((render(turn, len(day) - number, whole), False))
        label, _ = tempting(turn.trees) if rng.random() < noise else best(turn.trees)
        segments.append((label, True))
        whole = whole and not spills(turn, label)
    return segments


class Orchard:
    """The environment: ``task.label`` is the seed of the day.

    Args:
        tokenizer: a Hugging Face tokenizer that gives each character of ``ALPHABET`` a token of its own.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    async def run(self, session: Session, task: Task) -> None:
        """Play one episode. Metrics: ``malformed`` turns, and ``poor_choices`` in any weather."""
        day = turns_of_day(task.label)
        session.metrics |= {"malformed": 0.0, "poor_choices": 0.0}
        session.prompt(self._encode(task.prompt))
        whole = True
        for number, turn in enumerate(day):
            if number:
                session.observe(self._encode(render(turn, len(day) - number, whole)))
            action = self._tokenizer.decode(await session.generate(max_new_tokens=1))
            shown = action in [label for label, _ in turn.trees]
            session.metrics["malformed"] += not shown
            session.metrics["poor_choices"] += shown and action != best(turn.trees)[0]
            whole = whole and not spills(turn, action)
        session.finish(float(whole))

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)
