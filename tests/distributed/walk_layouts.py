"""Run under torchrun: one SAO step on the same batch under every layout of that many ranks, one after another.

torchrun --nproc-per-node N -m tests.distributed.walk_layouts MODEL OUT
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_sao.trainer.runtime import set_layout, start_runtime, stop_runtime
from tests.distributed.gradients import (
    SGD,
    SMOOTH_ADAM,
    grouped_batch,
    lopsided_batch,
    mixed_batch,
    routed_batch,
    step_and_change,
    truncated_batch,
)
from tests.distributed.offline import offline_config
from tests.tiny_models import VOCAB_SIZE

SP = {"sequence_parallel": True}  # MoE with tensor parallelism needs it
DISTRIBUTED = {"distributed_optimizer": True}
LAYOUTS = {
    "dp2": {"world_size": 2},
    "tp2": {"world_size": 2, "tp": 2} | SP,
    "pp2": {"world_size": 2, "pp": 2},
    "pp2_interleaved": {"world_size": 2, "pp": 2, "vpp": 2},
    "ep2": {"world_size": 2, "ep": 2},
    "cp2": {"world_size": 2, "cp": 2},
    "dp2_distributed": {"world_size": 2} | DISTRIBUTED,
    "tp2_pp2": {"world_size": 4, "tp": 2, "pp": 2} | SP,
    "tp2_ep2": {"world_size": 4, "tp": 2, "ep": 2} | SP,
    "pp2_ep2": {"world_size": 4, "pp": 2, "ep": 2},
    "dp2_ep2": {"world_size": 4, "ep": 2},
    "tp2_cp2": {"world_size": 4, "tp": 2, "cp": 2} | SP,
    "pp2_cp2": {"world_size": 4, "pp": 2, "cp": 2},
    "cp2_ep2": {"world_size": 4, "cp": 2, "ep": 2},
    "dp2_tp2_distributed": {"world_size": 4, "tp": 2} | SP | DISTRIBUTED,
    "dp2_ep2_distributed": {"world_size": 4, "ep": 2} | DISTRIBUTED,
    "pp2_ep2_distributed": {"world_size": 4, "pp": 2, "ep": 2} | DISTRIBUTED,
    "tp2_pp2_ep2": {"world_size": 8, "tp": 2, "pp": 2, "ep": 2} | SP,
}
BASELINE = {
    "algorithm": {
        "advantage": "group", "policy_loss": "ppo_clip", "pi_old": "latest_pushed", "loss_denominator": "trajectories",
        "kl_coef": 0.1, "entropy_coef": 0.01,
    },
    "rl": {"group_size": 3, "batch_size": 6, "minibatches": 2},
    "rollout": {"environment": "unused:Unused", "sampling": {"top_k": VOCAB_SIZE}},
    "value": {"steps": 0},
}  # fmt: skip
KINDS = {  # of a step: its batch, its optimizer, and how its config differs from the plain one
    "mixed": (mixed_batch, SGD, {}),
    "lopsided": (lopsided_batch, SGD, {}),
    "baseline": (grouped_batch, SGD, BASELINE),
    "recompute": (mixed_batch, SGD, {}),
    "plain_gae": (truncated_batch, SGD, {"algorithm": {"gae": "all_tokens", "truncation": "bootstrap"}}),
    "replay": (routed_batch, SGD, {"algorithm": {"eps_low": 0.8, "eps_high": 3.0, "routing_replay": True}}),
    "adam": (mixed_batch, SMOOTH_ADAM, {}),
}
RECOMPUTED = ("tp2", "pp2", "cp2", "tp2_pp2")  # "replay" too
ONLY = {  # the layouts of a kind that does not run in all of them
    "recompute": RECOMPUTED,
    "plain_gae": ("cp2", "pp2_cp2"),
    "adam": [layout for layout, sizes in LAYOUTS.items() if "distributed_optimizer" in sizes],
}
TWO_RANKS = ("lopsided", "recompute", "replay")  # and eight; four ranks take what layouts can do to each other


def steps(world_size: int) -> list[tuple[str, str]]:
    """(layout, kind) of every step of a world."""
    return [
        (layout, kind)
        for layout, sizes in LAYOUTS.items()
        for kind in KINDS
        if sizes["world_size"] == world_size
        and ("distributed_optimizer" not in sizes or kind == "adam")
        and layout in ONLY.get(kind, LAYOUTS)
        and (world_size != 4 or kind not in TWO_RANKS)
    ]


def main(model: Path, out: Path) -> None:
    backend = None
    for layout, kind in steps(int(os.environ["WORLD_SIZE"])):
        sizes = LAYOUTS[layout]
        batch, optimizer, sections = KINDS[kind]
        parallel = sizes | {"nproc_per_node": sizes["world_size"], "max_tokens_per_microbatch": 64}
        recompute = "full" if kind in ("recompute", "replay") and layout in RECOMPUTED else "none"
        sections = sections | {"parallel": parallel, "model": {"path": str(model), "recompute": recompute}}
        config = offline_config(model, parallel=parallel)
        if backend is None:
            backend = start_runtime(config.model, config.parallel, config.seed, deterministic=True)
        else:
            set_layout(config.parallel, config.seed)
        result = step_and_change(model, batch(), out / f"{layout}-{kind}", backend, optimizer, **sections)
        if dist.get_rank() == 0:
            torch.save(result, out / f"{layout}-{kind}.pt")
    stop_runtime()


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:]))
