"""Held-out success, and whether the engines compute what the trainer computes."""

from __future__ import annotations

import numpy as np
import torch

from megatron_sao.config import RunConfig
from megatron_sao.data.trajectory import Trajectory
from megatron_sao.trainer.microbatch import MicroBatch
from megatron_sao.trainer.policy import Policy
from megatron_sao.trainer.rollout_metrics import success
from megatron_sao.trainer.trainable import reduce_stats

EVAL_TEMPERATURE = 1.0  # whatever the rollouts are sampled at


class EvaluationError(RuntimeError):
    """The engines do not serve the policy that the trainer holds, or too little was measured to tell."""


def evaluate(
    trajectories: list[Trajectory], batch: list[MicroBatch], policy: Policy, version: str, config: RunConfig
) -> dict[str, float]:
    """Metrics of one evaluation. Collective.

    Args:
        trajectories: finished held-out episodes, on every rank.
        batch: this rank's share of them.
        version: the weight version they must come from, which is the policy's current one.

    Raises:
        EvaluationError: fewer same-version tokens than ``eval.mismatch_min_tokens``, or a mean difference between the
            trainer's and the engines' log-probabilities above ``eval.mismatch_limit``.
    """
    played = [t for t in trajectories if t.failure is None]
    rate = float(np.mean([success(t) for t in played])) if played else 0.0
    metrics = {
        "eval/success_rate": rate,
        "eval/success_stderr": (rate * (1 - rate) / max(len(played), 1)) ** 0.5,
        "eval/reward_mean": float(np.mean([t.total_reward for t in played])) if played else 0.0,
        "eval/prompts": len(played),
        "eval/unfinished": config.eval.prompts - len(played),
        "eval/turns_mean": float(np.mean([sum(k == "action" for k, *_ in t.turns) for t in played])) if played else 0.0,
    }
    return metrics | _mismatch(batch, policy, version, config)


def _mismatch(batch: list[MicroBatch], policy: Policy, version: str, config: RunConfig) -> dict[str, float]:
    stats = []
    logprobs = policy.logprobs(batch, EVAL_TEMPERATURE)
    for micro, current in zip(batch, logprobs, strict=False):  # there are none before the last stage
        same = micro.sampled_under([version])
        difference = (current - micro.rollout_logprobs)[same].abs().double()
        stats.append(
            {
                "tokens": same.sum(),
                "difference": difference.sum(),
                "difference_max": difference.max() if difference.numel() else torch.zeros((), dtype=torch.float64),
            }
        )
    device = batch[0].tokens.device
    total = reduce_stats(stats, ["tokens", "difference", "difference_max"], device)
    tokens, limit = int(total["tokens"]), config.eval.mismatch_limit
    mean = total["difference"] / max(tokens, 1)
    if tokens < config.eval.mismatch_min_tokens:
        raise EvaluationError(
            f"only {tokens} evaluation tokens come from version {version}; at least eval.mismatch_min_tokens = "
            f"{config.eval.mismatch_min_tokens} are needed to compare trainer and engines"
        )
    if limit is not None and not mean <= limit:
        raise EvaluationError(
            f"trainer and engines differ by {mean:.3g} in mean log-probability over {tokens} tokens of version "
            f"{version}, more than eval.mismatch_limit = {limit}: the engines do not serve the policy's weights"
        )
    return {
        "mismatch/mean_abs_logprob_diff": mean,
        "mismatch/max_abs_logprob_diff": total["difference_max"],
        "mismatch/tokens": tokens,
    }
