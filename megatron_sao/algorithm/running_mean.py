"""Advantages against a running mean of the prompt's own rewards, of the baselines SAO is compared with."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence


class RunningMeanBaseline:
    """The mean of each prompt's last ``window`` rewards; a prompt not seen before has baseline 0."""

    def __init__(self, window: int = 8) -> None:
        if window < 1:
            raise ValueError(f"window={window}: a running mean needs at least one reward; use 1 or more")
        self._window = window
        self._rewards: dict[str, deque[float]] = {}

    def advantages(self, task_ids: Sequence[str], rewards: Sequence[float]) -> list[float]:
        """Reward minus baseline of each trajectory in order; the baseline sees the trajectories before it, those of
        this call included, never its own reward.

        Raises:
            ValueError: rewards that are not one per task id, or not finite; nothing is then recorded.
        """
        if len(task_ids) != len(rewards):
            raise ValueError(f"{len(rewards)} rewards for {len(task_ids)} task ids; pass one per trajectory")
        for task_id, reward in zip(task_ids, rewards, strict=True):
            if not math.isfinite(reward):
                raise ValueError(f"the reward of task {task_id!r} is {reward}; a mean needs finite rewards")
        return [self._visit(task_id, float(reward)) for task_id, reward in zip(task_ids, rewards, strict=True)]

    def _visit(self, task_id: str, reward: float) -> float:
        previous = self._rewards.setdefault(task_id, deque(maxlen=self._window))
        baseline = sum(previous) / len(previous) if previous else 0.0
        previous.append(reward)
        return reward - baseline

    def state_dict(self) -> dict[str, list[float]]:
        """Task id -> its last rewards, oldest first; JSON-serialisable."""
        return {task_id: list(rewards) for task_id, rewards in self._rewards.items()}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        """Replace the state; of longer lists only the last ``window`` rewards are kept."""
        self._rewards = {task_id: deque(rewards, maxlen=self._window) for task_id, rewards in state.items()}
