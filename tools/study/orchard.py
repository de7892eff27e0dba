"""A long task with one reward at its end: fill a basket before the day is over.

    prompt ``A7b3c5J85``  action ``c``  observation ``d2E8f1I80``  action ``E``  observation ``B4a5d2G72``  ...

Every turn shows three trees, each a label and the apples on it, then the hours left (one character of ``HOURS``) and
the apples still needed (two digits). The policy answers with the label of the tree to pick. A tree with a small label
is near and takes one hour; one with a capital label is far, takes two and tends to carry more. The reward is 1 as soon
as the basket is full and 0 when the hours have run out: about 18 turns and 180 tokens.

The tempting tree is the one with most apples, whatever the way; what the hours were worth shows only at the end. No
choice decides and each matters a little, but hours and need tell at any time how likely the reward is. So a critic can
tell the choices apart, whereas a baseline of whole episodes gives all of them the same credit. For this the reward has
a threshold: a sum of apples would itself be a fair credit of single choices, and leave the critic little to find out.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_sao.data.tasks import Task

if TYPE_CHECKING:
    from megatron_sao.rollout.session import Session

NEAR, FAR = "abcdef", "ABCDEF"  # labels; two trees of one turn never share a letter
HOURS = "ghijklmnopqrstuvwxyzGHIJ"  # 1 to 24 hours left
ALPHABET = "_0123456789" + NEAR + FAR + HOURS + "."  # padding first, end of sequence last; neither is ever shown
APPLES_NEAR, APPLES_FAR = (1, 5), (3, 8)
HOUR_PRICE = 4  # apples that a good picker gets per hour: what a far tree must offer more
TARGET_SHARE = 0.93  # of what the good picker brings home

Tree = tuple[str, int]  # label, apples


class Moment(NamedTuple):
    """Where an episode stands. It is over when the basket is full (``needed`` is 0) or no hour is left."""

    hours: int
    needed: int

    @property
    def over(self) -> bool:
        return not self.hours or not self.needed


def cost(tree: Tree) -> int:
    """Hours that picking the tree takes."""
    return 2 if tree[0] in FAR else 1


def trees_of_day(seed: int) -> list[list[Tree]]:
    """Three trees for each turn of a day, near and far ones among them: the same whatever is picked."""
    rng = random.Random(seed)
    day = []
    for _ in HOURS:
        far = rng.sample(range(3), rng.randint(1, 2))
        letters = rng.sample(range(len(NEAR)), 3)
        day.append(
            [
                (FAR[letter], rng.randint(*APPLES_FAR)) if i in far else (NEAR[letter], rng.randint(*APPLES_NEAR))
                for i, letter in enumerate(letters)
            ]
        )
    return day


def best(trees: list[Tree], hours: int) -> Tree:
    """The tree a good picker takes: most apples after the price of its hours, if it can be reached in time."""
    return max((tree for tree in trees if cost(tree) <= hours), key=lambda tree: tree[1] - HOUR_PRICE * cost(tree))


def tempting(trees: list[Tree]) -> Tree:
    """The tree with most apples."""
    return max(trees, key=lambda tree: tree[1])


def pick(moment: Moment, trees: list[Tree], action: str) -> Moment:
    """What an action leads to. No such label costs an hour for nothing, and so does a tree too far for the evening."""
    tree = next((tree for tree in trees if tree[0] == action), None)
    if tree is None or cost(tree) > moment.hours:
        return moment._replace(hours=moment.hours - 1)
    return Moment(moment.hours - cost(tree), max(0, moment.needed - tree[1]))


def start_of_day(day: list[list[Tree]]) -> Moment:
    """All hours, and a share of what the good picker brings home as the target; below 100, to have two digits."""
    hours, total = len(HOURS), 0
    for trees in day:
        if hours:
            tree = best(trees, hours)
            hours, total = hours - cost(tree), total + tree[1]
    return Moment(len(HOURS), min(99, round(TARGET_SHARE * total)))


def render(trees: list[Tree], moment: Moment) -> str:
    """The text the policy sees, e.g. ``"A7b3c5J85"``."""
    return "".join(f"{label}{apples}" for label, apples in trees) + f"{HOURS[moment.hours - 1]}{moment.needed:02d}"


def days(rng: random.Random) -> Iterator[tuple[str, int]]:
    """Endless (prompt, seed of the day)."""
    while True:
        seed = rng.randrange(2**48)
        day = trees_of_day(seed)
        yield render(day[0], start_of_day(day)), seed


def demonstration(rng: random.Random, seed: int, noise: float = 0.0) -> list[tuple[str, bool]]:
    """A day as (text, is it to be learned) segments after the prompt.

    Args:
        noise: per turn, the probability of the tempting tree instead of the best. Without noise the reward is earned.
    """
    day = trees_of_day(seed)
    moment = start_of_day(day)
    segments: list[tuple[str, bool]] = []
    for turn, trees in enumerate(day):
        label, _ = tempting(trees) if rng.random() < noise else best(trees, moment.hours)
        moment = pick(moment, trees, label)
        segments.append((label, True))
        if moment.over:
            break
        segments.append((render(day[turn + 1], moment), False))
    return segments


class Orchard:
    """The environment: ``task.label`` is the seed of the day.

    Args:
        tokenizer: a Hugging Face tokenizer that gives each character of ``ALPHABET`` a token of its own.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    async def run(self, session: Session, task: Task) -> None:
        """Play one episode. Metrics: ``malformed`` turns, ``poor_choices``, and apples ``missing`` in the end."""
        day = trees_of_day(task.label)
        moment = start_of_day(day)
        session.metrics |= {"malformed": 0.0, "poor_choices": 0.0}
        session.prompt(self._encode(task.prompt))
        for turn, trees in enumerate(day):
            action = self._tokenizer.decode(await session.generate(max_new_tokens=1))
            shown = [label for label, _ in trees]
            session.metrics["malformed"] += action not in shown
            session.metrics["poor_choices"] += action in shown and action != best(trees, moment.hours)[0]
            moment = pick(moment, trees, action)
            if moment.over:
                break
            session.observe(self._encode(render(day[turn + 1], moment)))
        session.metrics["missing"] = float(moment.needed)
        session.finish(float(not moment.needed))

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)
