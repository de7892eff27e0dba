"""The training loop: SFT cold start, value pretraining, and SAO. The spine of the project; start reading here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import batched
from pathlib import Path

from megatron_sao.algorithm import RunningMeanBaseline
from megatron_sao.config import RunConfig
from megatron_sao.data.trajectory import Trajectory, parse_version
from megatron_sao.logs import at_step
from megatron_sao.models.hf import HFModel
from megatron_sao.trainer.advantages import fill_critic_advantages, fill_outcome_advantages, outcome_advantages
from megatron_sao.trainer.alarms import Alarms
from megatron_sao.trainer.checkpoint import Checkpoints, Position
from megatron_sao.trainer.critic import Critic
from megatron_sao.trainer.evaluation import evaluate
from megatron_sao.trainer.fleet import EngineFleet
from megatron_sao.trainer.metrics import MetricsWriter, Stopwatch
from megatron_sao.trainer.microbatch import MicroBatch, build_microbatches
from megatron_sao.trainer.policy import Policy
from megatron_sao.trainer.rollout_metrics import rollout_metrics
from megatron_sao.trainer.samples import SampleWriter
from megatron_sao.trainer.source import BatchSource, Demonstrations, check_routing, check_sampling, permute_rewards
from megatron_sao.trainer.stop import Stopped, StopSignal
from megatron_sao.trainer.trainable import Trainable
from megatron_sao.trainer.world import World
from megatron_sao.weights.export import HFExporter, save_hf


@dataclass
class Stage:
    """What all stages need. ``critic``, ``source`` and ``fleet`` are None where the stage has no use for them;
    ``baseline`` is the running mean's state, empty under any other advantage."""

    config: RunConfig
    model: HFModel
    world: World
    checkpoints: Checkpoints
    metrics: MetricsWriter
    samples: SampleWriter
    alarms: Alarms
    stop: StopSignal
    exporter: HFExporter
    run_dir: Path
    policy: Policy
    baseline: RunningMeanBaseline
    critic: Critic | None = None
    source: BatchSource | None = None
    fleet: EngineFleet | None = None

    def microbatches(self, trajectories: list[Trajectory]) -> list[MicroBatch]:
        return build_microbatches(
            trajectories,
            self.world.data_rank,
            self.world.data_size,
            self.config.parallel.max_tokens_per_microbatch,
            self.world.sequence_multiple,
            self.world.device,
            self.world.count_multiple,
            self.world.context_rank,
            self.world.context_size,
            self.config.algorithm.routing_replay,
        )

    def save(self, stage: str, step: int) -> None:
        """Checkpoint the stage's models and the optimizers of those that train in it."""
        trained = {} if stage == "value" else {"policy": self.policy.trainable}
        if self.critic is not None:
            trained["critic"] = self.critic.trainable
        self._save(Position.of(stage, step), trained)

    def save_for_next_stage(self, stage: str) -> None:
        """Checkpoint the weights alone: each stage has optimizers of its own."""
        self._save(Position.of(stage, 0), {})
        self.finish_save(wait=True)

    def finish_save(self, wait: bool) -> None:
        """Complete the checkpoint being written if it can be, then let the buffer forget what no retained one needs."""
        if self.checkpoints.finish(wait) and self.source is not None:
            oldest = self.checkpoints.oldest()
            self.source.commit(oldest.stage, oldest.step)

    @contextmanager
    def checkpoint_on_stop(self, stage: str, step: int) -> Iterator[None]:
        """When the run is stopped inside, leave a checkpoint from which it goes on at ``step``."""
        try:
            yield
        except Stopped as stopped:
            position = Position.of(stage, step)
            self.finish_save(wait=True)
            if step > 0 and self.checkpoints.newest != position:  # before its first step a stage is as it was started
                self.save(stage, step)
                self.finish_save(wait=True)
            raise type(stopped)(f"{stopped}; the same command resumes from {position}") from None

    def export(self) -> None:
        """The policy as an HF directory in the run's."""
        with self.policy.trainable.resident():
            save_hf(self.exporter, self.model, self.run_dir / "hf")

    def stop_if_asked(self, stage: str, step: int, metrics: dict[str, float]) -> None:
        """Between two steps: judge the metrics of the last one and heed a signal. Raises Stopped."""
        with self.checkpoint_on_stop(stage, step):
            self.alarms.check(metrics)
            self.stop.check(stage, step)

    def _save(self, position: Position, trained: dict[str, Trainable]) -> None:
        held = {"policy": self.policy.trainable}
        if self.critic is not None:
            held["critic"] = self.critic.trainable
        self.finish_save(wait=True)  # the one before
        with ExitStack() as stack:
            for trainable in held.values():
                stack.enter_context(trainable.resident())
            models = {name: trainable.chunks for name, trainable in held.items()}
            self.checkpoints.save(position, models, trained, extra={"running_mean": self.baseline.state_dict()})
        self.finish_save(wait=not self.config.checkpoint.asynchronous)


