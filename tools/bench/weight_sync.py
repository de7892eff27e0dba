"""Seconds and GB/s of a weight push from TP2×PP2×EP2 trainer ranks into a running engine, beside what the machine can.

    .venv/bin/python -m tools.bench.weight_sync                  # about two minutes
    .venv/bin/python -m tools.bench.weight_sync --delta runs/models/smollm2_135m

The first pushes a random MoE of GLM-4.5's architecture of 1.1 GB (bfloat16) five times and takes the shortest stall:
into SGLang; into a receiver that does nothing but receive (tools/bench/weight_receiver.py); and into SGLang from
buckets that have all been put together before, which leaves the transport alone. All four ranks send. The receivers
write when they received each bucket, so the stall is divided into parts that add up. References from the same run: a
copy in memory, on one rank while the others wait; and a gloo broadcast of as many bytes, each sent once, from one
process to one other, at its best bucket size, and at that of the push into new memory every time, as SGLang would
receive without KEEP_FREED_MEMORY. The second trains a model at a learning rate of 1e-6, served in bfloat16, and prints
how much of it changes from one version to the next.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist

from megatron_sao.config import WeightsConfig, parse_config
from megatron_sao.distributed import all_gather_json
from megatron_sao.launch.ports import port_of, reserve_port
from megatron_sao.launch.supervise import part_environment
from megatron_sao.models.build import build_policy
from megatron_sao.models.hf import read_hf_model, transformer_config
from megatron_sao.trainer.runtime import start_runtime, stop_runtime
from megatron_sao.weights.export import HFExporter
from megatron_sao.weights.gather import Bucket, Gatherer
from megatron_sao.weights.link import EngineControl, SourceLink
from megatron_sao.weights.load import load_hf_weights
from megatron_sao.weights.publish import Receiver
from megatron_sao.weights.push import WeightPusher, push_plan
from megatron_sao.weights.reshard import Plan, place, shard_shape

GB = 1e9
RANKS = 4
LAYOUT = {"world_size": RANKS, "nproc_per_node": RANKS, "tp": 2, "pp": 2, "ep": 2, "sequence_parallel": True}
SOURCES_PER_STAGE = 2
PUSHES = 5
TIMED_ENGINE = Path(__file__).parent / "timed_engine"
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
    parser.add_argument("--bucket-mb", type=int, default=128, help="megabytes that are sent at once (default 128)")
    parser.add_argument("--rank-of", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.delta:
        from tools.bench.weight_delta import measure

        print(json.dumps(measure(options.delta, options.steps), indent=1))
    elif options.rank_of:
        model, *places = options.rank_of
        engine, bare = (Target(url, Path(receipts)) for url, receipts in zip(places[::2], places[1::2], strict=True))
        run_rank(Path(model), options.bucket_mb * 10**6, engine, bare)
    else:
        run_all(options.bucket_mb)
    return 0


class Target(NamedTuple):
    """Where weights are pushed to, and the file in which it writes what it received when."""

    url: str
    receipts: Path


class Ready(Gatherer):
    """Has put all buckets together before the first push, so that engines wait for the transport alone."""

    held: list[Bucket | None] | None = None

    def buckets(self) -> Iterator[Bucket | None]:
        if self.held is None:
            self.held = [self.bucket(number) for number in range(self.plan.rounds)]
        return iter(self.held)


def run_all(bucket_mb: int) -> None:
    """Make the model, start the receivers and then the trainer's ranks."""
    from tests.serving import TOKEN, run_config, serving

    with reserve_port("127.0.0.1") as reserved, tempfile.TemporaryDirectory() as scratch:
        port = port_of(reserved)
        model = write_model(Path(scratch) / "model")
        config = run_config(model, model={"path": model, "device": "cpu", "dtype": "bfloat16"})
        engine, bare = Path(scratch) / "engine.jsonl", Path(scratch) / "bare.jsonl"
        receiver = [sys.executable, "-m", "tools.bench.weight_receiver", str(port), str(bare)]
        hooks = os.pathsep.join(filter(None, [str(TIMED_ENGINE), os.environ.get("PYTHONPATH")]))
        with (
            patch.dict(os.environ, part_environment("unused", TOKEN)),  # as in a run
            patch.dict(os.environ, {"PYTHONPATH": hooks, "BENCH_RECEIPTS": str(engine)}),
            serving("engine", config, Path(scratch)) as server,
            subprocess.Popen(receiver) as nothing_more,
        ):
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
            rank = ["-m", "tools.bench.weight_sync", "--bucket-mb", str(bucket_mb), "--rank-of", str(model)]
            places = [server.engine.url, str(engine), f"http://127.0.0.1:{port}", str(bare)]
            try:
                subprocess.run([*torchrun, *rank, *places], check=True)
            finally:
                nothing_more.kill()


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


