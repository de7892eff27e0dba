"""Environments and rewards by import path and by entry point."""

from __future__ import annotations

import tomllib
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from megatron_sao.config import ConfigError, RolloutConfig
from megatron_sao.rollout.loading import GROUP, load_environment, load_object, load_turns
from megatron_sao.rollout.turns import Turns
from tests.unit.test_worker import OneTurn, half

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


@pytest.fixture
def installed(monkeypatch):
    """An environment and a reward that installed packages declare."""
    entries = [("one-turn", "OneTurn"), ("half", "half")]
    found = {GROUP: EntryPoints(EntryPoint(name, f"tests.unit.test_worker:{value}", GROUP) for name, value in entries)}
    monkeypatch.setattr("megatron_sao.rollout.loading.entry_points", lambda group: found.get(group, EntryPoints()))


def test_an_environment_and_a_reward_may_be_named_by_their_entry_points(installed):
    assert load_object("one-turn", "rollout.environment") is OneTurn
    assert load_object("half", "rollout.reward") is half


def test_the_error_for_an_unknown_name_lists_the_known_ones(installed):
    message = r"rollout.environment = 'two-turns' .* group megatron_sao.environments \(known: half, one-turn\)"
    with pytest.raises(ConfigError, match=message):
        load_object("two-turns", "rollout.environment")


def test_our_own_entry_points_lead_to_environments():
    declared = tomllib.loads(PYPROJECT.read_text())["project"]["entry-points"][GROUP]
    assert declared.keys() == {"calculator", "arithmetic", "math", "service"}
    for path in declared.values():
        made = load_object(path, "rollout.environment")
        assert hasattr(made, "reset") != hasattr(made, "run"), f"{path} must have one form"


def test_an_import_path_that_leads_nowhere_is_a_sentence():
    with pytest.raises(ConfigError, match=r"write one of these, or package.module:name"):
        load_object("nowhere", "rollout.environment")
    with pytest.raises(ConfigError, match=r"rollout.reward = 'nowhere.at:all': no module named 'nowhere'"):
        load_object("nowhere.at:all", "rollout.reward")
    with pytest.raises(ConfigError, match="defines no 'Missing'"):
        load_object(f"{__name__}:Missing", "rollout.environment")


def rollout(environment, **arguments):
    return RolloutConfig(environment=environment, environment_args=arguments)


def test_a_class_with_reset_is_played_by_turns_and_any_other_as_it_is():
    turns = rollout("megatron_sao.rollout.environments.calculator:Calculator")
    control = rollout("tests.unit.test_worker:OneTurn", prompt=3)
    assert type(load_environment(turns, None)) is Turns
    assert load_environment(control, None).prompt == 3
    with pytest.raises(ConfigError, match=r"OneTurn' drives the session itself, .* reset, act and close"):
        load_turns(control, None)


def test_arguments_that_do_not_fit_are_refused_before_the_first_episode():
    with pytest.raises(ConfigError, match=r"environment_args = {'digits': 3}: got an unexpected keyword .*'digits'"):
        load_environment(rollout("megatron_sao.rollout.environments.calculator:Calculator", digits=3), None)
    with pytest.raises(ConfigError, match=r"missing a required argument: 'url'"):
        load_environment(rollout("megatron_sao.rollout.environments.service:Service"), None)
