"""The policy: log-probabilities of a batch, the SAO step and the supervised step."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region

from megatron_sao.config import AlgorithmConfig
from megatron_sao.models.routing import attach_expert_choice, expert_load
from megatron_sao.trainer.logprobs import linear_logprobs, linear_support_logprobs
from megatron_sao.trainer.microbatch import MicroBatch
from megatron_sao.trainer.policy_loss import POLICY_KEYS, policy_loss, policy_metrics
from megatron_sao.trainer.trainable import LossFunction, Stats, Trainable, forward_kwargs


class Policy:
    """Trains and evaluates the policy model.

    Args:
        trainable: the model.
        vocab_size: real vocabulary, without padding.
        temperature: at which the rollouts were sampled; log-probabilities are taken at the same one.
    """

    def __init__(self, trainable: Trainable, vocab_size: int, temperature: float) -> None:
        self.trainable, self._vocab_size, self._temperature = trainable, vocab_size, temperature
        self._choices = attach_expert_choice(trainable.chunks)
        self._pushed: list[torch.Tensor] | None = None
        self.pushed_label: str | None = None

    def sft_step(self, batch: list[MicroBatch]) -> dict[str, float]:
        """One step of next-token cross-entropy over the masked tokens. Returns metrics."""

        def step(batches: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[torch.Tensor, LossFunction]:
            batch = next(batches)
            output = self._forward(model, batch, temperature=1.0)

            def loss(logprobs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Stats]:
                loss_sum = -torch.where(batch.loss_mask, logprobs.flatten(), 0.0).sum()
                count = batch.loss_mask.sum()
                return loss_sum, count.int(), {"loss_sum": loss_sum.detach(), "denominator": count}

            return output, loss

        stats = self.trainable.train_step(batch, step, ["loss_sum", "denominator"])
        return {
            "train/sft_loss": stats["loss_sum"] / max(stats["denominator"], 1.0),
            "train/policy_grad_norm": stats["grad_norm"],
            "train/policy_lr": self.trainable.learning_rate,
            "train/action_tokens": stats["denominator"],
        } | expert_load(self._choices, self.trainable.config)

    def step(
        self, minibatches: list[list[MicroBatch]], algorithm: AlgorithmConfig, own_versions: Collection[str]
    ) -> dict[str, float]:
        """One optimizer step per mini-batch on advantages that it already carries (SAO.md §2).

        Args:
            own_versions: labels of the weights being trained, to tell the engines' numerics from the policy's lag.

        Returns:
            Metrics over all mini-batches.
        """

        def step(batches: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[torch.Tensor, LossFunction]:
            batch = next(batches)
            entropies: dict[str, torch.Tensor] = {}
            output = self._forward(model, batch, self._temperature, entropies, algorithm.entropy_coef > 0)

            def loss(logprobs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Stats]:
                batch.logprobs = logprobs.detach().flatten()
                return policy_loss(logprobs.flatten(), entropies["entropy"].flatten(), batch, algorithm, own_versions)

            return output, loss

        self._fill_old_logprobs(minibatches, algorithm)
        steps = [self.trainable.train_step(batch, step, POLICY_KEYS) for batch in minibatches]
        load = expert_load(self._choices, self.trainable.config)
        return policy_metrics(steps, algorithm) | load | {"train/policy_lr": self.trainable.learning_rate}

    def remember_pushed(self, label: str) -> None:
        """Note that the engines have just been given the current weights, as ``label``: ``pi_old: latest_pushed``."""
        self.pushed_label = label
        with self.trainable.resident():
            self._pushed = [p.detach().clone() for chunk in self.trainable.chunks for p in chunk.parameters()]

    def _fill_old_logprobs(self, minibatches: list[list[MicroBatch]], algorithm: AlgorithmConfig) -> None:
        """Set ``old_logprobs`` for PPO's ratio; left out where the old policy is the one about to take its step."""
        batch = [micro for minibatch in minibatches for micro in minibatch]
        if algorithm.policy_loss != "ppo_clip":
            return
        if algorithm.pi_old == "rollout":
            old = [micro.rollout_logprobs for micro in batch]
        elif algorithm.pi_old == "latest_pushed":
            with self.trainable.resident():
                self._swap_with_pushed()
                old = self.logprobs(batch, self._temperature)
                self._swap_with_pushed()
        elif len(minibatches) > 1:
            old = self.logprobs(batch, self._temperature)
        else:
            return
        for micro, logprobs in zip(batch, old, strict=False):  # there are none before the last pipeline stage
            micro.old_logprobs = logprobs

    @torch.no_grad()
    def _swap_with_pushed(self) -> None:
        if self._pushed is None:
            self.remember_pushed("start")  # a stage begins by pushing the weights it starts from
        parameters = (p for chunk in self.trainable.chunks for p in chunk.parameters())
        for parameter, pushed in zip(parameters, self._pushed, strict=True):
            current = parameter.detach().clone()
            parameter.copy_(pushed)
            pushed.copy_(current)

    def logprobs(self, batch: list[MicroBatch], temperature: float) -> list[torch.Tensor]:
        """Current log-probability of every action token, ``[T]`` per micro-batch, on the last stage (else [])."""

        def step(batches: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[torch.Tensor, LossFunction]:
            output = self._forward(model, next(batches), temperature)
            return output, lambda logprobs: (logprobs.sum(), torch.ones((), dtype=torch.int), {"out": logprobs[0]})

        return [stats["out"] for stats in self.trainable.forward(batch, step)]

    def _forward(
        self,
        model: torch.nn.Module,
        batch: MicroBatch,
        temperature: float,
        entropies: dict[str, torch.Tensor] | None = None,
        entropy_grad: bool = False,
    ) -> torch.Tensor:
        """Log-probabilities ``[1, T]`` of action tokens, 0 elsewhere; on earlier pipeline stages hidden states."""

        def from_hidden(
            hidden_states: torch.Tensor, output_layer: Any, output_weight: torch.Tensor | None, **_: Any
        ) -> torch.Tensor:
            # The vocabulary projection is the widest layer, and only action tokens need it.
            if self.trainable.config.sequence_parallel:
                hidden = gather_from_sequence_parallel_region(hidden_states)
            else:
                hidden = copy_to_tensor_model_parallel_region(hidden_states)
            weight = output_layer.weight if output_weight is None else output_weight
            selected = batch.loss_mask.nonzero().squeeze(1)
            inputs = hidden[selected, 0], weight, batch.labels[0, selected], temperature
            if batch.support is None:
                logprobs, entropy = linear_logprobs(*inputs, self._vocab_size, entropy_grad)
            else:
                logprobs, entropy = linear_support_logprobs(*inputs, batch.support[selected])
                entropy = entropy if entropy_grad else entropy.detach()
            if entropies is not None:
                entropies["entropy"] = _spread(entropy, selected, batch.num_tokens)
            return _spread(logprobs, selected, batch.num_tokens)[None]

        return model(**forward_kwargs(batch), output_processor=from_hidden)


def _spread(values: torch.Tensor, positions: torch.Tensor, length: int) -> torch.Tensor:
    """``[n]`` values at ``positions`` of a ``[length]`` tensor of zeros."""
    return values.new_zeros(length).index_copy(0, positions, values)