def run_sft(stage: Stage, demonstrations: Demonstrations, first_step: int) -> None:
    """Supervised cold start."""
    settings = stage.config.sft
    for step in range(first_step, settings.steps):
        at_step("sft", step)
        stage.finish_save(wait=False)
        watch = Stopwatch()
        batch = stage.microbatches(demonstrations.batch(step, settings.batch_size))
        metrics = stage.policy.sft_step(batch)
        watch.lap("policy")
        stage.metrics.write("sft", step, metrics | watch.metrics() | {"progress/steps": settings.steps})
        if (step + 1) % stage.config.checkpoint.save_interval == 0 and step + 1 < settings.steps:
            stage.save("sft", step + 1)
        stage.stop_if_asked("sft", step + 1, metrics)
    stage.save_for_next_stage("value")


def run_value(stage: Stage, steps: int, first_step: int) -> None:
    """Value pretraining: the critic learns on rollouts of the frozen policy, version 0."""
    config, settings = stage.config, stage.config.value
    for step in range(first_step, steps):
        at_step("value", step)
        stage.finish_save(wait=False)
        watch = Stopwatch()
        with stage.checkpoint_on_stop("value", step):
            trajectories = stage.source.batch("value", step, settings.batch_size, policy_version=0)
        watch.lap("wait")
        batch = stage.microbatches(trajectories)
        stage.critic.fill_values(batch)
        fill_critic_advantages(batch, config.algorithm)
        watch.lap("values")
        metrics = stage.critic.explained_variance(batch) | stage.critic.step(batch, config.algorithm)
        watch.lap("critic")
        metrics |= rollout_metrics(trajectories, 0, watch.total)
        stage.metrics.write("value", step, metrics | watch.metrics() | {"progress/steps": steps})
        if (step + 1) % config.checkpoint.save_interval == 0 and step + 1 < steps:
            stage.save("value", step + 1)
        stage.stop_if_asked("value", step + 1, metrics)
    stage.save_for_next_stage("rl")
    if stage.fleet is not None:
        stage.fleet.close()


def run_rl(stage: Stage, steps: int, first_step: int) -> None:
    """SAO. Step n trains weight version n and makes n + 1."""
    config, settings = stage.config, stage.config.rl
    if first_step == 0:
        evaluate_if_live(stage, 0)
    if steps == 0:
        stage.export()
    for step in range(first_step, steps):
        at_step("rl", step)
        stage.finish_save(wait=False)
        watch = Stopwatch()
        if config.algorithm.reset_policy_optimizer_on_sync and step > 0 and step % settings.sync_interval == 0:
            # Here and not after the push: a checkpoint cannot hold an Adam that has never stepped.
            stage.policy.trainable.reset_optimizer()
        with stage.checkpoint_on_stop("rl", step):
            trajectories = stage.source.batch("rl", step, settings.batch_size, policy_version=step)
        watch.lap("wait")
        remember_pushed(stage)
        metrics = sao_step(stage, step, trajectories, watch)
        evaluation_due = config.eval.every > 0 and (step + 1) % config.eval.every == 0
        last = step + 1 == steps
        if (step + 1) % settings.sync_interval == 0 or evaluation_due or last:
            publish(stage, step + 1)
            watch.lap("push")
        metrics |= rollout_metrics(trajectories, step, watch.total) | stage.source.counters()
        stage.metrics.write("rl", step, metrics | watch.metrics() | {"progress/steps": steps})
        if evaluation_due or last:
            evaluate_if_live(stage, step + 1)
        if last:
            stage.export()
        if (step + 1) % config.checkpoint.save_interval == 0 or last:
            stage.save("rl", step + 1)
        stage.stop_if_asked("rl", step + 1, metrics)
    stage.finish_save(wait=True)
    if stage.fleet is not None:
        stage.fleet.close()


