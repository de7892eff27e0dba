"""Plans of models of full size, all in one process; see test_plan_full_size.py."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from megatron_sao.config import RunConfig, load_config, parse_config

MODELS = Path(__file__).parents[1] / "data" / "models"
DEEPSEEK = MODELS / "deepseek_v3"
CONFIGS = Path(__file__).parents[2] / "model_configs"
# The shipped configs of models that the demo's tools do not make: directory of the model's config.json in MODELS.
SHIPPED = {
    "qwen3_8b": "qwen3_8b",
    "qwen3_30b_a3b": "qwen3_30b_a3b",
    "glm4_5_air": "glm4_5_air",
    "glm5_744b": "glm5",
    "glm5_2_744b": "glm5_2",
}
# The published layout of 744B parameters on 256 GPUs of 80 GB.
PUBLISHED = ["parallel.world_size=256", "parallel.cp=8", "parallel.ep=32", "cluster.gpu_memory_gb=80"]
CASES: dict[str, tuple[str, list[str]]] = {  # a shipped config and overrides
    "qwen3_8b": ("qwen3_8b", []),
    "qwen3_8b too large": ("qwen3_8b", ["parallel.tp=2", "parallel.world_size=2", "parallel.nproc_per_node=2"]),
    "qwen3_30b_a3b": ("qwen3_30b_a3b", []),
    "glm4_5_air": ("glm4_5_air", []),
    "glm5_2 published": ("glm5_2_744b", PUBLISHED),
}
SLOW_CASES: dict[str, tuple[str, list[str]]] = {
    "glm5_744b": ("glm5_744b", []),
    "glm5_2_744b": ("glm5_2_744b", []),
    "deepseek_v3": (
        "glm5_2_744b",
        [f"model.path={DEEPSEEK}", *PUBLISHED, "parallel.pp_first_layers=null", "parallel.pp_last_layers=5"],
    ),
    "glm4_5": (
        "glm4_5_air",
        [f"model.path={MODELS / 'glm4_5'}", "parallel.pp=4", "parallel.world_size=64"],
    ),
}


def shipped_config(name: str, overrides: list[str]) -> RunConfig:
    return load_config(CONFIGS / f"{name}.yaml", [f"model.path={MODELS / SHIPPED[name]}", *overrides])


def small_config(name: str, **parallel: Any) -> RunConfig:
    """Of a model whose config is not shipped, or with another layout."""
    return parse_config(
        {
            "name": name,
            "model": {"path": str(MODELS / name)},
            "data": {"train": "unused"},
            "rollout": {"environment": "unused:Unused"},
            "parallel": parallel,
        }
    )


def main(cases: dict[str, tuple[str, list[str]]], out: Path) -> None:
    """Write what ``megatron-sao plan --json`` would, without the ranks but the worst; and of every shipped config what
    the first ranks of its pipeline stages need."""
    from megatron_sao.models.hf import read_hf_model
    from megatron_sao.plan.layout import check_layout
    from megatron_sao.plan.planner import fits_cluster, make_plan, plan_ranks
    from megatron_sao.plan.remedy import find_remedy
    from megatron_sao.plan.report import as_json
    from megatron_sao.plan.simulate import prepare_process

    prepare_process()
    results: dict[str, Any] = {}
    first_ranks = {}  # of every stage of a shipped config
    for case, (name, overrides) in cases.items():
        plan = make_plan(shipped_config(name, overrides))
        remedy = None if plan.fits else find_remedy(plan.config, plan.model, plan.worst.place.pp)
        results[case] = as_json(plan, remedy)
        results[case]["ranks"] = [results[case]["ranks"][plan.worst.place.rank]]
        first_ranks[case] = plan.ranks[:: len(plan.ranks) // plan.config.parallel.pp]
    for name in SHIPPED:
        config = shipped_config(name, [])
        if name not in first_ranks:
            model, world = read_hf_model(config.model.path), config.parallel.world_size
            check_layout(config, model)
            stages = range(0, world, world // config.parallel.pp)
            first_ranks[name] = [rank for rank, _ in plan_ranks(config, model, stages)]
        results[f"stages of {name}"] = {
            "fits": fits_cluster(config, first_ranks[name]),
            "layers": [rank.layers for rank in first_ranks[name]],
            "largest": max(rank.memory.peak for rank in first_ranks[name]),
        }
    tied = make_plan(small_config("smollm2_135m", pp=2, world_size=2))
    results["tied"] = as_json(tied, None)
    out.write_text(json.dumps(results))


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with contextlib.redirect_stdout(sys.stderr):
        main(SLOW_CASES if sys.argv[1] == "slow" else CASES, Path(sys.argv[2]))
