"""The policy: log-probabilities of a batch, the SAO step and the supervised step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megatron_sao.algorithm import dis_policy_loss
from megatron_sao.config import AlgorithmConfig
from megatron_sao.trainer.logprobs import mask_vocab_padding, token_entropy, token_logprobs
from megatron_sao.trainer.microbatch import MicroBatch
from megatron_sao.trainer.trainable import LossFunction, Stats, Trainable, forward_kwargs, reduce_stats

_DIS_KEYS = [
    "num_action_tokens", "accepted", "below", "above", "nonfinite", "rho_sum", "rho_max", "abs_logprob_diff_sum",
    "accepted_rho_sum", "accepted_rho_sq_sum",
]  # fmt: skip


class Policy:
    """Trains and evaluates the policy model.

    Args:
        trainable: the model.
        vocab_size: real vocabulary, without padding.
        temperature: at which the rollouts were sampled; log-probabilities are taken at the same one.
    """

    def __init__(self, trainable: Trainable, vocab_size: int, temperature: float) -> None:
        self.trainable, self._vocab_size, self._temperature = trainable, vocab_size, temperature
        self._device = next(trainable.chunks[0].parameters()).device

    def sft_step(self, batch: list[MicroBatch]) -> dict[str, float]:
        """One step of next-token cross-entropy over the masked tokens. Returns metrics."""

        def step(batches: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[torch.Tensor, LossFunction]:
            batch = next(batches)
            output = self._forward(model, batch, temperature=1.0)

            def loss(logprobs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Stats]:
                loss_sum = -torch.where(batch.loss_mask, logprobs.flatten(), 0.0).sum()
                count = batch.loss_mask.sum()
                return loss_sum, count.int(), {"loss_sum": loss_sum.detach(), "num_action_tokens": count}

            return output, loss

        per_microbatch, grad_norm = self.trainable.train_step(batch, step)
        stats = reduce_stats(per_microbatch, ["loss_sum", "num_action_tokens"], self._device)
        return {
            "train/sft_loss": stats["loss_sum"] / stats["num_action_tokens"],
            "train/policy_grad_norm": grad_norm,
            "train/policy_lr": self.trainable.learning_rate,
            "train/action_tokens": stats["num_action_tokens"],
        }

    def step(self, batch: list[MicroBatch], algorithm: AlgorithmConfig) -> dict[str, float]:
        """One SAO policy step on advantages that the batch already carries (SAO.md §2). Returns metrics."""

        def step(batches: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[torch.Tensor, LossFunction]:
            batch = next(batches)
            entropies: dict[str, torch.Tensor] = {}
            output = self._forward(model, batch, self._temperature, entropies, algorithm.entropy_coef > 0)

            def loss(logprobs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Stats]:
                return _sao_loss(logprobs.flatten(), entropies["entropy"].flatten(), batch, algorithm)

            return output, loss

        per_microbatch, grad_norm = self.trainable.train_step(batch, step)
        keys = ["loss_sum", "denominator", "entropy_sum", "kl_sum", *_DIS_KEYS]
        stats = reduce_stats(per_microbatch, keys, self._device)
        return _policy_metrics(stats) | {
            "train/policy_grad_norm": grad_norm,
            "train/policy_lr": self.trainable.learning_rate,
        }

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
            # The vocabulary projection is the widest layer and only action tokens need it. Under sequence parallelism
            # the hidden states are spread over ranks and stay whole.
            selected = torch.arange(batch.num_tokens, device=hidden_states.device)
            if not self.trainable.config.sequence_parallel:
                selected = batch.loss_mask.nonzero().squeeze(1)
                hidden_states = hidden_states[selected]
            logits, _ = output_layer(hidden_states, weight=output_weight)
            logits = mask_vocab_padding(logits, self._vocab_size)
            if entropies is not None:
                with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
                    entropies["entropy"] = _spread(token_entropy(logits, temperature), selected, batch.num_tokens)
            labels = batch.labels[0, selected][:, None]
            return _spread(token_logprobs(logits, labels, temperature), selected, batch.num_tokens)[None]

        return model(**forward_kwargs(batch), output_processor=from_hidden)


def _spread(values: torch.Tensor, positions: torch.Tensor, length: int) -> torch.Tensor:
    """``[n, 1]`` values at ``positions`` of a ``[length]`` tensor of zeros."""
    return values.new_zeros(length).index_copy(0, positions, values[:, 0])


def _sao_loss(
    logprobs: torch.Tensor, entropy: torch.Tensor, batch: MicroBatch, algorithm: AlgorithmConfig
) -> tuple[torch.Tensor, torch.Tensor, Stats]:
    """Summed loss, its denominator in this micro-batch, statistics."""
    loss_sum, stats = dis_policy_loss(
        logprobs, batch.rollout_logprobs, batch.advantages, batch.loss_mask, algorithm.eps_low, algorithm.eps_high
    )
    entropy_sum = torch.where(batch.loss_mask, entropy, 0.0).sum()
    # k3 estimator of KL(pi_theta || rollout policy) on sampled tokens: exp(-r) - 1 + r with r = l - b
    usable = batch.loss_mask & batch.rollout_logprobs.isfinite()
    log_ratio = torch.where(usable, logprobs - torch.where(usable, batch.rollout_logprobs, 0.0), 0.0)
    kl_sum = ((-log_ratio).exp() - 1 + log_ratio).sum()
    if algorithm.kl_coef > 0:
        loss_sum = loss_sum + algorithm.kl_coef * kl_sum
    if algorithm.entropy_coef > 0:
        loss_sum = loss_sum - algorithm.entropy_coef * entropy_sum
    denominator = {
        "action_tokens": stats["num_action_tokens"],
        "accepted_tokens": stats["accepted"],
        "trajectories": torch.tensor(len(batch.trajectories), device=logprobs.device),
    }[algorithm.loss_denominator]
    sums = {"loss_sum": loss_sum, "denominator": denominator, "entropy_sum": entropy_sum, "kl_sum": kl_sum}
    return loss_sum, denominator.int(), {k: v.detach() for k, v in (sums | stats).items()}


def _policy_metrics(stats: dict[str, float]) -> dict[str, float]:
    tokens = max(stats["num_action_tokens"], 1.0)
    finite = max(stats["num_action_tokens"] - stats["nonfinite"], 1.0)
    squares = stats["accepted_rho_sq_sum"]
    return {
        "train/policy_loss": stats["loss_sum"] / max(stats["denominator"], 1.0),
        "train/entropy": stats["entropy_sum"] / tokens,
        "train/kl": stats["kl_sum"] / tokens,
        "train/action_tokens": stats["num_action_tokens"],
        "dis/accepted_fraction": stats["accepted"] / tokens,
        "dis/below_fraction": stats["below"] / tokens,
        "dis/above_fraction": stats["above"] / tokens,
        "dis/nonfinite_fraction": stats["nonfinite"] / tokens,
        "dis/rho_mean": stats["rho_sum"] / finite,
        "dis/rho_max": stats["rho_max"],
        "dis/mean_abs_logprob_diff": stats["abs_logprob_diff_sum"] / finite,
        "dis/effective_sample_fraction": stats["accepted_rho_sum"] ** 2 / squares / tokens if squares else 0.0,
    }
