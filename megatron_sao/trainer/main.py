"""``megatron-sao train``: build what a stage needs, run it, go on to the next from its checkpoint."""

from __future__ import annotations

import gc
import logging
import os
from pathlib import Path

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import AutoTokenizer

from megatron_sao.algorithm import RunningMeanBaseline
from megatron_sao.buffer.client import BufferClient, buffer_address
from megatron_sao.config import ConfigError, OptimizerConfig, RunConfig
from megatron_sao.data.routing import RoutingShape, replayed_routing
from megatron_sao.distributed import broadcast_json
from megatron_sao.logs import start_logging
from megatron_sao.models.backend import Backend
from megatron_sao.models.build import build_critic, build_policy, copy_backbone
from megatron_sao.models.hf import read_hf_model, transformer_config
from megatron_sao.run_identity import run_identity
from megatron_sao.trainer.alarms import Alarms, AlarmStop
from megatron_sao.trainer.checkpoint import STAGES, Checkpoints, Contents, Position, policy_checkpoint
from megatron_sao.trainer.critic import Critic, freeze_critic
from megatron_sao.trainer.fleet import EngineFleet
from megatron_sao.trainer.loop import Stage, run_rl, run_sft, run_value
from megatron_sao.trainer.metrics import MetricsWriter
from megatron_sao.trainer.policy import Policy
from megatron_sao.trainer.runtime import start_runtime, stop_runtime
from megatron_sao.trainer.samples import SampleWriter
from megatron_sao.trainer.source import Demonstrations, LiveSource, RecordedSource
from megatron_sao.trainer.stop import Stopped, StopSignal
from megatron_sao.trainer.trainable import Trainable
from megatron_sao.trainer.world import World
from megatron_sao.weights.export import HFExporter
from megatron_sao.weights.gather import Gatherer
from megatron_sao.weights.load import load_hf_weights
from megatron_sao.weights.megatron_files import load_megatron_weights
from megatron_sao.weights.push import WeightPusher, push_plan

log = logging.getLogger(__name__)


def main(config: RunConfig, run_dir: Path, batches_dir: Path | None) -> int:
    """Train from the newest checkpoint of ``run_dir``, or from ``model.path``, to the end of the RL stage.

    Args:
        batches_dir: recorded batches to train on instead of the buffer's; needs no other process.

    Returns:
        The exit code: 0, or that of the Stopped that ended the run before its last step.
    """
    start_logging(f"rank {os.environ.get('RANK', 0)}")
    backend = start_runtime(config.model, config.parallel, config.seed, config.deterministic)
    run = Run(config, run_dir, batches_dir, backend)
    run.stop.listen()
    code = 0
    try:
        run.run()
    except Stopped as stopped:
        log.log(logging.ERROR if isinstance(stopped, AlarmStop) else logging.INFO, "%s", stopped)
        code = stopped.exit_code
    stop_runtime()  # not after an error: closed connections would make the other ranks fail before this one has
    return code


