"""Plans of the shipped configs and of models at their full size, from a ``config.json`` each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_sao.config import ConfigError
from megatron_sao.models.hf import read_hf_model, transformer_config
from megatron_sao.plan.layout import check_layout
from tests.distributed.plan_full_size import CASES, MODELS, SHIPPED, SLOW_CASES, shipped_config

pytestmark = pytest.mark.distributed


def planned(which: str, out: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.distributed.plan_full_size", which, str(out)],
        capture_output=True, text=True, timeout=1500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return planned("quick", tmp_path_factory.mktemp("plans") / "plans.json")


def assert_covers(plan: dict[str, Any]) -> None:
    coverage = plan["coverage"]
    assert [coverage[problem] for problem in ("missing", "duplicate", "unexpected")] == [[], [], []]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", [*CASES, "tied"])
def test_the_ranks_hold_every_tensor_of_the_checkpoint_once(case: str, plans: dict[str, Any]) -> None:
    assert_covers(plans[case])


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_so_do_those_of_the_larger_worlds(tmp_path: Path) -> None:
    plans = planned("slow", tmp_path / "plans.json")
    for case in SLOW_CASES:
        assert_covers(plans[case])


@pytest.mark.parametrize(("case", "billions"), [("qwen3_8b", 8.19), ("qwen3_30b_a3b", 30.53)])
def test_the_parameters_of_all_ranks_are_those_of_the_model_card(
    case: str, billions: float, plans: dict[str, Any]
) -> None:
    (rank,), parallel = plans[case]["ranks"], shipped_config(case, []).parallel
    assert parallel.pp == 1
    copies = {
        "norms": 1,
        "router": 1,
        "experts": parallel.ep,
    }  # of what a rank holds; else one per tensor-parallel rank
    whole = sum(count * copies.get(kind, parallel.tp) for kind, count in rank["parameters"].items())
    assert whole / 1e9 == pytest.approx(billions, rel=0.001)


def test_the_published_744b_layout_does_not_fit_with_a_critic_and_says_what_would(plans: dict[str, Any]) -> None:
    plan = plans["glm5_2 published"]
    (worst,) = plan["ranks"]
    assert plan["fits"] is False
    assert sum(worst["parameters"].values()) == pytest.approx(6.14e9, rel=0.001)  # of the last stage's 16 layers
    assert (worst["pp"], worst["layers"]) == (7, 16)
    assert worst["policy"]["weights"] == pytest.approx(12.3e9, rel=0.01)
    assert any(override.startswith("parallel.world_size=") for override in plan["remedy"])


def test_what_a_plan_advises_fits(plans: dict[str, Any], tmp_path: Path) -> None:
    remedy = plans["qwen3_8b too large"]["remedy"]
    assert plans["qwen3_8b too large"]["fits"] is False and remedy
    command = [sys.executable, "-m", "megatron_sao.cli", "plan", "model_configs/qwen3_8b.yaml", "--json"]
    overrides = [f"model.path={MODELS / 'qwen3_8b'}", *CASES["qwen3_8b too large"][1], *remedy]
    done = subprocess.run(
        [*command, *(argument for override in overrides for argument in ("--set", override))],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    plan = json.loads(done.stdout)  # nothing else is printed there
    assert plan["fits"] is True
    assert len(plan["ranks"]) == plan["layout"]["ranks"]
    assert_covers(plan)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_config_fits_the_cluster_that_it_names(name: str, plans: dict[str, Any]) -> None:
    stages = plans[f"stages of {name}"]
    config = shipped_config(name, [])
    assert stages["fits"] is True
    assert stages["largest"] <= 0.95 * config.cluster.gpu_memory_gb * 1e9, "the estimates in it want a margin"
    assert sum(stages["layers"]) == read_hf_model(config.model.path).raw["num_hidden_layers"]


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("qwen3_8b", ["parallel.tp=3", "parallel.world_size=6", "parallel.nproc_per_node=6"], "attention_heads = 32"),
        ("qwen3_8b", ["parallel.ep=4"], "qwen3 has no experts; set it to 1"),
        ("qwen3_30b_a3b", ["parallel.ep=3", "parallel.world_size=48"], "num_experts = 128 .* parallel.ep = 3"),
        ("qwen3_30b_a3b", ["parallel.sequence_parallel=false"], "needs parallel.sequence_parallel = true"),
        ("qwen3_8b", ["parallel.world_size=1024"], "256 data-parallel ranks, but rl.batch_size = 128"),
        ("glm5_2_744b", ["parallel.pp_first_layers=13", "parallel.pp_last_layers=17"], r"start on layers \[14, 22"),
    ],
)  # fmt: skip
def test_a_layout_that_the_model_does_not_allow_is_refused_with_the_reason(
    name: str, overrides: list[str], message: str
) -> None:
    config = shipped_config(name, overrides)
    model = read_hf_model(config.model.path)
    with pytest.raises(ConfigError, match=message):
        check_layout(config, model)
        transformer_config(model, config.model, config.parallel)
