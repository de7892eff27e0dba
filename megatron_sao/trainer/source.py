"""Where batches come from: the buffer of a live run, recorded batches, or demonstrations."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megatron_sao.buffer.client import BufferClient
from megatron_sao.config import ConfigError, SamplingConfig
from megatron_sao.data.batches import BatchesError, RecordedBatches
from megatron_sao.data.routing import RoutingShape
from megatron_sao.data.trajectory import Trajectory, TrajectoryError
from megatron_sao.distributed import broadcast_json
from megatron_sao.trainer.alarms import Alarms
from megatron_sao.trainer.fleet import EngineFleet
from megatron_sao.trainer.stop import StopSignal
from megatron_sao.trainer.world import World

POLL_SECONDS = 2.0  # how long the buffer may hold an answer back before the engines are looked after again


class BatchSource(Protocol):
    """``version`` labels the weights that the engines hold; None where there are no engines."""

    @property
    def version(self) -> str | None: ...

    def batch(self, stage: str, step: int, size: int, policy_version: int) -> list[Trajectory]:
        """The trajectories of a step, the same on every rank and at every call. Collective; waits for them."""

    def evaluate(self, stage: str, step: int, num_prompts: int) -> list[Trajectory] | None:
        """Finished held-out episodes under the weights just published; None where nobody can play them. Collective."""

    def commit(self, stage: str, step: int) -> None:
        """Nothing before (stage, step) will be asked for again."""

    def counters(self) -> dict[str, float]:
        """What was dropped, refused and retried since the run began, as metrics; on rank 0, {} elsewhere."""


class RecordedSource:
    """Batches from a directory; needs no other process. What a buffer would refuse is refused here.

    Args:
        vocab_size: of the model that trains.
        max_tokens: ``rollout.max_tokens``.
        group_size: ``rl.group_size``.
        routing: of the model that trains; None if it has no routed experts.
    """

    def __init__(
        self, directory: Path, vocab_size: int, max_tokens: int, group_size: int, routing: RoutingShape | None = None
    ) -> None:
        self._recorded = RecordedBatches(directory)
        self._vocab_size, self._max_tokens, self._group_size = vocab_size, max_tokens, group_size
        self._routing = routing
        self.version = None

    def end(self, stage: str, first_step: int) -> int:
        """The step after the last of those recorded without a gap from ``first_step`` on."""
        recorded = set(self._recorded.steps(stage))
        if recorded and first_step not in recorded and first_step <= max(recorded):
            raise BatchesError(
                f"{self._recorded.directory} has no batch for stage {stage!r}, step {first_step}, where training "
                f"stands; recorded: {sorted(recorded)}"
            )
        end = first_step
        while end in recorded:
            end += 1
        return end

    def batch(self, stage: str, step: int, size: int, policy_version: int) -> list[Trajectory]:
        """Raises BatchesError for a batch that is not of ``size``, not of whole groups, or not valid throughout."""
        trajectories = self._recorded.batch(stage, step)
        folder = self._recorded.directory / stage / str(step)
        if len(trajectories) != size:
            raise BatchesError(
                f"{folder} holds {len(trajectories)} trajectories for stage {stage!r}, step {step}, but "
                f"{stage}.batch_size = {size}; set it to {len(trajectories)} or export the batches again"
            )
        if self._group_size > 1:
            for label, count in Counter(trajectory.group for trajectory in trajectories).items():
                if label is None or count != self._group_size:
                    raise BatchesError(
                        f"{folder} holds {count} trajectories of the group {label!r} for stage {stage!r}, step {step}, "
                        f"but rl.group_size = {self._group_size}; train with the group size they were sampled with"
                    )
        return [self._checked(trajectory, folder / f"{n}.msgpack") for n, trajectory in enumerate(trajectories)]

    def _checked(self, trajectory: Trajectory, path: Path) -> Trajectory:
        try:
            return trajectory.validate(self._vocab_size, self._max_tokens, self._routing)
        except TrajectoryError as error:
            raise BatchesError(
                f"{path} is no trajectory of this run: {error}; train with the model and the rollout.max_tokens it was "
                "made with, or export the batches again"
            ) from error

    def evaluate(self, stage: str, step: int, num_prompts: int) -> None:
        return None

    def commit(self, stage: str, step: int) -> None: ...

    def counters(self) -> dict[str, float]:
        return {}


class LiveSource:
    """Batches from the buffer. While it waits it pushes weights to engines that joined or came back.

    Args:
        client: rank 0 asks for the batch; every rank fetches the trajectories.
        fleet: the engines to look after.
        stop, alarms: heeded while a batch does not come.
    """

    def __init__(
        self, client: BufferClient, fleet: EngineFleet, world: World, stop: StopSignal, alarms: Alarms
    ) -> None:
        self._client, self._fleet, self._world, self._stop, self._alarms = client, fleet, world, stop, alarms
        self._threads = ThreadPoolExecutor(8, thread_name_prefix="fetch")

    @property
    def version(self) -> str:
        return self._fleet.version

    def batch(self, stage: str, step: int, size: int, policy_version: int) -> list[Trajectory]:
        def ready() -> list[str] | None:
            entries = self._client.batch(stage, step, self._fleet.incarnation, size, policy_version, wait=POLL_SECONDS)
            return None if entries is None else [entry.id for entry in entries]

        no_data = self._alarms.waiting()

        def still_waiting() -> None:
            no_data()
            self._stop.check(stage, step)

        return self._wait(ready, policy_version, still_waiting)

    def evaluate(self, stage: str, step: int, num_prompts: int) -> list[Trajectory]:
        incarnation = self._fleet.incarnation
        if self._world.is_leader:
            self._client.start_eval(stage, step, incarnation, self._fleet.version, num_prompts)
        return self._wait(lambda: self._client.eval_result(stage, step, incarnation, wait=POLL_SECONDS), step)

    def _wait(
        self,
        ready: Callable[[], list[str] | None],
        policy_version: int,
        still_waiting: Callable[[], None] | None = None,
    ) -> list[Trajectory]:
        """The trajectories whose ids rank 0 gets from ``ready``; meanwhile engines that came back get their weights,
        and ``still_waiting`` is called on every rank."""
        while True:
            self._fleet.refresh(policy_version)
            ids = broadcast_json(ready() if self._world.is_leader else None, self._world.device)
            if ids is not None:
                return self.fetch(ids)
            if still_waiting is not None:
                still_waiting()

    def commit(self, stage: str, step: int) -> None:
        if self._world.is_leader:
            self._client.commit(stage, step, self._fleet.incarnation)

    def counters(self) -> dict[str, float]:
        if not self._world.is_leader:
            return {}
        stats = self._client.stats()
        return {f"buffer/{name}": value for name, value in stats.items() if isinstance(value, int | float)}

    def fetch(self, ids: list[str]) -> list[Trajectory]:
        return list(self._threads.map(self._client.trajectory, ids))


class Demonstrations:
    """Supervised examples: JSONL lines ``{"prompt": text, "segments": [[text, trained], ...]}``.

    Each segment is tokenised by itself, as the rollout sees them; ``trained`` ones are learned.
    """

    def __init__(self, path: Path, tokenizer: Any, seed: int) -> None:
        self._examples: list[tuple[list[int], list[int]]] = []
        for number, line in enumerate(path.read_bytes().rstrip(b"\n").split(b"\n"), 1):
            try:
                record = json.loads(line)
                segments = [(record["prompt"], False), *record["segments"]]
                if not all(isinstance(text, str) for text, _ in segments):  # a list of texts has other tokens' ids
                    raise TypeError("the prompt and each segment must be text")
                pieces = [(tokenizer.encode(text, add_special_tokens=False), trained) for text, trained in segments]
            except Exception as error:  # tokenizers raise no narrower one
                raise ConfigError(f"{path}:{number} is no demonstration ({error!r}); see data.sft") from error
            ids = [token for piece, _ in pieces for token in piece]
            self._examples.append((ids, [int(bool(trained)) for piece, trained in pieces for _ in piece]))
        if not self._examples:
            raise ConfigError(f"data.sft = '{path}' holds no demonstration")
        self._seed = seed

    def batch(self, step: int, size: int) -> list[Trajectory]:
        """Examples drawn with replacement, a function of (seed, step)."""
        generator = random.Random(f"{self._seed}/sft/{step}")
        return [_example(step, generator.choice(self._examples)) for _ in range(size)]


def _example(step: int, example: tuple[list[int], list[int]]) -> Trajectory:
    ids, mask = example
    zeros = np.zeros(len(ids), dtype=np.float32)
    return Trajectory(
        id=f"sft-{step}", run_id="sft", task_id="sft", epoch=0, attempt=0, kind="train", group=None,
        token_ids=np.array(ids, dtype=np.int32), loss_mask=np.array(mask, dtype=np.uint8), logprobs=zeros,
        rewards=zeros, versions=[], turns=[], sampling={}, support=None, routed_experts=None, truncated=False,
        failure=None, metrics={}, created_at=0.0,
    )  # fmt: skip


def check_sampling(trajectories: list[Trajectory], sampling: SamplingConfig) -> None:
    """Refuse trajectories whose log-probabilities are over another distribution than the trainer evaluates.

    Raises:
        ConfigError: names the trajectory, what it was sampled with and what the config says.
    """
    for trajectory in trajectories:
        temperature = trajectory.sampling.get("temperature", 1.0)
        if temperature != sampling.temperature:
            raise ConfigError(
                f"trajectory {trajectory.id!r} was sampled at temperature {temperature}, but "
                f"rollout.sampling.temperature = {sampling.temperature}: its importance ratios would be wrong; train "
                "at the temperature it was sampled at"
            )
        if (trajectory.support is not None) != sampling.truncated and trajectory.num_action_tokens:
            raise ConfigError(
                f"trajectory {trajectory.id!r} was sampled {'with' if trajectory.support else 'without'} a recorded "
                f"support, but rollout.sampling.top_k = {sampling.top_k}; train with the sampling it was made with"
            )


def check_routing(trajectories: list[Trajectory]) -> None:
    """Refuse trajectories whose routing cannot be replayed, because nobody recorded it.

    Raises:
        ConfigError: names the trajectory.
    """
    for trajectory in trajectories:
        if trajectory.routed_experts is None and trajectory.num_action_tokens:
            raise ConfigError(
                f"trajectory {trajectory.id!r} has no routed_experts, but algorithm.routing_replay = true: it was "
                "sampled without; set routing_replay to false"
            )


def permute_rewards(trajectories: list[Trajectory], seed: int) -> list[Trajectory]:
    """The control experiment: each trajectory gets another one's total reward, on its last action token. One without
    an action has no place for a reward and none to give, and stays as it is."""
    acting = [trajectory for trajectory in trajectories if trajectory.num_action_tokens]
    order = np.random.default_rng(seed).permutation(len(acting))
    permuted = iter([_paid(t, acting[other].total_reward) for t, other in zip(acting, order, strict=True)])
    return [next(permuted) if trajectory.num_action_tokens else trajectory for trajectory in trajectories]


def _paid(trajectory: Trajectory, reward: float) -> Trajectory:
    rewards = np.zeros_like(trajectory.rewards)
    rewards[np.flatnonzero(trajectory.loss_mask)[-1]] = reward
    return replace(trajectory, rewards=rewards)