class Run:
    """One trainer process, from the newest checkpoint to the end of the RL stage."""

    def __init__(self, config: RunConfig, run_dir: Path, batches_dir: Path | None, backend: Backend) -> None:
        self.config, self.run_dir, self.backend = config, run_dir, backend
        self.model = read_hf_model(config.model.path)
        if config.model.megatron_path is not None:
            policy_checkpoint(config.model.megatron_path, self.model.raw, backend.device)
        replayed_routing(config)  # raises for a dense model
        self.world = World.current(backend.device, config.parallel)
        settings = config.checkpoint
        self.checkpoints = Checkpoints(
            run_dir / "checkpoints", self.model.raw, settings.keep, backend.device, settings.asynchronous
        )
        newest = self.checkpoints.find_newest()
        self.metrics = MetricsWriter(run_dir if self.world.is_leader else None, config)
        self.samples = SampleWriter(run_dir, config.logging)
        self.alarms = Alarms(config.alarms, backend.device)
        self.stop = StopSignal(backend.device, config.rl.sync_interval)
        if (reason := self.checkpoints.fallback) is not None:
            self.metrics.write(
                newest.stage, newest.step, {"checkpoint/fallback": 1, "checkpoint/fallback_reason": reason}
            )
        self.recorded = None
        if batches_dir is not None:
            limits = self.model.vocab_size, config.rollout.max_tokens
            routing = RoutingShape.of(config.model.path)
            self.recorded = RecordedSource(batches_dir, *limits, config.rl.group_size, routing)
        self.incarnation: int | None = None
        self._connect()

    def _connect(self) -> None:
        self.client = None if self.recorded else BufferClient(*buffer_address())  # --batches needs no buffer

    def run(self) -> None:
        start = self.checkpoints.newest or Position.of("sft", 0)
        log.info("training starts at %s", start)
        for name in STAGES[start.stage_index :]:
            first_step = start.step if name == start.stage else 0
            # without any step there is still the policy to evaluate and to export
            steps = self._steps(name, first_step)
            if first_step < steps or (name == "rl" and steps == 0):
                self._run_stage(name, first_step, steps)
            gc.collect()  # the next stage is built afresh, from the checkpoint
        self.metrics.close()

    def _steps(self, name: str, first_step: int) -> int:
        steps = getattr(self.config, name).steps
        return min(steps, self.recorded.end(name, first_step)) if self.recorded and name != "sft" else steps

    def _run_stage(self, name: str, first_step: int, steps: int) -> None:
        if name == "sft":
            run_sft(self._sft_stage(first_step), self._demonstrations(), first_step)
        elif name == "value":
            run_value(self._value_stage(first_step), steps, first_step)
        else:
            run_rl(self._rl_stage(first_step), steps, first_step)

    def _sft_stage(self, step: int) -> Stage:
        policy, config = self._chunks("policy")
        trained = self._trainable(policy, config, self.config.sft.optimizer, self.config.sft.steps)
        self._restore(Position.of("sft", step), {"policy": policy}, {"policy": trained})
        return self._stage(Policy(trained, self.model.vocab_size, temperature=1.0))

    def _value_stage(self, step: int) -> Stage:
        policy, policy_config = self._chunks("policy")
        critic, critic_config = self._chunks("critic")
        settings = self.config.value
        evaluated = self._trainable(policy, policy_config, self.config.rl.policy_optimizer, 1)
        trained = self._trainable(critic, critic_config, settings.optimizer, settings.steps)
        self._restore(Position.of("value", step), {"policy": policy, "critic": critic}, {"critic": trained})
        return self._stage(self._policy(evaluated), Critic(trained), policy_version=0)

    def _rl_stage(self, step: int) -> Stage:
        settings, algorithm = self.config.rl, self.config.algorithm
        policy, policy_config = self._chunks("policy")
        models = {"policy": policy}
        policy_steps = settings.steps * settings.minibatches
        trained = {
            "policy": self._trainable(
                policy, policy_config, _per_step(settings.policy_optimizer, settings.minibatches), policy_steps
            )
        }
        if algorithm.advantage == "critic":
            models["critic"], critic_config = self._chunks("critic")
            freeze_critic(models["critic"], algorithm.critic_trainable)
            updates = algorithm.critic_updates
            critic_settings = _per_step(settings.critic_optimizer, updates)
            trained["critic"] = self._trainable(
                models["critic"], critic_config, critic_settings, settings.steps * updates
            )
        self._restore(Position.of("rl", step), models, trained)
        critic = Critic(trained["critic"]) if "critic" in trained else None
        return self._stage(self._policy(trained["policy"]), critic, policy_version=step)

    def _policy(self, trainable: Trainable) -> Policy:
        return Policy(trainable, self.model.vocab_size, self.config.rollout.sampling.temperature)

    def _chunks(self, head: str) -> tuple[list[GPTModel], TransformerConfig]:
        config = transformer_config(self.model, self.config.model, self.config.parallel)
        layers = self.config.model.layers
        if head == "policy":
            return build_policy(self.model, config, layers), config
        bias = self.config.algorithm.value_head_bias
        return build_critic(self.model, config, layers, bias, self.config.seed), config

    def _trainable(
        self, chunks: list[GPTModel], config: TransformerConfig, optimizer: OptimizerConfig, steps: int
    ) -> Trainable:
        return Trainable(chunks, config, optimizer, steps, self.config.parallel)

    def _restore(self, position: Position, models: dict[str, list[GPTModel]], trained: dict[str, Trainable]) -> None:
        """Weights from the newest checkpoint, else those of the model; optimizers when it was taken at ``position``.

        A critic that no checkpoint holds yet starts as the policy (SAO.md §4).
        """
        newest = self.checkpoints.newest
        saved = self.checkpoints.contents(newest) if newest else Contents([], [])
        present = {name: chunks for name, chunks in models.items() if name in saved.models}
        resumed = {name: t for name, t in trained.items() if newest == position and name in saved.optimizers}
        for name, chunks in present.items():  # one after the other: no GPU need hold the state of two optimizers
            own = {name: resumed[name]} if name in resumed else {}
            self.checkpoints.load(newest, {name: chunks}, own)
            for trainable in own.values():
                trainable.offload_optimizer()
        for name, chunks in models.items():
            if name not in present:
                config = chunks[0].config
                if name == "critic" and "policy" in present:
                    copy_backbone(models["policy"], chunks)
                elif self.config.model.megatron_path is not None:
                    load_megatron_weights(chunks, config, self.config.model.megatron_path, name)
                else:
                    load_hf_weights(chunks, self.model, config, name)
        for name, trainable in trained.items():
            if name not in resumed:
                trainable.reload_main_parameters()

    def _stage(self, policy: Policy, critic: Critic | None = None, policy_version: int | None = None) -> Stage:
        """``policy_version`` is given by the stages that need rollouts."""
        exporter = HFExporter(policy.trainable.chunks, self.model, policy.trainable.config)
        newest = self.checkpoints.newest
        baseline = RunningMeanBaseline(self.config.algorithm.running_mean_window)
        if newest is not None:
            baseline.load_state_dict(self.checkpoints.extra(newest)["running_mean"])
        stage = Stage(
            self.config, self.model, self.world, self.checkpoints, self.metrics, self.samples, self.alarms, self.stop,
            exporter, self.run_dir, policy, baseline, critic,
        )  # fmt: skip
        if policy_version is not None:
            self._attach_source(stage, policy_version)
        for model in (policy, critic):
            if model is not None:
                model.trainable.offload()
        return stage

    def _attach_source(self, stage: Stage, policy_version: int) -> None:
        """Give the stage its batches, and the engines that the buffer knows of."""
        if self.recorded is not None:
            stage.source = self.recorded
            return
        if self.incarnation is None and self.world.is_leader:
            self.incarnation = self.client.register_trainer(
                run_identity(self.run_dir, self.config.name), policy_version
            )
        self.incarnation = broadcast_json(self.incarnation, self.backend.device)
        stage.fleet = EngineFleet(
            self.client, self._pusher(stage), self.incarnation, policy_version, self.world,
            stage.policy.trainable.resident,
        )  # fmt: skip
        stage.source = LiveSource(self.client, stage.fleet, self.world, self.stop, self.alarms)

    def _pusher(self, stage: Stage) -> WeightPusher:
        settings, exporter, policy = self.config.weights, stage.exporter, stage.policy.trainable
        plan = push_plan(exporter.weights, exporter.layout, settings)
        return WeightPusher(
            Gatherer(plan, policy.chunks, policy.config),
            self.model,
            settings,
            self.client.token,
            self.backend.distributed_backend,
            settings.directory or self.run_dir / "weights",
            policy.config.params_dtype,
        )

    def _demonstrations(self) -> Demonstrations:
        if self.config.data.sft is None:
            raise ConfigError(f"sft.steps = {self.config.sft.steps} needs data.sft; name a file of demonstrations")
        tokenizer = AutoTokenizer.from_pretrained(self.config.model.path)
        return Demonstrations(self.config.data.sft, tokenizer, self.config.seed)


def _per_step(optimizer: OptimizerConfig, updates: int) -> OptimizerConfig:
    """Warm-up is configured in policy steps, each of which makes ``updates`` optimizer steps."""
    return optimizer.model_copy(update={"warmup_steps": optimizer.warmup_steps * updates})
