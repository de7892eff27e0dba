"""The same runs, stepped on two ranks and planned in a process of their own; see test_plan_memory.py."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_sao.config import RunConfig
from tests.distributed.offline import offline_config, write_batches

_DISTRIBUTED = {"distributed_optimizer": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {  # dtype and layout on two ranks
    "DP2 float32": ("float32", {}),
    "DP2 float32 distributed": ("float32", _DISTRIBUTED),
    "DP2 bfloat16": ("bfloat16", {}),
    "DP2 bfloat16 distributed": ("bfloat16", _DISTRIBUTED),
    "EP2 bfloat16 distributed": ("bfloat16", {"ep": 2} | _DISTRIBUTED),
    "PP2 bfloat16": ("bfloat16", {"pp": 2}),
    "DP2 bfloat16 distributed, in turn": ("bfloat16", {"offload_idle_model": True} | _DISTRIBUTED),
}


def case_config(model: Path, case: str) -> RunConfig:
    dtype, parallel = CASES[case]
    return offline_config(
        model,
        model={"path": str(model), "dtype": dtype},
        parallel=parallel | {"world_size": 2, "nproc_per_node": 2},
    )


def step(model: Path, directory: Path) -> None:
    """Write the bytes of policy and critic after one step, on every rank."""
    import torch.distributed as dist

    from megatron_sao.trainer.loop import sao_step
    from megatron_sao.trainer.main import Run
    from megatron_sao.trainer.metrics import Stopwatch
    from megatron_sao.trainer.runtime import start_runtime
    from tests.distributed.change_layout import change_layout
    from tests.distributed.gradients import mixed_batch, trainables

    first = case_config(model, next(iter(CASES)))
    backend = start_runtime(first.model, first.parallel, seed=0, deterministic=True)
    rank = dist.get_rank()
    batches = write_batches(directory / f"batches-{rank}")
    measured = {}
    for index, case in enumerate(CASES):
        config = case_config(model, case)
        change_layout(config.parallel)
        stage = Run(config, directory / str(index), batches, backend)._rl_stage(0)
        metrics = sao_step(stage, 0, mixed_batch(), Stopwatch())
        measured[case] = {"metrics": metrics}
        for name, trainable in trainables(stage).items():
            waiting = trainable._host.nbytes if config.parallel.offload_idle_model else 0
            with trainable.resident(gradients=True):
                measured[case][name] = allocated(trainable) | {"waiting": waiting, "digest": digest(trainable)}
    (directory / f"measured-{rank}.json").write_text(json.dumps(measured))


def digest(trainable: Any) -> str:
    """Of all weights."""
    weights = hashlib.sha256()
    for parameter in (p for chunk in trainable.chunks for p in chunk.parameters()):
        weights.update(parameter.detach().float().numpy().tobytes())
    return weights.hexdigest()


def allocated(trainable: Any) -> dict[str, int]:
    """Bytes of the distinct storages of a model, its gradient buffers and its optimizer."""
    parameters = [p for chunk in trainable.chunks for p in chunk.parameters()]
    buffers = [b for chunk in trainable.chunks for b in chunk.buffers()]
    optimizers = [part.optimizer for part in trainable.optimizer.chained_optimizers]
    updated = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    moments = [t for optimizer in optimizers for state in optimizer.state.values() for t in state.values()]

    def sizes(tensors: list[Any]) -> dict[int, int]:
        return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}

    weights = sizes([*parameters, *buffers])
    gradients = sizes([p.main_grad for p in parameters if p.requires_grad])
    optimizer = sizes([*updated, *moments])
    own = {address: size for address, size in optimizer.items() if address not in weights}
    return {
        "weights": sum(weights.values()), "gradients": sum(gradients.values()), "optimizer": sum(own.values()),
    }  # fmt: skip


def plan(model: Path, directory: Path) -> None:
    """Write what is planned of the same ranks."""
    from megatron_sao.models.hf import read_hf_model
    from megatron_sao.plan.planner import plan_ranks
    from megatron_sao.plan.simulate import prepare_process

    prepare_process()
    planned = {}
    for case in CASES:
        config = case_config(model, case)
        ranks = [rank.memory for rank, _ in plan_ranks(config, read_hf_model(model), range(2))]
        planned[case] = [{"policy": asdict(m.policy), "critic": asdict(m.critic), "host": m.host} for m in ranks]
    (directory / "planned.json").write_text(json.dumps(planned))


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    {"step": step, "plan": plan}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
