"""Finds the environment and the reward that a config names, by import path or by entry point."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import entry_points
from typing import Any

from megatron_sao.config import ConfigError, RolloutConfig
from megatron_sao.rollout.environment import Environment, TurnEnvironment
from megatron_sao.rollout.turns import Turns

GROUP = "megatron_sao.environments"  # of entry points; this project's own are in pyproject.toml


def load_environment(rollout: RolloutConfig, tokenizer: Any) -> Environment:
    """The one place where the two forms of an environment meet: one by turns is played by :class:`Turns`."""
    factory = _factory(rollout, tokenizer)
    return Turns(factory) if hasattr(factory.func, "reset") else factory()


def load_turns(rollout: RolloutConfig, tokenizer: Any) -> Callable[[], TurnEnvironment]:
    """Makes environments by turns, for whoever plays them elsewhere. Raises ConfigError for the other form."""
    factory = _factory(rollout, tokenizer)
    if not hasattr(factory.func, "reset"):
        raise ConfigError(
            f"rollout.environment = {rollout.environment!r} drives the session itself, which another process cannot; "
            "name a class with reset, act and close"
        )
    return factory


def _factory(rollout: RolloutConfig, tokenizer: Any) -> partial[Any]:
    made = load_object(rollout.environment, "rollout.environment")
    arguments = rollout.environment_args
    try:  # now, and not in the first episode
        inspect.signature(made).bind(tokenizer, **arguments)
    except TypeError as error:
        raise ConfigError(
            f"rollout.environment_args = {arguments!r}: {error}; write what {rollout.environment!r} takes"
        ) from error
    return partial(made, tokenizer, **arguments)


def load_object(path: str, field: str) -> Any:
    """The object a config field names as ``package.module:name``, or by the name of an entry point in ``GROUP``.

    Args:
        path: modules beside the user's cwd count.

    Raises:
        ConfigError: malformed path, no such module, no such name in it, or no such entry point.
    """
    module_name, separator, name = path.partition(":")
    if not separator:
        group = entry_points(group=GROUP)
        if path in group.names:
            return group[path].load()
        known = ", ".join(sorted(group.names)) or "none"
        raise ConfigError(
            f"{field} = {path!r} is no entry point of the group {GROUP} (known: {known}) and no import path; write one "
            "of these, or package.module:name"
        )
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
