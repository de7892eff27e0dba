"""Seconds and GB/s of a weight push from TP2×PP2×EP2 trainer ranks into a running engine, beside what the machine can.

    .venv/bin/python -m tools.bench.weight_sync                  # about two minutes
    .venv/bin/python -m tools.bench.weight_sync --delta runs/models/smollm2_135m

The first pushes a random MoE of GLM-4.5's architecture of 1.1 GB (bfloat16) three times and takes the best. References
from the same run: a copy in memory, on one rank while the others wait; and a gloo broadcast of the same bytes from one
process to one other, at its best bucket size. The second trains a model at a learning rate of 1e-6, served in bfloat16,
and prints how much of it changes from one version to the next.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_sao.config import WeightsConfig, parse_config
from megatron_sao.models.build import build_policy
from megatron_sao.models.hf import read_hf_model, transformer_config
from megatron_sao.trainer.runtime import start_runtime, stop_runtime
from megatron_sao.weights.export import HFExporter
from megatron_sao.weights.gather import Gatherer
from megatron_sao.weights.load import load_hf_weights
from megatron_sao.weights.publish import Receiver
from megatron_sao.weights.push import WeightPusher
from megatron_sao.weights.reshard import Plan, build_plan, place, shard_shape, spread_sources

GB = 1e9
RANKS = 4
LAYOUT = {"world_size": RANKS, "nproc_per_node": RANKS, "tp": 2, "pp": 2, "ep": 2, "sequence_parallel": True}
BUCKET_BYTES = 64 * 10**6
PUSHES = 3
MODEL = {
    "model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"], "vocab_size": 32000, "hidden_size": 1024,
    "intermediate_size": 4096, "moe_intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 64, "n_routed_experts": 16, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "first_k_dense_replace": 2, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
    "use_qk_norm": True, "attention_bias": False, "partial_rotary_factor": 0.5, "rope_theta": 1e6, "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "max_position_embeddings": 256, "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delta", type=Path, metavar="MODEL", help="measure changes of this model instead")
    parser.add_argument("--steps", type=int, default=8, help="of training, for --delta (default 8)")
    parser.add_argument("--rank-of", nargs=2, metavar=("MODEL", "URL"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.delta:
        from tools.bench.weight_delta import measure

        print(json.dumps(measure(options.delta, options.steps), indent=1))
    elif options.rank_of:
        run_rank(Path(options.rank_of[0]), options.rank_of[1])
    else:
        run_all()
    return 0


def run_all() -> None:
    """Make the model, start the engine and then the trainer's ranks."""
    from tests.serving import run_config, serving

    with tempfile.TemporaryDirectory() as scratch:
        model = write_model(Path(scratch) / "model")
        config = run_config(model, model={"path": model, "device": "cpu", "dtype": "bfloat16"})
        with serving("engine", config, Path(scratch)) as server:
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
            bench = ["-m", "tools.bench.weight_sync", "--rank-of", str(model), server.engine.url]
            subprocess.run([*torchrun, *bench], check=True)


def write_model(path: Path) -> Path:
    from megatron_sao.plan.oracle import tensors_on_disk
    from megatron_sao.weights.disk import write_tensors

    path.mkdir()
    (path / "config.json").write_text(json.dumps(MODEL))
    shapes, _ = tensors_on_disk(path)
    noise = torch.randn(max(torch.Size(shape).numel() for shape in shapes.values())).mul_(0.02).bfloat16()
    tensors = []
    for name, shape in shapes.items():
        value = noise[: torch.Size(shape).numel()].view(shape)
        tensors.append((name, value.float() if name.endswith("e_score_correction_bias") else value))
    write_tensors(path, "model.safetensors", tensors)
    return path


def run_rank(path: Path, url: str) -> None:
    config = parse_config(
        {
            "name": "bench", "model": {"path": path, "dtype": "bfloat16"}, "parallel": LAYOUT,
            "data": {"train": "unused"}, "rollout": {"environment": "unused:Unused"},
        }
    )  # fmt: skip
    backend = start_runtime(config.model, config.parallel, 0, deterministic=True)
    model = read_hf_model(path)
    megatron = transformer_config(model, config.model, config.parallel)
    chunks = build_policy(model, megatron, "native")
    load_hf_weights(chunks, model, megatron, "policy")
    started = time.perf_counter()
    exporter = HFExporter(chunks, model, megatron)
    plan = build_plan(exporter.weights, exporter.layout, BUCKET_BYTES, spread_sources(exporter.layout, 1))
    gatherer = Gatherer(plan, chunks, megatron)
    figures: dict[str, Any] = {"plan_seconds": time.perf_counter() - started}
    total = sum(transfer.weight.nbytes for transfer in plan.transfers)
    figures["gb"] = total / GB
    figures |= references(plan, total)
    figures["gather_gb_s"] = total / GB / best(lambda: [None for _ in gatherer.buckets()], PUSHES)
    settings = WeightsConfig(bucket_bytes=BUCKET_BYTES)
    token = os.environ["MEGATRON_SAO_TOKEN"]
    pusher = WeightPusher(gatherer, model, settings, token, backend.distributed_backend, path, megatron.params_dtype)
    receiver = Receiver("engine", "engine", url, 1)
    pushes = [push_once(pusher, receiver, f"1.{number}") for number in range(PUSHES)]
    figures |= min(pushes, key=lambda push: push["transfer"] + push["load"])
    if dist.get_rank() == 0:
        print(report(figures), flush=True)
    pusher.close()
    stop_runtime()


