"""Run under torchrun with four ranks: the weights of two models gathered under many layouts.

torchrun --nproc-per-node 4 -m tests.distributed.walk_gather GLM4_MOE LLAMA OUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.profiler import ProfilerActivity, profile

from megatron_sao.distributed import all_gather_json
from megatron_sao.models.build import build_critic, build_policy
from megatron_sao.models.hf import read_hf_model, transformer_config
from megatron_sao.trainer.runtime import start_runtime, stop_runtime
from megatron_sao.weights.export import HFExporter
from megatron_sao.weights.gather import Gatherer, collect_weights, trainer_layout
from megatron_sao.weights.load import load_hf_weights
from megatron_sao.weights.reshard import build_plan, spread_sources
from tests.distributed.change_layout import change_layout
from tests.distributed.offline import offline_config

BUCKET_BYTES = 40_000
SP = {"sequence_parallel": True}
LAYOUTS = {  # model, sizes, sources per pipeline stage
    "dp4": ("glm4_moe", {}, 4),
    "ep4": ("glm4_moe", {"ep": 4}, 1),
    "ep2_etp2": ("glm4_moe", {"tp": 2, "ep": 2, "etp": 2} | SP, 2),
    "tp2_ep2": ("glm4_moe", {"tp": 2, "ep": 2} | SP, 1),
    "tp2_pp2": ("glm4_moe", {"tp": 2, "pp": 2} | SP, 2),
    "pp2_ep2": ("glm4_moe", {"pp": 2, "ep": 2}, 1),
    "pp2_interleaved": ("glm4_moe", {"pp": 2, "vpp": 2, "ep": 2}, 1),
    "cp2_ep2": ("glm4_moe", {"cp": 2, "ep": 2}, 2),
    "tied_tp2_pp2": ("llama", {"tp": 2, "pp": 2}, 1),
}


def check_small_values() -> None:
    """Of any length on any rank, also at the edge of what is sent together with its length."""
    for lengths in ((0, 1, 2, 3), (1021, 1022, 1023, 1024), (5000, 0, 1022, 70_000)):
        values = ["x" * length for length in lengths]
        assert all_gather_json(values[dist.get_rank()], torch.device("cpu")) == values


def main(models: dict[str, Path], out: Path) -> None:
    backend = None
    for name, (model_name, sizes, sources) in LAYOUTS.items():
        parallel = {"world_size": 4, "nproc_per_node": 4} | sizes
        config = offline_config(models[model_name], parallel=parallel)
        if backend is None:
            backend = start_runtime(config.model, config.parallel, config.seed, deterministic=True)
            check_small_values()
        else:
            change_layout(config.parallel, config.seed)
        model = read_hf_model(models[model_name])
        megatron = transformer_config(model, config.model, config.parallel)
        policy = build_policy(model, megatron, "native")
        load_hf_weights(policy, model, megatron, "policy")
        layout = trainer_layout(model, megatron, dist.get_world_size())
        weights = collect_weights(policy, model, megatron, layout)
        plan = build_plan(weights, layout, BUCKET_BYTES, spread_sources(layout, sources), experts_together=sources == 1)
        gatherer = Gatherer(plan, policy, megatron)
        write_memory(out / f"{name}-memory{dist.get_rank()}.json", gatherer)
        mine = {}
        for bucket in gatherer.buckets():
            if bucket is not None:
                assert sum(t.nbytes for _, t in bucket.tensors) == bucket.data.nbytes
                mine |= {tensor_name: tensor.clone() for tensor_name, tensor in bucket.tensors}
        save_file(mine, out / f"{name}-source{dist.get_rank()}.safetensors")
        critic = build_critic(model, megatron, "native", bias=0.0, seed=0)
        load_hf_weights(critic, model, megatron, "critic")
        for head, chunks in (("policy", policy), ("critic", critic)):
            whole = dict(HFExporter(chunks, model, megatron, head).tensors())
            if dist.get_rank() == 0:
                save_file(whole, out / f"{name}-{head}.safetensors")
    stop_runtime()


def write_memory(path: Path, gatherer: Gatherer) -> None:
    """The most bytes that tensors made while gathering took at any one time, beside those of a bucket and a weight."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        for _ in gatherer.buckets():
            pass
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    held, peak = 0, 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    mine = gatherer.plan.buckets.get(dist.get_rank(), [])
    bucket = max((sum(t.weight.nbytes for t in transfers) for transfers in mine), default=0)
    divided = [t.weight for ts in mine for t in ts if t.weight.entry.kind in ("row", "qkv", "gate_up")]
    weight = max((weight.nbytes for weight in divided), default=0)
    path.write_text(json.dumps({"peak": peak, "bucket": bucket, "weight": weight, "buckets": len(mine)}))


if __name__ == "__main__":
    glm4_moe, llama, out = (Path(argument) for argument in sys.argv[1:])
    main({"glm4_moe": glm4_moe, "llama": llama}, out)
