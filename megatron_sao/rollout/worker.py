"""The rollout worker: leases visits, plays them as episodes on whichever engines are clean, submits trajectories.

It keeps no state worth saving. When it dies its leases expire and the visits go out again.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import traceback
import uuid
from pathlib import Path
from typing import Any

from megatron_sao.buffer.client import AsyncBufferClient, BufferError, BufferUnavailable, Lease, buffer_address
from megatron_sao.config import ConfigError, RunConfig, SamplingConfig
from megatron_sao.data.routing import replayed_routing
from megatron_sao.data.tasks import Task
from megatron_sao.data.trajectory import TEXT_LIMITS, Trajectory
from megatron_sao.logs import start_logging
from megatron_sao.rollout.client import EngineClient, EngineError, ModelLimits
from megatron_sao.rollout.engine import until_signalled
from megatron_sao.rollout.environment import EnvironmentFailure, Reward
from megatron_sao.rollout.loading import load_environment, load_object
from megatron_sao.rollout.session import BudgetExceeded, Session
from megatron_sao.run_identity import run_identity

log = logging.getLogger(__name__)

RELEASE_SECONDS = 2.0  # that a stopped worker may take to give back what it was playing
LEASE_WAIT = 5.0  # seconds the buffer may hold a lease call while it has no visit to give
FAILURES_IN_A_ROW = 100  # episodes; after that it is the environment that is broken, not an episode
EVAL_SAMPLING = SamplingConfig(temperature=1.0)


class EnvironmentBroken(RuntimeError):
    """Episode after episode failed in the environment or reward."""


class _NeverActed(Exception):
    """A limit of ``rollout`` ended the episode before the policy had acted: there is nothing to train on, but the
    environment has done nothing wrong."""


def main(config: RunConfig, run_dir: Path, worker_id: str) -> int:
    """Play episodes until SIGTERM. Returns the exit code; the last log lines say why it is not 0."""
    start_logging(worker_id)
    try:
        asyncio.run(until_signalled(_work(config, worker_id, run_identity(run_dir, config.name))))
    except* ConfigError as group:
        log.error("worker %s cannot run: %s", worker_id, group.exceptions[0])
        return_code = 2  # it would end the same way again
    except* (BufferUnavailable, BufferError, EnvironmentBroken) as group:
        log.error("worker %s gives up: %s", worker_id, group.exceptions[0])
        return_code = 1
    else:
        return_code = 0
    return return_code


async def _work(config: RunConfig, worker_id: str, run_id: str) -> None:
    url, token = buffer_address()
    buffer = AsyncBufferClient(url, token)
    limits = ModelLimits.of(config.model.path, config.engine.sglang.get("context_length"))
    try:
        routing = replayed_routing(config)
        in_place = config.weights.pause == "in_place"
        retries = config.rollout.max_retries
        async with EngineClient(limits, token, buffer.engines, retries, routing, in_place) as engine:
            player = Player(config, engine, load_tokenizer(config.model.path), run_id)
            try:
                await Worker(config, worker_id, buffer, player).run()
            finally:
                await player.close()
    finally:
        await buffer.close()


def load_tokenizer(model_path: Path) -> Any:
    """The HF tokenizer in ``model_path``. Raises ConfigError if there is none."""
    from transformers import AutoTokenizer  # slow to import

    try:
        return AutoTokenizer.from_pretrained(model_path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path = {str(model_path)!r}: cannot load a tokenizer from it: {error}") from error


def _reason(text: str) -> str:
    """As much of it as the buffer takes. Half an emoji, as a policy may write it, could not be sent."""
    return text.encode(errors="backslashreplace").decode()[: TEXT_LIMITS["failure"]]


class Player:
    """Plays single episodes with the run's environment and reward, on any engine. ``run_id`` goes into every
    trajectory; default ``config.name``."""

    def __init__(self, config: RunConfig, engine: EngineClient, tokenizer: Any, run_id: str | None = None) -> None:
        self._rollout = config.rollout
        self._run_id = run_id or config.name
        self._engine = engine
        self._tokenizer = tokenizer
        self._environment = load_environment(config.rollout, tokenizer)
        path = config.rollout.reward
        self._reward: Reward | None = load_object(path, "rollout.reward") if path else None
        self._failures = 0
        self._raised: set[tuple[str, int | None]] = set()  # places whose traceback is in the log already

    async def play(self, task: Task, kind: str, epoch: int, attempt: int, group: str | None = None) -> Trajectory:
        """One episode; with ``failure`` set if the environment failed it or the policy never acted, so that there is
        nothing to train on. Evaluation samples at temperature 1.

        Raises:
            EngineError: the engines failed the episode; it says nothing about policy or environment.
            EnvironmentBroken: this is the environment's FAILURES_IN_A_ROW-th failure without a success in between.
        """
        session = Session(self._engine, self._rollout, EVAL_SAMPLING if kind == "eval" else self._rollout.sampling)
        try:
            failure = await self._episode(session, task) or session.bad_metric()
            self._failures = self._failures + 1 if failure else 0
        except _NeverActed as reason:  # neither a failure nor a success of the environment's
            failure = f"the policy could not act: {reason}"
        failure = failure and _reason(failure)
        if failure:
            log.warning("task %s failed: %s", task.id, failure)
        if self._failures >= FAILURES_IN_A_ROW:
            raise EnvironmentBroken(
                f"{self._failures} episodes in a row failed in rollout.environment = {self._rollout.environment!r}; "
                f"last (task {task.id}): {failure}"
            )
        return session.trajectory(
            id=uuid.uuid4().hex, run_id=self._run_id, task_id=task.id, epoch=epoch, attempt=attempt, kind=kind,
            group=group, failure=failure,
        )  # fmt: skip

    async def close(self) -> None:
        """Let the environment give back what it holds."""
        if close := getattr(self._environment, "close", None):
            await close()

    async def _episode(self, session: Session, task: Task) -> str | None:
        """Returns why the environment failed it, or None. Raises _NeverActed, and EngineError as :meth:`play`."""
        try:
            async with asyncio.timeout(self._rollout.episode_timeout) as time_limit:
                try:
                    await self._environment.run(session, task)
                except BudgetExceeded as limit:
                    if not any(session.loss_mask):
                        raise _NeverActed(str(limit)) from limit
                    session.finish(truncated=True)
                if not session.finished:
                    return "the environment returned without calling session.finish"
                if not any(session.loss_mask):
                    return "the environment finished the episode before the policy acted"
                if self._reward:
                    value = self._reward(task, self._transcript(session))
                    session.replace_rewards(await value if inspect.isawaitable(value) else value)
        except (EngineError, BufferError, BufferUnavailable, _NeverActed):
            raise  # says nothing about the environment
        except EnvironmentFailure as error:
            return str(error) or "EnvironmentFailure"
        except TimeoutError as error:
            if not time_limit.expired():
                return f"TimeoutError in the environment: {error}"
            return self._out_of_time(session)
        except Exception as error:  # the user's own code may raise anything; one bad task must not end the run
            last = traceback.extract_tb(error.__traceback__)[-1]
            if (place := (last.filename, last.lineno)) not in self._raised:
                self._raised.add(place)
                log.exception("task %s: the environment or reward raised (told once per line)", task.id)
            return f"{type(error).__name__}: {error}"
        return None

    def _out_of_time(self, session: Session) -> str | None:
        """What the end of the wall time means depends on whose it was: the environment's, the engines', or the
        policy's, whose episode it truncates. The turn in flight is no part of the trajectory.

        Raises:
            EngineError: no engine could serve the turn.
            _NeverActed: it was the policy's first.
        """
        limit = f"rollout.episode_timeout = {self._rollout.episode_timeout:g} s"
        if not session.generating:
            return f"the environment timed out ({limit})"
        if not self._engine.available:
            raise EngineError(f"no engine was clean when the episode's time was up ({limit})")
        if not any(session.loss_mask):
            raise _NeverActed(f"its first turn was not over when the time was up ({limit})")
        session.finish(truncated=True)
        return None

    def _transcript(self, session: Session) -> list[tuple[str, str]]:
        ids = session.token_ids
        return [(kind, self._tokenizer.decode(ids[start:end])) for kind, start, end in session.turns]


class Worker:
    """Keeps ``rollout.concurrency`` episodes in flight."""

    def __init__(self, config: RunConfig, worker_id: str, buffer: AsyncBufferClient, player: Player) -> None:
        self._id = worker_id
        self._concurrency = config.rollout.concurrency
        self._renew_seconds = config.buffer.lease_seconds / 3
        self._buffer = buffer
        self._player = player
        self._active: dict[tuple[str, int], asyncio.Task[None]] = {}  # by (visit, attempt)
        self._submitting: set[tuple[str, int]] = set()
        self._freed = asyncio.Event()

    async def run(self) -> None:
        """Work until cancelled; then give back what is in flight. Any unexpected error ends the worker."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._renew_leases())
                while True:
                    while len(self._active) >= self._concurrency:
                        self._freed.clear()
                        await self._freed.wait()
                    free = self._concurrency - len(self._active)
                    for lease in await self._buffer.lease(self._id, free, LEASE_WAIT):
                        self._active[lease.visit_id, lease.attempt] = tasks.create_task(self._episode(lease))
        finally:
            await self._release_all()

    async def _episode(self, lease: Lease) -> None:
        try:
            trajectory = await self._player.play(
                Task(**lease.task), lease.kind, lease.epoch, lease.attempt, lease.group
            )
            self._submitting.add((lease.visit_id, lease.attempt))
            result = await self._buffer.submit(trajectory)
            log.debug("visit %s: %s", lease.visit_id, result)
        except EngineError as error:
            log.warning("visit %s goes back: %s", lease.visit_id, error)
            await self._release(lease.visit_id, lease.attempt, str(error))
        except BufferError as error:
            if error.status not in (413, 422):
                raise
            # one odd episode (a reward beyond float32) must not end the others in flight
            log.error("visit %s: its trajectory was refused: %s", lease.visit_id, error.message)
            await self._release(lease.visit_id, lease.attempt, error.message)
        self._forget(lease.visit_id, lease.attempt)  # not when cancelled: what is in flight then is given back

    def _forget(self, visit_id: str, attempt: int) -> asyncio.Task[None] | None:
        self._freed.set()
        self._submitting.discard((visit_id, attempt))
        return self._active.pop((visit_id, attempt), None)

    async def _renew_leases(self) -> None:
        while True:
            await asyncio.sleep(self._renew_seconds)
            for visit_id, attempt in list(self._active):
                if (visit_id, attempt) not in self._active:
                    continue  # finished while others were renewed
                try:
                    await self._buffer.renew(visit_id, attempt)
                except BufferError as error:
                    if (visit_id, attempt) in self._submitting:
                        continue  # it is our own trajectory that has ended the lease, or a late one is welcome still
                    if episode := self._forget(visit_id, attempt):
                        log.warning("visit %s is no longer ours: %s", visit_id, error.message)
                        episode.cancel()

    async def _release(self, visit_id: str, attempt: int, reason: str) -> None:
        try:
            await self._buffer.release(visit_id, attempt, _reason(reason))
        except BufferError as error:
            log.warning("visit %s was not ours to give back: %s", visit_id, error.message)

    async def _release_all(self) -> None:
        """Best effort: what is not given back expires by itself."""
        try:
            async with asyncio.timeout(RELEASE_SECONDS):
                await asyncio.gather(*(self._release(*key, "the worker stopped") for key in self._active))
        except (TimeoutError, BufferUnavailable) as error:
            log.warning("leases were left to expire: %s", error or "the buffer did not answer in time")
