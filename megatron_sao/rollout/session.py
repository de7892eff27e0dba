"""One episode as the environment sees it: token ids in and out, with everything the trainer needs recorded.

The ids the engine sampled are the ids the trainer learns from; nothing is ever tokenised again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np

from megatron_sao.config import RolloutConfig, SamplingConfig
from megatron_sao.data.routing import continued
from megatron_sao.data.trajectory import Support, Trajectory
from megatron_sao.rollout.client import CONTEXT_MARGIN, EngineClient, Generation, RequestRefused


class BudgetExceeded(Exception):
    """The episode hit a limit of ``rollout``. Left uncaught by the environment, the episode ends as truncated."""


class Session:
    """Drives one episode. Call :meth:`prompt` once, then :meth:`generate` and :meth:`observe`, then :meth:`finish`.

    Args:
        engine: where tokens are sampled; the session stays with the engine that has its prefix cached.
        config: limits of an episode.
        sampling: of every turn of this episode.
    """

    def __init__(self, engine: EngineClient, config: RolloutConfig, sampling: SamplingConfig) -> None:
        self._engine = engine
        self._config = config
        self._sampling = sampling
        self._max_tokens = min(config.max_tokens, engine.limits.context - CONTEXT_MARGIN)
        self._prefer: str | None = None
        self._started = time.time()
        self._num_actions = 0
        self.retries = 0
        self.token_ids: list[int] = []
        self.loss_mask: list[int] = []
        self.logprobs: list[float] = []
        self.rewards: list[float] = []
        self.routed_experts: np.ndarray | None = None  # of all tokens up to the latest action's last but one
        self.support: list[list[int]] = []  # per action token, where sampling is truncated
        self.versions: list[tuple[str, int, int]] = []
        self.turns: list[tuple[str, int, int]] = []
        self.metrics: dict[str, float] = {}  # the environment may add its own figures
        self.generating = False  # whether the policy is to act now, rather than the environment
        self.finished = False
        self.truncated = False

    def prompt(self, token_ids: Sequence[int]) -> None:
        """The tokens the episode starts from.

        Raises:
            RequestRefused: empty, outside the vocabulary, or not the first call.
            BudgetExceeded: longer than an episode may be.
        """
        if self.token_ids:
            raise RequestRefused("session.prompt was called twice; later tokens are observations")
        if not token_ids:
            raise RequestRefused("the prompt encodes to no tokens, which would kill the server; check the task")
        self._given("prompt", token_ids)

    def observe(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the policy did not sample. They carry no loss. Errors as for :meth:`prompt`."""
        if not self.token_ids:
            raise RequestRefused("session.observe was called before session.prompt")
        if token_ids:
            self._given("observation", token_ids)

    async def generate(self, max_new_tokens: int | None = None, stop_token_ids: Sequence[int] = ()) -> list[int]:
        """Let the policy act. Returns the sampled ids, the stop token included.

        Args:
            max_new_tokens: less than ``rollout.max_tokens_per_turn`` for this turn; at least 1.
            stop_token_ids: end the turn, besides the end-of-sequence tokens of the model's own config.

        Raises:
            BudgetExceeded: no turn or no token is left.
            RequestRefused, EngineError: see :meth:`EngineClient.generate`.
        """
        if self._num_actions >= self._config.max_turns:
            raise BudgetExceeded(f"all rollout.max_turns = {self._config.max_turns} turns are used")
        room = self._max_tokens - len(self.token_ids)
        if room < 1:
            raise BudgetExceeded(f"{len(self.token_ids)} tokens leave none of rollout.max_tokens to act with")
        limit = min(room, self._config.max_tokens_per_turn, room if max_new_tokens is None else max_new_tokens)
        self.generating = True
        action = await self._engine.generate(self.token_ids, self._sampling, limit, stop_token_ids, self._prefer)
        self.generating = False  # after an error it stays: the error is of the engines, not of the environment
        self._sampled(action)
        return list(action.token_ids)

    def reward(self, value: float) -> None:
        """Pay for the latest action: the reward sits on its last token.

        Raises:
            RequestRefused: before any action, or not a finite number.
        """
        if not self._num_actions:
            raise RequestRefused("a reward needs an action to sit on, and the policy has not acted yet")
        if not math.isfinite(value):
            raise RequestRefused(f"reward = {value}: it must be a finite number")
        self.rewards[self._last_action()] += float(value)

    def finish(self, reward: float = 0.0, truncated: bool = False) -> None:
        """End the episode with its terminal reward. ``truncated``: a limit ended it, not the policy."""
        if self.finished:
            raise RequestRefused("session.finish was called twice")
        if reward:
            self.reward(reward)
        self.finished, self.truncated = True, truncated

    def replace_rewards(self, value: float) -> None:
        """``rollout.reward`` decides: one terminal reward instead of what the environment paid."""
        self.rewards = [0.0] * len(self.rewards)
        self.reward(value)

    def bad_metric(self) -> str | None:
        """What is wrong with the environment's own figures, if anything is."""
        for name, value in self.metrics.items():
            try:
                good = name.isprintable() and math.isfinite(float(value))
            except (AttributeError, TypeError, ValueError, OverflowError):
                good = False
            if not good:
                return f"session.metrics[{name!r:.100}] = {value!r:.100}: a metric is a name and a finite number"
        return None

    def trajectory(
        self,
        *,
        id: str,
        run_id: str,
        task_id: str,
        epoch: int,
        attempt: int,
        kind: str,
        group: str | None = None,
        failure: str | None = None,
    ) -> Trajectory:
        """The record of the episode, whether finished or failed; the environment's own metrics only of a finished
        one."""
        own = {} if failure else {name: float(value) for name, value in self.metrics.items()}
        metrics = own | {
            "turns": float(self._num_actions),
            "seconds": time.time() - self._started,
            "engine_retries": float(self.retries),
        }
        support = Support.of(self.support) if self._sampling.truncated else None
        return Trajectory(
            id=id, run_id=run_id, task_id=task_id, epoch=epoch, attempt=attempt, kind=kind, group=group,
            token_ids=np.array(self.token_ids, np.int32), loss_mask=np.array(self.loss_mask, np.uint8),
            logprobs=np.array(self.logprobs, np.float32), rewards=np.array(self.rewards, np.float32),
            versions=self.versions, turns=self.turns, sampling=self._sampling.model_dump(), support=support,
            routed_experts=self.routed_experts, truncated=self.truncated, failure=failure, metrics=metrics,
            created_at=time.time(),
        )  # fmt: skip

    def _given(self, kind: str, token_ids: Sequence[int]) -> None:
        vocab_size = self._engine.limits.vocab_size
        for index, token in enumerate(token_ids):
            if not 0 <= token < vocab_size:
                raise RequestRefused(
                    f"{kind}[{index}] = {token} is outside the vocabulary [0, {vocab_size}); "
                    "encode with the tokenizer of model.path"
                )
        start, end = len(self.token_ids), len(self.token_ids) + len(token_ids)
        if end > self._max_tokens:
            raise BudgetExceeded(f"{end} tokens with this {kind} exceed rollout.max_tokens = {self._max_tokens}")
        self.token_ids += [int(token) for token in token_ids]
        for values in (self.loss_mask, self.logprobs, self.rewards):
            values.extend([0] * len(token_ids))
        self.turns.append((kind, start, end))

    def _sampled(self, action: Generation) -> None:
        start, count = len(self.token_ids), len(action.token_ids)
        self.token_ids += action.token_ids
        self.loss_mask += [1] * count
        self.logprobs += action.logprobs
        self.support += action.support
        self.routed_experts = continued(self.routed_experts, action.routed_experts)
        self.rewards += [0.0] * count
        self.versions += [(version, start + first, start + end) for version, first, end in action.versions]
        self.turns.append(("action", start, start + count))
        self._num_actions += 1
        self._prefer = action.engine
        self.retries += action.retries

    def _last_action(self) -> int:
        return next(end for kind, _, end in reversed(self.turns) if kind == "action") - 1