def push_once(pusher: WeightPusher, receiver: Receiver, version: str) -> dict[str, float]:
    """One push; transfer and load are sums over the sources. An engine takes one bucket after the other, so a source's
    transfer includes its waiting for the other's."""

    def spent() -> torch.Tensor:
        link = pusher.link(receiver.key)
        return torch.tensor([link.transfer_seconds, link.load_seconds] if link else [0.0, 0.0], dtype=torch.float64)

    before = spent()
    failed = pusher.push([receiver], version)
    assert not failed, failed
    times = spent() - before
    dist.all_reduce(times)
    return {"transfer": times[0].item(), "load": times[1].item()} | pusher.times


def references(plan: Plan, total: int) -> dict[str, float]:
    """GB/s of a copy and of placing shards (rank 0 alone), and of a broadcast to one other process by bucket size."""
    figures: dict[str, float] = {}
    if dist.get_rank() == 0:
        source = torch.zeros(256 * 10**6, dtype=torch.uint8)
        target = torch.zeros_like(source)
        figures["copy_gb_s"] = source.nbytes / GB / best(lambda: target.copy_(source), 5)
        figures["convert_gb_s"] = convert_rate(plan)
    dist.barrier()
    pair = dist.new_group([0, 1])
    for megabytes in (16, 64, 256):
        if dist.get_rank() < 2:
            data = torch.zeros(megabytes * 10**6, dtype=torch.uint8)
            count = -(-total // data.nbytes)

            def send(data: torch.Tensor = data, count: int = count) -> None:
                for _ in range(count):
                    dist.broadcast(data, 0, group=pair)
                dist.barrier(group=pair)

            figures[f"broadcast_{megabytes}mb_gb_s"] = count * data.nbytes / GB / best(send, 2)
        dist.barrier()
    return figures


def convert_rate(plan: Plan) -> float:
    """Of putting the HF tensors of one source together from shards that lie in memory."""
    work, nbytes = [], 0
    for transfer in plan.transfers:
        weight, shards = transfer.weight, len(transfer.holders)
        if transfer.source == 0:
            held = [torch.zeros(shard_shape(weight, shards), dtype=weight.dtype) for _ in range(shards)]
            work.append((weight, held, [torch.zeros(shape, dtype=weight.dtype) for shape in weight.shapes]))
            nbytes += weight.nbytes

    def convert() -> None:
        for weight, held, out in work:
            for index, shard in enumerate(held):
                place(weight, shard, index, len(held), out)

    return nbytes / GB / best(convert, 3)


def best(call: Callable[[], object], repeats: int) -> float:
    """The fewest seconds."""
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def report(f: dict[str, Any]) -> str:
    raw = max(value for name, value in f.items() if name.startswith("broadcast_"))
    transfer = f["gb"] / f["transfer"]
    rows = [
        ("weights", f"{f['gb']:.2f} GB, {RANKS} ranks TP2 x PP2 x EP2, bucket {BUCKET_BYTES / 1e6:.0f} MB"),
        ("plan, agreed between the ranks", f"{f['plan_seconds']:.2f} s"),
        ("copy in memory", f"{f['copy_gb_s']:.2f} GB/s"),
        ("convert", f"{f['convert_gb_s']:.2f} GB/s = {f['convert_gb_s'] / f['copy_gb_s']:.0%} of a copy (target 50%)"),
        ("gather and convert, both sources", f"{f['gather_gb_s']:.2f} GB/s"),
        ("raw gloo broadcast, best bucket", f"{raw:.2f} GB/s"),
        ("transfer, with waits", f"{f['transfer']:.2f} s, {transfer:.2f} GB/s, {transfer / raw:.0%} of raw (goal 80%)"),
        ("load in the engine", f"{f['load']:.2f} s, {f['gb'] / f['load']:.2f} GB/s"),
        ("stall of the engine", f"{f['stall']:.2f} s = {f['stall'] / (f['transfer'] + f['load']):.0%} of transfer and"
         " load (target 110%)"),
    ]  # fmt: skip
    return "\n".join(f"{name:38} {value}" for name, value in rows)


if __name__ == "__main__":
    sys.exit(main())
