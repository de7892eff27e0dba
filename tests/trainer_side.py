"""A trainer of one rank for tests against real servers: a policy whose weights can be changed and pushed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megatron_sao.config import ModelConfig, ParallelConfig, WeightsConfig
from megatron_sao.models.build import build_policy
from megatron_sao.models.hf import read_hf_model, transformer_config
from megatron_sao.weights.export import HFExporter
from megatron_sao.weights.gather import Gatherer
from megatron_sao.weights.load import load_hf_weights
from megatron_sao.weights.publish import Receiver
from megatron_sao.weights.push import WeightPusher
from megatron_sao.weights.reshard import build_plan
from tests.serving import TOKEN, Server

BUCKETS = 6  # or a few more


class PolicySide:
    """The weights of the model in ``path``, in the test process."""

    def __init__(self, path: Path, dtype: str = "float32") -> None:
        self.model = read_hf_model(path)
        self.config = transformer_config(self.model, ModelConfig(path=path, dtype=dtype), ParallelConfig())
        self.chunks = build_policy(self.model, self.config, "native")
        load_hf_weights(self.chunks, self.model, self.config, "policy")
        self.exporter = HFExporter(self.chunks, self.model, self.config)

    def reset(self) -> None:
        load_hf_weights(self.chunks, self.model, self.config, "policy")

    @torch.no_grad()
    def perturb(self, seed: int, fraction: float = 1.0) -> None:
        """Add noise of a fiftieth to a share of the elements of every parameter."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.chunks[0].parameters():
            noise = 0.02 * torch.randn(parameter.shape, generator=generator)
            chosen = torch.rand(parameter.shape, generator=generator) < fraction
            parameter.add_(torch.where(chosen, noise, 0.0).to(parameter.dtype))

    def gatherer(self) -> Gatherer:
        weights = self.exporter.weights
        nbytes = sum(weight.nbytes for weight in weights) // BUCKETS
        plan = build_plan(weights, self.exporter.layout, nbytes, sources=(0,))
        assert plan.rounds >= BUCKETS
        return Gatherer(plan, self.chunks, self.config)

    def pusher(
        self, directory: Path, gatherer: Gatherer | None = None, served: torch.dtype = torch.float32, **settings: Any
    ) -> WeightPusher:
        """Verifies every push, unless ``settings`` (of ``weights``) say otherwise."""
        settings = WeightsConfig(**({"verify_every": 1, "timeout": 60} | settings))
        return WeightPusher(gatherer or self.gatherer(), self.model, settings, TOKEN, "gloo", directory, served)

    def save(self, directory: Path) -> Path:
        """A directory that ``transformers`` loads."""
        directory.mkdir(parents=True)
        save_file(dict(self.exporter.tensors()), directory / "model.safetensors", {"format": "pt"})
        (directory / "config.json").write_text((self.model.path / "config.json").read_text())
        return directory


def receiver(server: Server, fresh: bool = False) -> Receiver:
    engine = server.engine
    return Receiver(f"{engine.id} {engine.url}", engine.id, engine.url, engine.tp, fresh)
