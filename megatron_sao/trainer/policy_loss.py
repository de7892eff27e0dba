"""What the policy step minimises in one micro-batch, and the metrics it leaves."""

from __future__ import annotations

from collections.abc import Collection

import torch

from megatron_sao.algorithm import (
    RATIO_EDGES,
    dis_policy_loss,
    kl_to_rollout_policy,
    ppo_clip_policy_loss,
    ratio_histogram,
)
from megatron_sao.config import AlgorithmConfig
from megatron_sao.trainer.microbatch import MicroBatch
from megatron_sao.trainer.trainable import Stats

_PPO_KEYS = ("clipped", "ratio_sum", "ratio_max", "ratio_nonfinite")
RATIO_BINS = [f"rho_bin_{upper}" for upper in (*RATIO_EDGES, "inf")]
POLICY_KEYS = [
    "loss_sum", "denominator", "entropy_sum", "kl_sum", "num_action_tokens",
    "accepted", "below", "above", "nonfinite", "rho_sum", "rho_max", "accepted_rho_sum",
    "accepted_rho_sq_sum", "own_tokens", "own_diff_sum", "older_tokens", "older_diff_sum",
    *_PPO_KEYS, *RATIO_BINS,
]  # fmt: skip


def policy_loss(
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
    batch: MicroBatch,
    algorithm: AlgorithmConfig,
    own_versions: Collection[str],
) -> tuple[torch.Tensor, torch.Tensor, Stats]:
    """Summed loss, its denominator in this micro-batch, and the statistics :data:`POLICY_KEYS`.

    Args:
        logprobs, entropy: float [T] of the current policy at the sampling temperature.
        batch: with ``advantages``, and ``old_logprobs`` where they are not the current ones.
        own_versions: labels of the weights being trained.
    """
    mask = batch.loss_mask
    loss_sum, stats = dis_policy_loss(
        logprobs, batch.rollout_logprobs, batch.advantages, mask, algorithm.eps_low, algorithm.eps_high
    )
    stats |= dict.fromkeys(_PPO_KEYS, torch.zeros((), device=logprobs.device))
    if algorithm.policy_loss == "ppo_clip":
        old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        loss_sum, ppo = ppo_clip_policy_loss(
            logprobs, old, batch.advantages, mask, algorithm.clip_low, algorithm.clip_high
        )
        ppo["ratio_nonfinite"] = ppo["nonfinite"]
        stats |= {key: ppo[key] for key in _PPO_KEYS}  # the others still describe rho

    kl_sum = kl_to_rollout_policy(logprobs, batch.rollout_logprobs, mask, algorithm.eps_low, algorithm.eps_high)
    entropy_sum = torch.where(mask, entropy, 0.0).sum()
    if algorithm.kl_coef > 0:
        loss_sum = loss_sum + algorithm.kl_coef * kl_sum
    if algorithm.entropy_coef > 0:
        loss_sum = loss_sum - algorithm.entropy_coef * entropy_sum

    denominator = {
        "action_tokens": stats["num_action_tokens"],
        "accepted_tokens": stats["accepted"],
        "trajectories": torch.tensor(batch.num_trajectories, device=logprobs.device),
    }[algorithm.loss_denominator]
    log_ratio = logprobs.detach().double() - batch.rollout_logprobs.double()
    difference = log_ratio.abs()
    finite = mask & difference.isfinite()
    own = batch.sampled_under(own_versions) & finite
    older = finite & ~own
    stats |= dict(zip(RATIO_BINS, ratio_histogram(log_ratio, mask), strict=True))
    stats |= {
        "loss_sum": loss_sum,
        "denominator": denominator,
        "entropy_sum": entropy_sum,
        "kl_sum": kl_sum,
        "own_tokens": own.sum(),
        "own_diff_sum": torch.where(own, difference, 0.0).sum(),
        "older_tokens": older.sum(),
        "older_diff_sum": torch.where(older, difference, 0.0).sum(),
    }
    return loss_sum, denominator.int(), {key: stats[key].detach() for key in POLICY_KEYS}


def policy_metrics(steps: list[dict[str, float]], algorithm: AlgorithmConfig) -> dict[str, float]:
    """Metrics of a batch from the reduced statistics of its optimizer steps, one per mini-batch."""
    s = {key: (max if key.endswith("_max") else sum)(step[key] for step in steps) for key in POLICY_KEYS}
    tokens = max(s["num_action_tokens"], 1.0)
    finite = max(s["num_action_tokens"] - s["nonfinite"], 1.0)
    squares = s["accepted_rho_sq_sum"]
    metrics = {
        "train/policy_loss": s["loss_sum"] / max(s["denominator"], 1.0),
        "train/policy_grad_norm": sum(step["grad_norm"] for step in steps) / len(steps),
        "train/policy_steps_skipped": float(sum(step["denominator"] == 0 for step in steps)),
        "train/entropy": s["entropy_sum"] / tokens,
        "train/kl": s["kl_sum"] / max(s["accepted"], 1.0),
        "train/action_tokens": s["num_action_tokens"],
        "dis/accepted_fraction": s["accepted"] / tokens,
        "dis/below_fraction": s["below"] / tokens,
        "dis/above_fraction": s["above"] / tokens,
        "dis/nonfinite_fraction": s["nonfinite"] / tokens,
        "dis/rho_mean": s["rho_sum"] / finite,
        "dis/rho_max": s["rho_max"],
        "dis/effective_sample_fraction": s["accepted_rho_sum"] ** 2 / squares / tokens if squares else 0.0,
        "lag/own_tokens": s["own_tokens"],
        "lag/own_abs_logprob_diff": s["own_diff_sum"] / max(s["own_tokens"], 1.0),
        "lag/older_abs_logprob_diff": s["older_diff_sum"] / max(s["older_tokens"], 1.0),
    }
    metrics |= {f"dis/{name}": s[name] / tokens for name in RATIO_BINS}
    if algorithm.policy_loss == "ppo_clip":
        metrics |= {
            "ppo/clip_fraction": s["clipped"] / tokens,
            "ppo/nonfinite_fraction": s["ratio_nonfinite"] / tokens,
            "ppo/ratio_mean": s["ratio_sum"] / max(s["num_action_tokens"] - s["ratio_nonfinite"], 1.0),
            "ppo/ratio_max": s["ratio_max"],
        }
    return metrics
