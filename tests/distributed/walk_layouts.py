"""Run under torchrun: one SAO step on the same batch under every layout of that many ranks, one after another.

torchrun --nproc-per-node N -m tests.distributed.walk_layouts MODEL OUT quick|rest
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_sao.data.trajectory import Trajectory
from megatron_sao.models.backend import Backend
from megatron_sao.trainer.runtime import start_runtime, stop_runtime
from tests.distributed.change_layout import change_layout
from tests.distributed.gradients import (
    SGD,
    SMOOTH_ADAM,
    Result,
    Step,
    grouped_batch,
    lopsided_batch,
    mixed_batch,
    routed_batch,
    sao,
    step_and_change,
    supervised,
    truncated_batch,
)
from tests.distributed.offline import offline_config
from tests.tiny_models import VOCAB_SIZE

SP = {"sequence_parallel": True}  # MoE with tensor parallelism needs it
LAYOUTS = {
    "dp2": {"world_size": 2},
    "tp2": {"world_size": 2, "tp": 2} | SP,
    "pp2": {"world_size": 2, "pp": 2},
    "pp2_interleaved": {"world_size": 2, "pp": 2, "vpp": 2},
    "ep2": {"world_size": 2, "ep": 2},
    "cp2": {"world_size": 2, "cp": 2},
    "tp2_pp2": {"world_size": 4, "tp": 2, "pp": 2} | SP,
    "tp2_ep2": {"world_size": 4, "tp": 2, "ep": 2} | SP,
    "pp2_ep2": {"world_size": 4, "pp": 2, "ep": 2},
    "dp2_ep2": {"world_size": 4, "ep": 2},
    "dp2_tp2": {"world_size": 4, "tp": 2} | SP,
    "tp2_cp2": {"world_size": 4, "tp": 2, "cp": 2} | SP,
    "pp2_cp2": {"world_size": 4, "pp": 2, "cp": 2},
    "cp2_ep2": {"world_size": 4, "cp": 2, "ep": 2},
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


@dataclass(frozen=True)
class Kind:
    """A step: its batch, its optimizer, and how its config differs from the plain one, for the single rank too.
    ``recompute`` and ``distributed_optimizer`` are for the many ranks alone."""

    batch: Callable[[], list[Trajectory]]
    optimizer: dict[str, Any] = field(default_factory=lambda: SGD)
    sections: dict[str, Any] = field(default_factory=dict)
    recompute: bool = False
    step: Step = sao
    distributed_optimizer: bool = False  # of Adam, since Megatron distributes the state of no other

    def take(self, model: Path, run_dir: Path, backend: Backend, /, **sections: Any) -> Result:
        sections = self.sections | sections
        return step_and_change(model, self.batch(), run_dir, backend, self.optimizer, self.step, **sections)


KINDS = {
    "plain": Kind(mixed_batch),
    "recompute": Kind(mixed_batch, recompute=True),
    "distributed": Kind(mixed_batch, SMOOTH_ADAM, distributed_optimizer=True),
    "both": Kind(mixed_batch, SMOOTH_ADAM, distributed_optimizer=True, recompute=True),
    "lopsided": Kind(lopsided_batch),
    "baseline": Kind(grouped_batch, sections=BASELINE),
    "plain_gae": Kind(truncated_batch, sections={"algorithm": {"gae": "all_tokens", "truncation": "bootstrap"}}),
    "supervised": Kind(mixed_batch, step=supervised, sections={"eval": {"mismatch_min_tokens": 1}}),
    "replay": Kind(
        routed_batch, sections={"algorithm": {"eps_low": 0.8, "eps_high": 3.0, "routing_replay": True}}, recompute=True
    ),
}
QUICK = {  # what `make test` takes, by number of ranks; `make test-full` takes every kind under every layout
    2: ("plain", "both", "lopsided", "baseline", "plain_gae", "supervised", "replay"),
    4: ("plain", "both", "baseline"),
    8: ("plain", "both"),
}


def steps(world_size: int, part: str) -> list[tuple[str, str]]:
    """(layout, kind) of every step of a world: of its ``quick`` part, or of the ``rest``."""
    return [
        (layout, kind)
        for layout, sizes in LAYOUTS.items()
        for kind in KINDS
        if sizes["world_size"] == world_size and (kind in QUICK[world_size]) == (part == "quick")
    ]


def main(model: Path, out: Path, part: str) -> None:
    backend = None
    for layout, name in steps(int(os.environ["WORLD_SIZE"]), part):
        sizes, kind = LAYOUTS[layout], KINDS[name]
        parallel = sizes | {"nproc_per_node": sizes["world_size"], "max_tokens_per_microbatch": 64}
        parallel |= {"distributed_optimizer": kind.distributed_optimizer}
        config = offline_config(
            model, parallel=parallel, model={"path": str(model), "recompute": "full" if kind.recompute else "none"}
        )
        if backend is None:
            backend = start_runtime(config.model, config.parallel, config.seed, deterministic=True)
        else:
            change_layout(config.parallel, config.seed)
        sections = {"parallel": parallel, "model": config.model.model_dump(mode="json")}
        result = kind.take(model, out / f"{layout}-{name}", backend, **sections)
        if dist.get_rank() == 0:
            torch.save(result, out / f"{layout}-{name}.pt")
    stop_runtime()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
