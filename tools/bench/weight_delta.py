"""How much of a model changes between two versions that are served in bfloat16."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_sao.config import RunConfig, parse_config
from megatron_sao.data.trajectory import Trajectory
from megatron_sao.models.build import build_policy
from megatron_sao.models.hf import HFModel, read_hf_model, transformer_config
from megatron_sao.trainer.microbatch import build_microbatches
from megatron_sao.trainer.policy import Policy
from megatron_sao.trainer.runtime import start_runtime, stop_runtime
from megatron_sao.trainer.trainable import Trainable
from megatron_sao.weights.delta import DeltaSize, DeltaWriter
from megatron_sao.weights.export import HFExporter
from megatron_sao.weights.gather import Gatherer
from megatron_sao.weights.load import load_hf_weights
from megatron_sao.weights.reshard import build_plan
from tests.trajectories import make_trajectory

LEARNING_RATE = 1e-6
SEQUENCES, TOKENS = 4, 128


def measure(path: Path, steps: int) -> dict[str, object]:
    """Train ``path`` on random token sequences; changed fraction and bytes of each step's delta.

    Adam's first steps move every element by about the learning rate, whatever the data: an upper bound of what later
    steps change.
    """
    config = parse_config(
        {
            "name": "delta", "model": {"path": path, "dtype": "bfloat16"}, "data": {"train": "unused"},
            "rollout": {"environment": "unused:Unused"},
        }
    )  # fmt: skip
    backend = start_runtime(config.model, config.parallel, 0, deterministic=True)
    model = read_hf_model(path)
    megatron = transformer_config(model, config.model, config.parallel)
    chunks = build_policy(model, megatron, "native")
    load_hf_weights(chunks, model, megatron, "policy")
    sizes = _train(config, model, megatron, chunks, steps, backend.device)
    stop_runtime()
    return {
        "model": path.name,
        "learning_rate": LEARNING_RATE,
        "changed_fraction": [size.changed / size.elements for size in sizes],
        "delta_bytes": [size.nbytes for size in sizes],
        "full_bytes": sizes[0].full_nbytes,
        "times_less_traffic": [size.full_nbytes / size.nbytes for size in sizes],
    }


def _train(
    config: RunConfig,
    model: HFModel,
    megatron: TransformerConfig,
    chunks: list[GPTModel],
    steps: int,
    device: torch.device,
) -> list[DeltaSize]:
    trainable = Trainable(chunks, megatron, config.rl.policy_optimizer, steps, config.parallel)
    assert config.rl.policy_optimizer.lr == LEARNING_RATE
    trainable.reload_main_parameters()
    policy = Policy(trainable, model.vocab_size, temperature=1.0)
    exporter = HFExporter(chunks, model, megatron)
    gatherer = Gatherer(build_plan(exporter.weights, exporter.layout, 2**28, (0,)), chunks, megatron)
    writer, rng, sizes = DeltaWriter(), np.random.default_rng(0), []
    for number, bucket in enumerate(gatherer.buckets()):
        writer.remember(number, bucket)
    for step in range(steps):
        batch = [_trajectory(rng, model.vocab_size, f"{step}-{i}") for i in range(SEQUENCES)]
        policy.sft_step(build_microbatches(batch, 0, 1, SEQUENCES * TOKENS, 1, device))
        with tempfile.TemporaryDirectory() as directory:
            parts = [writer.write(Path(directory), 0, n, b) for n, b in enumerate(gatherer.buckets())]
        sizes.append(sum(parts, DeltaSize()))
    return sizes


def _trajectory(rng: np.random.Generator, vocab_size: int, name: str) -> Trajectory:
    mask = np.ones(TOKENS, np.uint8)
    mask[0] = 0
    return make_trajectory(
        id=name,
        token_ids=rng.integers(0, vocab_size, TOKENS, np.int32),
        loss_mask=mask,
        logprobs=np.zeros(TOKENS, np.float32),
        rewards=np.zeros(TOKENS, np.float32),
    )