def run_rank(path: Path, bucket_bytes: int, engine: Target, bare: Target) -> None:
    config = parse_config(
        {
            "name": "bench", "model": {"path": path, "dtype": "bfloat16"}, "parallel": LAYOUT,
            "data": {"train": "unused"}, "rollout": {"environment": "unused:Unused"},
        }
    )  # fmt: skip
    backend = start_runtime(config.model, config.parallel, 0, deterministic=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # new memory is to cost what it costs an engine
    model = read_hf_model(path)
    megatron = transformer_config(model, config.model, config.parallel)
    chunks = build_policy(model, megatron, "native")
    load_hf_weights(chunks, model, megatron, "policy")
    started = time.perf_counter()
    exporter = HFExporter(chunks, model, megatron)
    settings = WeightsConfig(bucket_bytes=bucket_bytes, sources_per_stage=SOURCES_PER_STAGE)
    plan = push_plan(exporter.weights, exporter.layout, settings)
    gatherer = Gatherer(plan, chunks, megatron)
    figures: dict[str, Any] = {"plan_seconds": time.perf_counter() - started}
    total = sum(transfer.weight.nbytes for transfer in plan.transfers)
    figures["gb"] = total / GB
    figures["bucket_bytes"] = bucket_bytes
    figures |= references(plan, total, bucket_bytes)
    figures["gather_gb_s"] = total / GB / best(lambda: [None for _ in gatherer.buckets()], PUSHES)
    token = os.environ["MEGATRON_SAO_TOKEN"]
    cases = {"SGLang": (gatherer, engine), "bare": (gatherer, bare), "ready": (Ready(plan, chunks, megatron), engine)}
    for name, (buckets, target) in cases.items():
        transport, dtype = backend.distributed_backend, megatron.params_dtype
        pusher = WeightPusher(buckets, model, settings, token, transport, path, dtype)
        pushes = [push_once(pusher, target, f"1.{number}") for number in range(PUSHES)]
        figures[name] = min(pushes, key=lambda push: push["stall"])
        pusher.close()
    if dist.get_rank() == 0:
        print(report(figures), flush=True)
    stop_runtime()


def push_once(pusher: WeightPusher, target: Target, version: str) -> dict[str, Any]:
    """One push, accounted for on rank 0; elsewhere only its stall, which is 0."""
    receiver = Receiver(target.url, target.url, target.url, 1)
    posted: dict[str, float] = {}
    plain = SourceLink.send
    pause, resume = EngineControl.pause, EngineControl.resume
    busy: list[tuple[float, float]] = []

    def timed_pause(control: EngineControl, mode: str) -> None:
        busy.append(core_seconds())
        pause(control, mode)

    def timed_resume(control: EngineControl) -> None:
        resume(control)
        busy.append(core_seconds())

    def send(link: SourceLink, bucket: Bucket) -> None:
        posted[bucket.tensors[0][0]] = time.monotonic()
        plain(link, bucket)

    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    memory, cpu = resident("VmRSS"), time.process_time()
    with (
        patch.object(SourceLink, "send", send),
        patch.multiple(EngineControl, pause=timed_pause, resume=timed_resume),
    ):
        failed = pusher.push([receiver], version)
    assert not failed, failed
    mine = {"posted": posted, "memory": resident("VmHWM") - memory, "cpu": time.process_time() - cpu}
    ranks = all_gather_json(mine, torch.device("cpu"))
    if dist.get_rank() != 0:
        return {"stall": 0.0}
    sent = [rank["posted"] for rank in ranks]
    receipts = [json.loads(line) for line in target.receipts.read_text().splitlines()]
    parts = account([s for s in sent if s], receipts[-sum(map(len, sent)) :])
    sources, others = ([rank for rank in ranks if bool(rank["posted"]) is sends] for sends in (True, False))
    (busy_before, all_before), (busy_after, all_after) = busy
    return parts | {
        "cores_busy": (busy_after - busy_before) / (all_after - all_before),
        "stall": pusher.times["stall"],
        "memory": max(rank["memory"] for rank in sources),
        "source_cpu": [rank["cpu"] for rank in sources],
        "other_cpu": [rank["cpu"] for rank in others],
    }


def core_seconds() -> tuple[float, float]:
    """Seconds that this machine's cores have worked, and those that have passed for them, in all."""
    ticks = [int(value) for value in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    idle = ticks[3] + ticks[4]
    return sum(ticks) - idle, sum(ticks)


def resident(field: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def account(sent: list[dict[str, float]], receipts: list[dict[str, Any]]) -> dict[str, Any]:
    """What the receiver did from its first bucket to its last, in seconds that add up to ``buckets``.

    Args:
        sent: for each source, when it offered each bucket, by the name of the bucket's first tensor.
        receipts: when the receiver entered the broadcast of each, had received and had loaded it, in its order.
    """
    offered = {first: time for source in sent for first, time in source.items()}
    parts = dict.fromkeys(("transfer", "load", "late", "turn_round"), 0.0)
    free = receipts[0]["entered"]  # since then the receiver has had nothing to do
    for receipt in receipts:
        late = min(max(free, offered[receipt["first"]]), receipt["entered"])
        parts["late"] += late - free
        parts["turn_round"] += receipt["entered"] - late
        parts["transfer"] += receipt["received"] - receipt["entered"]
        parts["load"] += receipt["loaded"] - receipt["received"]
        free = receipt["loaded"]
    entered = {receipt["first"]: receipt["entered"] for receipt in receipts}
    waits = [sum(max(0.0, entered[first] - time) for first, time in source.items()) for source in sent]
    return parts | {"buckets": free - receipts[0]["entered"], "count": len(receipts), "waits": waits}


def references(plan: Plan, total: int, bucket_bytes: int) -> dict[str, float]:
    """GB/s of a copy and of placing shards (rank 0 alone), and of a broadcast to one other process by bucket size."""
    figures: dict[str, float] = {}
    if dist.get_rank() == 0:
        source = torch.zeros(256 * 10**6, dtype=torch.uint8)
        target = torch.zeros_like(source)
        figures["copy_gb_s"] = source.nbytes / GB / best(lambda: target.copy_(source), 5)
        figures["convert_gb_s"] = convert_rate(plan)
    dist.barrier()
    pair = dist.new_group([0, 1])
    # All of the weights' bytes, each once: the same bucket again and again would come out of the cache.
    whole = torch.zeros(total if dist.get_rank() == 0 else 0, dtype=torch.uint8)
    for megabytes in sorted({4, 8, 16, 32, 64, 256, bucket_bytes // 10**6}):
        figures[f"broadcast_{megabytes}mb_gb_s"] = broadcast_rate(pair, whole, total, megabytes * 10**6)
    figures["new_memory_gb_s"] = broadcast_rate(pair, whole, total, bucket_bytes, reuse=False)
    return figures


def broadcast_rate(pair: dist.ProcessGroup, whole: torch.Tensor, total: int, size: int, reuse: bool = True) -> float:
    """GB/s from rank 0, which holds all of ``whole``, to rank 1 in pieces of ``size`` bytes. Collective.

    Args:
        reuse: rank 1 receives into the same memory each time.
    """

    def send() -> None:
        memory = torch.empty(size, dtype=torch.uint8)
        for start in range(0, total, size):
            nbytes = min(size, total - start)
            if dist.get_rank() == 0:
                dist.broadcast(whole[start : start + nbytes], 0, group=pair)
            else:
                dist.broadcast(memory[:nbytes] if reuse else torch.empty_like(memory[:nbytes]), 0, group=pair)
        dist.barrier(group=pair)

    seconds = best(send, 3) if dist.get_rank() < 2 else 1.0
    dist.barrier()
    return total / GB / seconds


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
    raw, size = max((value, name.split("_")[1]) for name, value in f.items() if name.startswith("broadcast_"))
    rows = [
        ("weights", f"{f['gb']:.2f} GB, {RANKS} ranks TP2 x PP2 x EP2, buckets of {f['bucket_bytes'] / 1e6:.0f} MB"),
        ("plan, agreed between the ranks", f"{f['plan_seconds']:.2f} s"),
        ("copy in memory", f"{f['copy_gb_s']:.2f} GB/s"),
        ("convert", f"{f['convert_gb_s']:.2f} GB/s = {f['convert_gb_s'] / f['copy_gb_s']:.0%} of a copy (target 50%)"),
        ("gather and convert, all sources", f"{f['gather_gb_s']:.2f} GB/s"),
        ("raw gloo broadcast, best bucket", f"{raw:.2f} GB/s ({size})"),
        ("raw gloo broadcast, this bucket", f"{f[f'broadcast_{f["bucket_bytes"] // 10**6}mb_gb_s']:.2f} GB/s"),
        ("raw gloo broadcast into new memory", f"{f['new_memory_gb_s']:.2f} GB/s = {f['new_memory_gb_s'] / raw:.0%}"),
    ]  # fmt: skip
    for name in ("SGLang", "bare", "ready"):
        rows += push_rows(name, f[name], f, raw)
    return "\n".join(f"{name:38} {value}" for name, value in rows)


def push_rows(name: str, p: dict[str, Any], f: dict[str, Any], raw: float) -> list[tuple[str, str]]:
    def rate(seconds: float) -> str:
        return f"{seconds:.2f} s, {f['gb'] / seconds:.2f} GB/s, {f['gb'] / seconds / raw:.0%} of raw"

    def list_of(seconds: list[float]) -> str:
        return ", ".join(f"{value:.2f} s" for value in seconds)

    moved, turn = p["transfer"] + p["load"], p["turn_round"] / p["count"] * 1e3
    return [
        (f"{name}: stall", f"{p['stall']:.2f} s = {p['stall'] / moved:.0%} of transfer and load (target 110%)"),
        ("  transfer: bytes moving", f"{rate(p['transfer'])} (target 80%)"),
        ("  the machine's cores were busy", f"{p['cores_busy']:.0%} of the stall"),
        ("  load", f"{p['load']:.2f} s"),
        ("  no source has a bucket yet", f"{p['late']:.2f} s"),
        ("  from one bucket to the next", f"{p['turn_round']:.2f} s, {turn:.1f} ms each"),
        ("  calls around the buckets", f"{p['stall'] - p['buckets']:.2f} s"),
        ("  first bucket to last, all in all", rate(p["buckets"])),
        ("  waits of the sources for their turn", list_of(p["waits"])),
        ("  CPU time, sources and other ranks", f"{list_of(p['source_cpu'])} and {list_of(p['other_cpu'])}"),
        (
            "  a source's memory above the model",
            f"{p['memory'] / 1e6:.0f} MB, {p['memory'] / f['bucket_bytes']:.2f} buckets",
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