def publish(stage: Stage, policy_version: int) -> None:
    """Bring the policy's weights to the engines."""
    if stage.fleet is not None:
        stage.fleet.publish(policy_version)
    remember_pushed(stage, label=str(policy_version))


def remember_pushed(stage: Stage, label: str | None = None) -> None:
    """Note the current weights as the newest that the engines had, if they are: between two pushes that the loop makes
    the fleet makes one of its own when an engine comes back. ``label`` stands for the fleet's where there is none."""
    newest = stage.fleet.version if stage.fleet is not None else label
    if stage.config.algorithm.pi_old == "latest_pushed" and newest not in (None, stage.policy.pushed_label):
        stage.policy.remember_pushed(newest)


def sao_step(stage: Stage, step: int, trajectories: list[Trajectory], watch: Stopwatch) -> dict[str, float]:
    """Critic forward, advantages and targets from those values, K critic steps, the policy's step (SAO.md §4).

    The baselines go the same way: without a critic the advantages come from the outcomes, and with mini-batches the
    policy takes one optimizer step on each.
    """
    algorithm, settings = stage.config.algorithm, stage.config.rl
    check_sampling(trajectories, stage.config.rollout.sampling)
    if algorithm.routing_replay:
        check_routing(trajectories)
    if algorithm.permute_rewards:
        trajectories = permute_rewards(trajectories, seed=stage.config.seed * 1_000_003 + step)
    share = -(-len(trajectories) // settings.minibatches)
    minibatches = [stage.microbatches(list(part)) for part in batched(trajectories, share)]
    batch = [micro for minibatch in minibatches for micro in minibatch]
    if stage.critic is not None:
        stage.critic.fill_values(batch)
        fill_critic_advantages(batch, algorithm)
        metrics = stage.critic.explained_variance(batch)
        watch.lap("values")
        updates = [stage.critic.step(batch, algorithm) for _ in range(algorithm.critic_updates)]
        metrics |= updates[0]  # the loss and gradient of the values that the advantages were taken from
        watch.lap("critic")
    else:
        advantages = outcome_advantages(trajectories, algorithm, stage.baseline)
        fill_outcome_advantages(batch, {t.id: a for t, a in zip(trajectories, advantages, strict=True)})
        metrics = {}
    metrics |= stage.policy.step(minibatches, algorithm, _own_versions(stage, step, trajectories))
    watch.lap("policy")
    stage.samples.write(step, batch)
    return metrics


def _own_versions(stage: Stage, step: int, trajectories: list[Trajectory]) -> set[str]:
    """Labels of the very weights that step ``step`` trains. Recorded batches do not tell incarnations apart."""
    if stage.source.version is not None:
        return {stage.source.version} if parse_version(stage.source.version)[1] == step else set()
    return {label for t in trajectories for label in t.action_versions if parse_version(label)[1] == step}


def evaluate_if_live(stage: Stage, step: int) -> None:
    """Held-out success under the version just published; recorded batches have nobody to play them."""
    if stage.config.data.eval is None:
        return
    watch = Stopwatch()
    trajectories = stage.source.evaluate("rl", step, stage.config.eval.prompts)
    if trajectories is None:
        return
    watch.lap("eval")
    metrics = evaluate(trajectories, stage.microbatches(trajectories), stage.policy, stage.source.version, stage.config)
    watch.lap("mismatch")
    stage.metrics.write("rl", step, metrics | watch.metrics())
