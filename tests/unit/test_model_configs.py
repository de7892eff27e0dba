"""The run configs that are shipped."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from megatron_sao.config import RunConfig, load_config

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "model_configs").glob("*.yaml"))


@pytest.fixture(params=CONFIGS, ids=lambda path: path.stem)
def config(request: pytest.FixtureRequest) -> RunConfig:
    return load_config(request.param)


def test_it_is_named_after_its_file(config: RunConfig) -> None:
    assert (ROOT / "model_configs" / f"{config.name}.yaml").is_file()


def test_its_engine_flags_are_fields_of_the_installed_sglang(config: RunConfig) -> None:
    package = Path(importlib.util.find_spec("sglang").submodule_search_locations[0])
    sources = [file.read_text() for file in (package / "srt" / "arg_groups" / "fields").glob("*.py")]
    fields = {name for source in sources for name in re.findall(r"^    (\w+): ", source, re.MULTILINE)}
    assert {"tp_size", "mem_fraction_static"} <= fields
    assert set(config.engine.sglang) <= fields


def test_it_does_not_restate_what_the_models_own_config_says(config: RunConfig) -> None:
    text = (ROOT / "model_configs" / f"{config.name}.yaml").read_text()
    published = (ROOT / "tests" / "data" / "models").glob("*/config.json")
    said = {key for path in published for key in json.loads(path.read_text())} - {"dtype"}
    assert not {key for key in said if re.search(rf"^\s*{key}:", text, re.MULTILINE)}


def test_the_papers_experiment_has_the_papers_settings() -> None:
    config = load_config(ROOT / "model_configs" / "qwen3_30b_a3b.yaml")
    rl, algorithm = config.rl, config.algorithm
    assert (rl.policy_optimizer.lr, rl.critic_optimizer.lr, rl.critic_optimizer.warmup_steps) == (1e-6, 5e-6, 10)
    assert (rl.batch_size, rl.group_size, rl.steps, config.rollout.max_tokens) == (128, 1, 1000, 131072)
    assert (algorithm.eps_low, algorithm.eps_high, algorithm.critic_updates, algorithm.lambda_alpha) == (
        0.3,
        5.0,
        2,
        1.5,
    )
    assert config.value.steps * config.value.batch_size >= 6000  # rollouts that the critic is pretrained on
