"""The critic: values of a batch and the value step."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel

from megatron_sao.algorithm import value_loss
from megatron_sao.config import AlgorithmConfig, ConfigError
from megatron_sao.distributed import all_gather_json
from megatron_sao.trainer.microbatch import MicroBatch
from megatron_sao.trainer.trainable import LossFunction, Stats, Trainable, forward_kwargs, reduce_stats


def freeze_critic(chunks: list[GPTModel], trainable: list[str]) -> None:
    """Let only parameters whose Megatron name matches one of the regexes train (SAO.md §4).

    Raises:
        ConfigError: on no rank does a single parameter match, so the patterns do not fit the model. Collective, since
            a pipeline stage may well hold none.
    """
    anywhere = [freeze_all_but(chunks, trainable)]
    if dist.is_initialized():
        anywhere = all_gather_json(anywhere[0], next(chunks[0].parameters()).device)
    if not any(anywhere):
        raise ConfigError(f"algorithm.critic_trainable = {trainable}: no parameter of the critic matches")


def freeze_all_but(chunks: list[GPTModel], trainable: list[str]) -> bool:
    """What :func:`freeze_critic` does to this rank's parameters. Returns whether any of them trains."""
    patterns = [re.compile(pattern) for pattern in trainable]
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            parameter.requires_grad_(any(pattern.search(name) for pattern in patterns))
    return any(parameter.requires_grad for chunk in chunks for parameter in chunk.parameters())


class Critic:
    """Trains and evaluates the value model."""

    def __init__(self, trainable: Trainable) -> None:
        self.trainable = trainable

    def fill_values(self, batch: list[MicroBatch]) -> None:
        """Set ``values`` of every micro-batch, detached, on the last pipeline stage."""

        def step(batches: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[torch.Tensor, LossFunction]:
            output = model(**forward_kwargs(next(batches)))
            return output, lambda values: (values.sum(), torch.ones((), dtype=torch.int), {"out": values.flatten()})

        stats = self.trainable.forward(batch, step)
        for micro, values in zip(batch, stats, strict=False):  # no stats before the last stage
            micro.values = values["out"].detach()

    def step(self, batch: list[MicroBatch], algorithm: AlgorithmConfig) -> dict[str, float]:
        """One optimizer step of the value loss on targets that the batch already carries. Returns metrics."""

        def step(batches: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[torch.Tensor, LossFunction]:
            batch = next(batches)
            output = model(**forward_kwargs(batch))

            def loss(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Stats]:
                loss_sum, stats = value_loss(
                    values.flatten(), batch.returns, batch.value_mask, batch.values, algorithm.value_clip
                )
                count = stats["num_action_tokens"]
                sums = {"loss_sum": loss_sum.detach(), "denominator": count, "clipped": stats["clipped"]}
                return loss_sum, count.int(), sums

            return output, loss

        stats = self.trainable.train_step(batch, step, ["loss_sum", "denominator", "clipped"])
        tokens = max(stats["denominator"], 1.0)
        return {
            "train/value_loss": stats["loss_sum"] / tokens,
            "train/value_clipped_fraction": stats["clipped"] / tokens,
            "train/critic_grad_norm": stats["grad_norm"],
            "train/critic_lr": self.trainable.learning_rate,
        }

    def explained_variance(self, batch: list[MicroBatch]) -> dict[str, float]:
        """Explained variance of the values over the global batch; 0 where the returns do not vary. Collective."""
        pairs = []
        for micro in batch:
            if micro.returns is not None:
                returns = micro.returns[micro.loss_mask].double()
                pairs.append((returns, returns - micro.values[micro.loss_mask].double()))

        def summed(terms: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]) -> list[float]:
            keys = ["count", "returns", "errors"]
            stats = [dict(zip(keys, (r.new_tensor(r.numel()), *terms(r, e)), strict=True)) for r, e in pairs]
            return list(reduce_stats(stats, keys, self.trainable.device).values())

        # in two passes: E[x^2] - E[x]^2 cancels where the returns are large and hardly vary
        count, returns_sum, errors_sum = summed(lambda r, e: (r.sum(), e.sum()))
        returns_mean, errors_mean = returns_sum / max(count, 1.0), errors_sum / max(count, 1.0)
        _, variance, error = summed(lambda r, e: ((r - returns_mean).square().sum(), (e - errors_mean).square().sum()))
        varies = variance > 1e-20 * max(count, 1.0) * returns_mean**2
        return {"train/explained_variance": 1 - error / variance if varies else 0.0}
