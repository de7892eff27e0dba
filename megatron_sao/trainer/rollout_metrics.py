"""What a batch of trajectories says by itself: rewards, lengths, staleness."""

from __future__ import annotations

import numpy as np

from megatron_sao.data.trajectory import Trajectory, parse_version


def success(trajectory: Trajectory) -> float:
    """The environment's own ``success`` metric, else whether the total reward reached 1."""
    return trajectory.metrics.get("success", float(trajectory.total_reward >= 1.0))


def staleness(trajectory: Trajectory, policy_version: int) -> int:
    """Versions between the policy and the oldest action token (SAO.md §5).

    A token of an earlier incarnation may count more versions than the policy has seen since it resumed: not stale.
    """
    oldest = min(parse_version(version)[1] for version in trajectory.action_versions)
    return max(policy_version - oldest, 0)


def rollout_metrics(trajectories: list[Trajectory], policy_version: int, seconds: float) -> dict[str, float]:
    """Averages over a batch; ``seconds`` is the step's wall time."""
    lags = [staleness(t, policy_version) for t in trajectories if t.action_versions]
    histogram = {f"staleness/count_{lag}": float(lags.count(lag)) for lag in sorted(set(lags))}
    tokens = sum(t.num_tokens for t in trajectories)

    def mean(values: list[float]) -> float:
        return float(np.mean(values)) if values else 0.0

    own = {name for t in trajectories for name in t.metrics if name != "success"}
    return (
        histogram
        | {
            "train/reward_mean": mean([t.total_reward for t in trajectories]),
            "train/success_rate": mean([success(t) for t in trajectories]),
            "train/trajectories": len(trajectories),
            "train/tokens": tokens,
            "train/length_mean": mean([t.num_tokens for t in trajectories]),
            "train/turns_mean": mean([sum(kind == "action" for kind, *_ in t.turns) for t in trajectories]),
            "train/truncated_fraction": mean([float(t.truncated) for t in trajectories]),
            "staleness/max": max(lags, default=0),
            "staleness/mean": mean(lags),
            "version/spans_max": max((len(t.action_versions) for t in trajectories), default=0),
            "version/spanning_fraction": mean([float(len(t.action_versions) > 1) for t in trajectories]),
            "tokens_per_second": tokens / seconds if seconds > 0 else 0.0,
        }
        | {f"env/{name}": mean([t.metrics[name] for t in trajectories if name in t.metrics]) for name in sorted(own)}
    )
