"""Plays an environment by turns on a session."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from megatron_sao.data.tasks import Task
from megatron_sao.rollout.environment import EnvironmentFailure, TurnEnvironment
from megatron_sao.rollout.session import Session

CLOSE_SECONDS = 10.0  # an episode that does not close in time is a failure of its environment


class Turns:
    """An :class:`~megatron_sao.rollout.environment.Environment`.

    Args:
        make: an environment for one episode.
    """

    def __init__(self, make: Callable[[], TurnEnvironment]) -> None:
        self._make = make

    async def run(self, session: Session, task: Task) -> None:
        environment = self._make()
        try:
            session.prompt(await environment.reset(task))
            session.metrics |= metrics_of(environment)
            while True:
                action = await session.generate(**options_of(environment))
                seen = await environment.act(action)
                session.metrics |= metrics_of(environment)
                if seen.failure is not None:
                    raise EnvironmentFailure(seen.failure)
                if seen.done:
                    session.finish(seen.reward)
                    return
                if seen.reward:
                    session.reward(seen.reward)
                session.observe(seen.token_ids)
        finally:
            async with asyncio.timeout(CLOSE_SECONDS):
                await environment.close()


def options_of(environment: TurnEnvironment) -> dict[str, Any]:
    """What the environment asks of the policy's next turn: the arguments of :meth:`Session.generate`."""
    return {
        "max_new_tokens": getattr(environment, "max_new_tokens", None),
        "stop_token_ids": list(getattr(environment, "stop_token_ids", ())),
    }


def metrics_of(environment: TurnEnvironment) -> dict[str, float]:
    return dict(getattr(environment, "metrics", {}))
