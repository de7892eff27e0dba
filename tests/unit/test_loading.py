"""Environments and rewards by import path and by entry point."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints

import pytest

from megatron_sao.config import ConfigError
from megatron_sao.rollout.environment import load_object
from tests.unit.test_worker import OneTurn


def test_an_environment_may_be_named_by_its_entry_point(monkeypatch):
    entry = EntryPoint("one-turn", "tests.unit.test_worker:OneTurn", "megatron_sao.environment")
    found = {"megatron_sao.environment": EntryPoints([entry])}
    monkeypatch.setattr("megatron_sao.rollout.environment.entry_points", lambda group: found.get(group, EntryPoints()))
    assert load_object("one-turn", "rollout.environment") is OneTurn
    with pytest.raises(ConfigError, match=r"'two-turns' is not an import path.*installed packages declare one-turn"):
        load_object("two-turns", "rollout.environment")
    with pytest.raises(ConfigError, match="is not an import path"):
        load_object("one-turn", "rollout.reward")


def test_an_import_path_that_leads_nowhere_is_a_sentence():
    with pytest.raises(ConfigError, match=r"is not an import path; write package.module:name"):
        load_object("nowhere", "rollout.environment")
    with pytest.raises(ConfigError, match=r"rollout.reward = 'nowhere.at:all': no module named 'nowhere'"):
        load_object("nowhere.at:all", "rollout.reward")
    with pytest.raises(ConfigError, match="defines no 'Missing'"):
        load_object(f"{__name__}:Missing", "rollout.environment")
