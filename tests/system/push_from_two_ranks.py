"""Run under torchrun with two expert-parallel ranks: push a model's weights into an engine, both as sources.

torchrun --nproc-per-node 2 -m tests.system.push_from_two_ranks MODEL URL DIRECTORY VERSION [die|unverified]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch.distributed as dist

from megatron_sao.config import WeightsConfig
from megatron_sao.models.build import build_policy
from megatron_sao.models.hf import read_hf_model, transformer_config
from megatron_sao.trainer.runtime import start_runtime, stop_runtime
from megatron_sao.weights.export import HFExporter
from megatron_sao.weights.gather import Gatherer
from megatron_sao.weights.load import load_hf_weights
from megatron_sao.weights.publish import Receiver
from megatron_sao.weights.push import WeightPusher, push_plan
from tests.distributed.offline import offline_config
from tests.serving import TOKEN

BUCKET_BYTES = 64 * 1024


class Mortal(Gatherer):
    def buckets(self):
        for number, bucket in enumerate(super().buckets()):
            if number == 1:
                print(f"rank {dist.get_rank()} dies after its first bucket", flush=True)
                os._exit(9)
            yield bucket


def main(path: Path, url: str, directory: Path, version: str, gatherer: type[Gatherer], verify_every: int) -> None:
    config = offline_config(path, parallel={"world_size": 2, "nproc_per_node": 2, "ep": 2})
    backend = start_runtime(config.model, config.parallel, config.seed, deterministic=True)
    model = read_hf_model(path)
    megatron = transformer_config(model, config.model, config.parallel)
    chunks = build_policy(model, megatron, "native")
    load_hf_weights(chunks, model, megatron, "policy")
    exporter = HFExporter(chunks, model, megatron)
    settings = WeightsConfig(bucket_bytes=BUCKET_BYTES, sources_per_stage=2, verify_every=verify_every, timeout=60)
    plan = push_plan(exporter.weights, exporter.layout, settings)
    assert all(plan.buckets.values()), "both ranks send"
    experts = [transfer for transfer in plan.transfers if transfer.weight.entry.expert]
    apart = all(transfer.holders == (transfer.source,) for transfer in experts)
    assert apart is (verify_every == 0), "unless they are to be verified, experts are sent by whoever holds them"
    dtype, backend_name = megatron.params_dtype, backend.distributed_backend
    pusher = WeightPusher(gatherer(plan, chunks, megatron), model, settings, TOKEN, backend_name, directory, dtype)
    failed = pusher.push([Receiver("only", "only", url, 1)], version)
    assert not failed, failed
    pusher.close()
    stop_runtime()


if __name__ == "__main__":
    path, url, directory, version, *rest = sys.argv[1:]
    gatherer = Mortal if rest == ["die"] else Gatherer
    main(Path(path), url, Path(directory), version, gatherer, verify_every=int(rest != ["unverified"]))
