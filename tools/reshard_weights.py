"""Plan, push, verify and reshard weights outside of a run.

    python tools/reshard_weights.py plan --hf models/glm-5.2 --world-size 256 --tp 4 --pp 8 --ep 32 \\
        --pp-first-layers 14 --pp-last-layers 16 --engines 16 --engine-tp 8 --bandwidth 50
    python tools/reshard_weights.py push --hf models/trained --engine http://node7:30000 --engine-tp 8 --version 3.120
    python tools/reshard_weights.py verify --hf models/trained --engine http://node7:30000
    python tools/reshard_weights.py reshard --megatron runs/air/checkpoints/rl-100 --hf models/glm-4.5-air \\
        --out models/trained-tp8 --tp 8 --ep 8

`plan` needs no weights, only config.json. `push` and `verify` read the engines' key from MEGATRON_SAO_TOKEN. `push`
loads the model under the layout given, on ranks that it starts itself, and verifies what it has pushed if SGLang's
layout of the model is known. `reshard` writes a Megatron checkpoint anew, so that ranks of the given layout read the
fewest bytes. It goes by way of a Hugging Face copy, OUT.hf, which it removes when done: the disk must hold the weights
twice. Exit code 2 with a sentence on failure.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from megatron_sao.config import ConfigError, ModelConfig, ParallelConfig, WeightsConfig
from megatron_sao.convert import hf_to_megatron, megatron_to_hf
from megatron_sao.convert.options import add_layout, add_options, byte_size, layout_of, tool_parser
from megatron_sao.convert.ranks import run_tool
from megatron_sao.models.backend import Backend
from megatron_sao.models.build import build_policy
from megatron_sao.models.hf import read_hf_model, transformer_config
from megatron_sao.models.mapping import entries
from megatron_sao.plan.oracle import tensors_on_disk
from megatron_sao.trainer.runtime import set_layout
from megatron_sao.weights.export import HFExporter
from megatron_sao.weights.gather import Gatherer, trainer_layout
from megatron_sao.weights.hf_files import HFTensors
from megatron_sao.weights.link import EngineControl, PushError
from megatron_sao.weights.load import load_hf_weights
from megatron_sao.weights.publish import Receiver
from megatron_sao.weights.push import WeightMismatch, WeightPusher, push_plan
from megatron_sao.weights.reshard import Layout, Plan, Traffic, Weight, broadcast_traffic, p2p_traffic
from megatron_sao.weights.verify import CHECKED_MODEL_TYPES, EngineChecksums, differences

GB = 1e9


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return COMMANDS[options.command](options)
    except (ConfigError, PushError, WeightMismatch) as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        return 2


def plan(options: argparse.Namespace) -> int:
    """Print who sends what, and the lower bounds."""
    started = time.monotonic()
    model = read_hf_model(options.hf)
    sizes = layout_of(options).model_dump(include={"tp", "pp", "ep", "etp", "pp_first_layers", "pp_last_layers"})
    parallel = ParallelConfig(**sizes, world_size=options.world_size, sequence_parallel=options.tp > 1)
    config = transformer_config(model, ModelConfig(path=options.hf, dtype="bfloat16"), parallel)
    layout = trainer_layout(model, config, options.world_size)
    shapes, _ = tensors_on_disk(options.hf)
    weights = [
        Weight(
            entry,
            tuple(shapes[name] for name in entry.hf),
            torch.float32 if entry.name.endswith("router.expert_bias") else torch.bfloat16,
            config.num_query_groups or 1,
        )
        for entry in entries(model, config)
    ]
    settings = WeightsConfig(bucket_bytes=options.bucket_bytes, sources_per_stage=options.sources_per_stage)
    made = push_plan(weights, layout, settings)
    tps = [options.engine_tp] * options.engines
    seconds = time.monotonic() - started
    report = _report(made, layout, tps, options.bandwidth * GB, options.engine_bandwidth * GB) | {"seconds": seconds}
    print(json.dumps(report) if options.json else _text(report))
    return 0


def _report(made: Plan, layout: Layout, tps: list[int], trainer: float, engine: float) -> dict:
    total = sum(transfer.weight.nbytes for transfer in made.transfers)
    receivers = {"broadcast": broadcast_traffic(made, tps), "p2p": p2p_traffic(made, tps)}
    return {
        "weights_gb": total / GB,
        "transfers": len(made.transfers),
        "sources": list(made.sources),
        "rounds": made.rounds,
        "largest_bucket_gb": max(sum(t.weight.nbytes for t in b) for bs in made.buckets.values() for b in bs) / GB,
        "ranks": layout.world_size,
    } | {name: _bound(traffic, trainer, engine) for name, traffic in receivers.items()}


def _bound(traffic: Traffic, trainer: float, engine: float) -> dict:
    seconds, link = traffic.lower_bound(trainer, engine)
    return {
        "gathered_gb_per_rank": max(traffic.gathered.values(), default=0) / GB,
        "sent_gb_per_rank": max(traffic.sent.values(), default=0) / GB,
        "received_gb_per_engine_rank": max(traffic.received) / GB,
        "lower_bound_seconds": seconds,
        "busiest_link": link,
    }


def _text(report: dict) -> str:
    lines = [
        f"{report['weights_gb']:.1f} GB in {report['transfers']} parameters, {report['rounds']} rounds of buckets of "
        f"at most {report['largest_bucket_gb']:.2f} GB; planned in {report['seconds']:.1f} s",
        f"{len(report['sources'])} of {report['ranks']} ranks send: {report['sources']}",
    ]
    for name, receiver in (("broadcast", "as stock SGLang receives"), ("p2p", "to a receiver of slices, hypothetical")):
        bound = report[name]
        lines += [
            f"{name}, {receiver}: at least {bound['lower_bound_seconds']:.2f} s ({bound['busiest_link']})",
            f"  a rank gives up to {bound['gathered_gb_per_rank']:.2f} GB to sources and sends up to "
            f"{bound['sent_gb_per_rank']:.2f} GB; a rank of an engine receives "
            f"{bound['received_gb_per_engine_rank']:.2f} GB",
        ]
    return "\n".join(lines)


def push(options: argparse.Namespace) -> int:
    """Load the model under a layout and push it."""

    def work(parallel: ParallelConfig, backend: Backend) -> int:
        model = read_hf_model(options.hf)
        config = transformer_config(model, ModelConfig(path=options.hf, dtype=options.dtype), parallel)
        chunks = build_policy(model, config, "native")
        load_hf_weights(chunks, model, config, "policy")
        exporter = HFExporter(chunks, model, config)
        verified = int(model.model_type in CHECKED_MODEL_TYPES)
        settings = WeightsConfig(bucket_bytes=options.bucket_bytes, verify_every=verified, timeout=options.timeout)
        made = push_plan(exporter.weights, exporter.layout, settings)
        pusher = WeightPusher(
            Gatherer(made, chunks, config), model, settings, _token(), backend.distributed_backend,
            Path("unused"), getattr(torch, options.dtype),
        )  # fmt: skip
        receivers = [Receiver(url, url, url, options.engine_tp, fresh=True) for url in options.engine]
        failed = pusher.push(receivers, options.version)
        pusher.close()
        if failed:
            raise ConfigError("; ".join(failed.values()))
        return 0

    return run_tool(lambda: layout_of(options), options.hf, work)


def verify(options: argparse.Namespace) -> int:
    """Compare engines with a directory."""
    model = read_hf_model(options.hf)
    config = transformer_config(model, ModelConfig(path=options.hf), ParallelConfig())
    source = HFTensors(options.hf, model.fp8_block)
    differs = False
    for url in options.engine:
        reported = EngineControl(url, _token(), options.timeout).checksums()
        expected = EngineChecksums(model, len(reported), getattr(torch, options.dtype))
        for entry in entries(model, config):
            for name in entry.hf:
                expected.add(name, source[name])
        wrong = differences(expected.result(), reported)
        differs |= bool(wrong)
        print(f"{url}: {', '.join(wrong) if wrong else f'holds {options.hf}, {len(reported[0])} tensors'}")
    return int(differs)


def reshard(options: argparse.Namespace) -> int:
    """Rewrite a Megatron checkpoint for another layout, by way of a temporary Hugging Face copy on disk."""
    between = options.out.with_name(options.out.name + ".hf")

    def work(parallel: ParallelConfig, _backend: Backend) -> int:
        whole = ParallelConfig(world_size=parallel.world_size, nproc_per_node=parallel.world_size)
        set_layout(whole, seed=0)  # the way out reads whole tensors, the way in divides them
        megatron_to_hf.convert(options.megatron, between, options.hf, "source", options.shard_size)
        set_layout(parallel, seed=0)
        hf_to_megatron.convert(between, options.out, parallel, options.shard_size)
        if int(os.environ.get("RANK", 0)) == 0:
            shutil.rmtree(between)
        return 0

    return run_tool(lambda: layout_of(options), options.megatron, work)


COMMANDS = {"plan": plan, "push": push, "verify": verify, "reshard": reshard}


def _token() -> str:
    if "MEGATRON_SAO_TOKEN" not in os.environ:
        raise ConfigError("MEGATRON_SAO_TOKEN is not set; it holds the engines' key")
    return os.environ["MEGATRON_SAO_TOKEN"]


def _parser() -> argparse.ArgumentParser:
    parser = tool_parser(__doc__)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands = {
        name: subparsers.add_parser(
            name, help=run.__doc__, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        for name, run in COMMANDS.items()
    }
    for name in ("plan", "push", "verify"):
        add_options(commands[name], "--hf")
    for name in ("plan", "push", "reshard"):
        add_layout(commands[name])
    for name in ("plan", "push"):
        commands[name].add_argument("--engine-tp", type=int, default=1, help="ranks of each engine (default 1)")
        commands[name].add_argument("--bucket-bytes", type=byte_size, default="256MB", help="default 256MB")
    for name in ("push", "verify"):
        commands[name].add_argument("--engine", action="append", required=True, help="URL of a server; repeatable")
        commands[name].add_argument(
            "--dtype", choices=["float32", "bfloat16"], default="bfloat16", help="in which it serves (default bfloat16)"
        )
        commands[name].add_argument("--timeout", type=float, default=300.0, help="seconds of one call (default 300)")
    commands["push"].add_argument("--version", required=True, help="label of the weights, INCARNATION.NUMBER")
    commands["plan"].add_argument("--world-size", type=int, required=True, help="trainer ranks")
    commands["plan"].add_argument("--engines", type=int, default=1, help="how many (default 1)")
    commands["plan"].add_argument("--sources-per-stage", type=int, default=1, help="default 1")
    for side in ("bandwidth", "engine-bandwidth"):
        commands["plan"].add_argument(f"--{side}", type=float, default=50.0, help="GB/s per rank (default 50)")
    commands["plan"].add_argument("--json", action="store_true", help="JSON instead of text")
    add_options(commands["reshard"], "--megatron", "--out", optional=("--hf", "--shard-size"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
