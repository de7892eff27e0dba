"""What an environment is, and how one is found by import path.

An environment plays episodes: it encodes the task into prompt tokens, lets the policy act through the
:class:`~megatron_sao.rollout.session.Session`, answers with observation tokens and pays the reward.
One object serves many episodes at once, so ``run`` keeps the state of its episode in local variables.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Protocol

from megatron_sao.config import ConfigError
from megatron_sao.data.tasks import Task

if TYPE_CHECKING:
    from megatron_sao.rollout.session import Session


class EnvironmentFailure(Exception):
    """The environment itself broke (a sandbox crashed, a service timed out): no fault of the policy.

    The trajectory is excluded from training with this reason. A failure of the *policy*'s own (a malformed
    call, a wrong answer) is a reward, never this exception.
    """


class Environment(Protocol):
    """Constructed once per process as ``Class(tokenizer, **rollout.environment_args)``. Where there is an
    ``async def close(self)``, it is awaited when the process ends."""

    def __init__(self, tokenizer: Any, **arguments: Any) -> None: ...

    async def run(self, session: Session, task: Task) -> None:
        """Play one episode: ``session.prompt``, then ``generate`` / ``observe`` in turn, then ``finish``."""
        ...


class Reward(Protocol):
    """``rollout.reward``: replaces whatever the environment paid by one terminal reward."""

    def __call__(self, task: Task, transcript: list[tuple[str, str]]) -> float:
        """``transcript`` holds the turns as (kind, text), kind being "prompt", "action" or "observation"."""
        ...


def load_object(path: str, field: str) -> Any:
    """The object a config field names as ``package.module:name``, or by the name of an entry point.

    Args:
        path: modules beside the user's cwd count. Entry points are those that installed packages declare in the group
            ``megatron_sao.environment`` or ``megatron_sao.reward``, the end of ``field``.

    Raises:
        ConfigError: malformed path, no such module, no such name in it, or no such entry point.
    """
    module_name, separator, name = path.partition(":")
    if not separator:
        group = entry_points(group=f"megatron_sao.{field.rpartition('.')[2]}")
        if path in group.names:
            return group[path].load()
        known = f"; installed packages declare {', '.join(sorted(group.names))}" if group.names else ""
        raise ConfigError(f"{field} = {path!r} is not an import path; write package.module:name{known}")
    if not module_name or not name:
        raise ConfigError(f"{field} = {path!r} is not an import path; write package.module:name")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{field} = {path!r}: no module named {error.name!r}; install it or start from the directory that holds it"
        ) from error
    if not hasattr(module, name):
        raise ConfigError(f"{field} = {path!r}: {module.__file__} defines no {name!r}")
    return getattr(module, name)
