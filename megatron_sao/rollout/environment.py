"""What an environment is: code that plays episodes in token ids. It comes in two forms.

* **By turns** (:class:`TurnEnvironment`): ``reset``, ``act`` on what the policy sampled, ``close``; one object per
  episode.
* **In full control** (:class:`Environment`): ``run`` gets the :class:`~megatron_sao.rollout.session.Session` and drives
  the policy itself; one object per process.

:mod:`megatron_sao.rollout.turns` plays the first through the second, so everything else knows only ``run``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from megatron_sao.data.tasks import Task

if TYPE_CHECKING:
    from megatron_sao.rollout.session import Session


class EnvironmentFailure(Exception):
    """The environment itself broke (a sandbox crashed, a service timed out): no fault of the policy.

    The trajectory is excluded from training with this reason. A failure of the *policy*'s own (a malformed
    call, a wrong answer) is a reward or an observation, never this exception.
    """


@dataclass(frozen=True)
class Observation:
    """What the environment answers to one action.

    Args:
        token_ids: what the policy sees next; not used with ``done``.
        reward: for this action; it sits on the action's last token.
        done: the episode is over.
        failure: why the environment broke; as raising EnvironmentFailure.
    """

    token_ids: Sequence[int] = ()
    reward: float = 0.0
    done: bool = False
    failure: str | None = None


class TurnEnvironment(Protocol):
    """One episode. Constructed for it as ``Class(tokenizer, **rollout.environment_args)``, and closed however it ends.

    Attributes that it may have, looked at before every turn of the policy:

    * ``stop_token_ids``: end the turn, besides the end-of-sequence tokens of the model's own config.
    * ``max_new_tokens``: of the turn, less than ``rollout.max_tokens_per_turn``.
    * ``metrics``: figures of the episode so far, by name; they become ``env/NAME``.
    """

    async def reset(self, task: Task) -> Sequence[int]:
        """Begin, once. Returns the prompt."""
        ...

    async def act(self, token_ids: Sequence[int]) -> Observation:
        """Take what the policy sampled, the stop token included."""
        ...

    async def close(self) -> None:
        """Give back what the episode holds."""
        ...


class Environment(Protocol):
    """Constructed once per process as ``Class(tokenizer, **rollout.environment_args)``; it serves many episodes at
    once, so ``run`` keeps the state of its own in local variables. Where there is an ``async def close(self)``, it is
    awaited when the process ends."""

    async def run(self, session: Session, task: Task) -> None:
        """Play one episode: ``session.prompt``, then ``generate`` / ``observe`` in turn, then ``finish``."""
        ...


class Reward(Protocol):
    """``rollout.reward``: replaces whatever the environment paid by one terminal reward."""

    def __call__(self, task: Task, transcript: list[tuple[str, str]]) -> float:
        """``transcript`` holds the turns as (kind, text), kind being "prompt", "action" or "observation"."""
        ...
