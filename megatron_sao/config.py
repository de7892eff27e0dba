"""The typed run configuration: one YAML file per run, validated before anything starts.

A run config says how to train. What the model *is* comes from the ``config.json`` of the Hugging Face
directory named by ``model.path`` and is never restated here. Every field has a default or is required; an
unknown key is an error that names the nearest known one. ``--set a.b=c`` overrides a field, the value
being parsed as YAML.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, field_validator, model_validator

SAMPLING_MASK_MAX_TOKENS = 4096  # SGLang's default


class ConfigError(ValueError):
    """A configuration that cannot be run; the message names the field, its value and the remedy."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelConfig(Section):
    """Where the model comes from and how its layers are computed."""

    path: Path  # HF directory: config.json, tokenizer, and weights in safetensors
    # The same model made by tools/convert_hf_to_megatron.py: the trainer starts from it. All else needs model.path.
    megatron_path: Path | None = None
    layers: Literal["native", "transformer_engine"] = "native"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["float32", "bfloat16"] = "float32"
    recompute: Literal["none", "selective", "full"] = "none"


class ParallelConfig(Section):
    """Megatron's parallel sizes. Data parallelism is what remains: world_size / (tp·pp·cp)."""

    tp: PositiveInt = 1
    pp: PositiveInt = 1
    vpp: PositiveInt | None = None  # virtual pipeline stages per rank (interleaved schedule)
    pp_first_layers: PositiveInt | None = None  # of the first pipeline rank; the ranks without a number share the rest
    pp_last_layers: PositiveInt | None = None  # of the last pipeline rank
    cp: PositiveInt = 1  # ranks that share each trajectory
    ep: PositiveInt = 1
    etp: PositiveInt = 1  # tensor parallelism inside an expert
    world_size: PositiveInt = 1  # trainer ranks over all nodes
    nproc_per_node: PositiveInt = 1
    collective_timeout: float = Field(3600.0, gt=0)  # seconds a rank waits for the others before the run ends
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    offload_optimizer: bool = False  # main weights and moments wait in host memory between optimizer steps; bfloat16
    offload_idle_model: bool = False  # policy and critic wait in host memory, gradient buffers dropped, while not used
    max_tokens_per_microbatch: PositiveInt = 8192  # over its cp ranks; a longer trajectory is one of its own

    @model_validator(mode="after")
    def _divisible(self) -> ParallelConfig:
        model_parallel = self.tp * self.pp * self.cp
        if self.world_size % model_parallel:
            raise ValueError(
                f"world_size={self.world_size} is not a multiple of tp·pp·cp={model_parallel}; "
                "change parallel.world_size or one of the sizes"
            )
        if self.world_size % (self.etp * self.ep * self.pp):
            raise ValueError(
                f"world_size={self.world_size} is not a multiple of etp·ep·pp={self.etp * self.ep * self.pp}; "
                "change parallel.ep, parallel.etp or parallel.world_size"
            )
        if self.vpp is not None and self.pp == 1:
            raise ValueError(f"vpp={self.vpp} needs pipeline parallelism; set parallel.pp above 1 or leave vpp out")
        for field in ("pp_first_layers", "pp_last_layers"):
            if self.pp == 1 and getattr(self, field) is not None:
                raise ValueError(f"{field}={getattr(self, field)} with pp=1: raise parallel.pp or leave {field} out")
        if self.world_size % self.nproc_per_node:
            raise ValueError(f"world_size={self.world_size} is not a multiple of nproc_per_node={self.nproc_per_node}")
        return self


class OptimizerConfig(Section):
    """Adam with decoupled weight decay, or SGD without momentum, with linear warm-up to ``lr`` and linear decay to
    ``lr * min_lr_ratio`` over the stage's steps."""

    name: Literal["adam", "sgd"] = "adam"
    lr: float = Field(1e-6, gt=0)
    warmup_steps: int = Field(0, ge=0)
    decay: Literal["constant", "linear"] = "constant"
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    beta1: float = Field(0.9, ge=0, lt=1)  # this and the next two: of Adam alone
    beta2: float = Field(0.98, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    clip_grad: float = Field(1.0, ge=0)  # 0: no clipping


class AlgorithmConfig(Section):
    """SAO (arXiv 2607.07508) and, by these fields alone, the baselines it is compared with (tools/study/study.yaml).
    Where the paper is silent the default is this project's choice."""

    policy_loss: Literal["dis", "ppo_clip"] = "dis"
    advantage: Literal["critic", "group", "running_mean"] = "critic"  # the last two train no critic
    eps_low: float = Field(0.3, gt=0)  # DIS accepts 1 - eps_low < rho < 1 + eps_high
    eps_high: float = Field(5.0, gt=0)
    clip_low: float = Field(0.2, gt=0, lt=1)  # ppo_clip: pi_theta / pi_old is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float = Field(0.28, gt=0)
    # ppo_clip's old policy: the trainer's weights at the start of the batch, the newest weights pushed to the engines,
    # or what the engines reported
    pi_old: Literal["recomputed", "latest_pushed", "rollout"] = "recomputed"
    running_mean_window: PositiveInt = 8  # rewards of the same prompt that its baseline averages
    gae: Literal["skip_observation", "all_tokens"] = "skip_observation"  # all_tokens: plain GAE, for comparison
    gamma: float = Field(1.0, gt=0, le=1)
    lambda_alpha: float = Field(1.5, gt=0)  # lambda_policy = 1 - 1 / (alpha * n)
    critic_updates: PositiveInt = 2  # K
    # Regexes on Megatron names, RL stage only: MLP and expert projections and the value head. Router and norms stay.
    critic_trainable: list[str] = [r"\.mlp\..*linear_fc[12]\.(weight|bias)", r"^output_layer\."]
    value_clip: float | None = Field(None, gt=0)
    value_head_bias: float = 0.0  # where V starts; the mean reward is a good guess
    loss_denominator: Literal["action_tokens", "accepted_tokens", "trajectories"] = "action_tokens"
    kl_coef: float = Field(0.0, ge=0)  # KL(pi_theta || rollout policy), estimated on the sampled tokens
    entropy_coef: float = Field(0.0, ge=0)
    truncation: Literal["terminal", "bootstrap"] = "terminal"
    reset_policy_optimizer_on_sync: bool = False
    # MoE: the policy uses the experts that the engine routed each token to, with the trainer's own probabilities
    routing_replay: bool = False
    permute_rewards: bool = False  # control experiment: rewards shuffled across the batch's trajectories

    @field_validator("critic_trainable")
    @classmethod
    def _patterns(cls, patterns: list[str]) -> list[str]:
        if not patterns:
            raise ValueError("no parameter of the critic would train; name some, or ['.*'] for all of them")
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is not a regular expression ({error}); correct it") from None
        return patterns


class SFTConfig(Section):
    """Supervised cold start on demonstrations. ``steps: 0`` skips the stage."""

    steps: int = Field(0, ge=0)
    batch_size: PositiveInt = 64
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-3, weight_decay=0.01)


class ValueConfig(Section):
    """Value pretraining on rollouts of the frozen policy; all critic parameters train."""

    steps: int = Field(0, ge=0)
    batch_size: PositiveInt = 64
    optimizer: OptimizerConfig = OptimizerConfig(lr=5e-6, warmup_steps=10)


class RLConfig(Section):
    steps: int = Field(1000, ge=0)
    batch_size: PositiveInt = 128  # trajectories
    group_size: PositiveInt = 1  # rollouts per prompt visit; above 1 for algorithm.advantage = group alone
    minibatches: PositiveInt = 1  # policy optimizer steps per batch, each on a share of it
    sync_interval: PositiveInt = 1  # policy steps between weight pushes
    max_staleness: int = Field(1, ge=0)  # versions the oldest token of a trajectory may lag the policy
    policy_optimizer: OptimizerConfig = OptimizerConfig(lr=1e-6)
    critic_optimizer: OptimizerConfig = OptimizerConfig(lr=5e-6, warmup_steps=10)  # steps: of the policy

    @model_validator(mode="after")
    def _fresh_enough(self) -> RLConfig:
        if self.sync_interval > self.max_staleness + 1:
            raise ValueError(
                f"sync_interval={self.sync_interval} with max_staleness={self.max_staleness}: before the next push "
                "every trajectory would be dropped as stale; raise max_staleness to sync_interval - 1 or more"
            )
        return self


class DataConfig(Section):
    """JSONL files. A task has ``prompt`` (text or chat messages), ``label``, optional ``id`` and free fields."""

    train: Path
    eval: Path | None = None
    sft: Path | None = None  # {"prompt": text, "segments": [[text, trained], ...]} per line


class SamplingConfig(Section):
    """With ``top_k`` (and ``top_p``) the engine reports every token's support, and the trainer evaluates over it."""

    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1)  # -1 or 0: the full vocabulary

    @property
    def truncated(self) -> bool:
        return self.top_k > 0

    @model_validator(mode="after")
    def _support_is_known(self) -> SamplingConfig:
        if self.top_p != 1.0 and not self.truncated:
            raise ValueError(
                f"top_p={self.top_p} without top_k: the engine reports the support of truncated sampling only for a "
                "finite top_k, and without it the importance ratio would be biased; set top_k (at most SGLang's "
                "--sampling-mask-max-tokens) or top_p=1.0"
            )
        if self.top_k == 1:
            raise ValueError("top_k=1: greedy sampling has log-probability 0 and no gradient; use top_k >= 2 or -1")
        return self


class RolloutConfig(Section):
    """Episodes: who plays them, how many at once, and their limits."""

    environment: str  # import path "package.module:Class", or the name of an entry point
    environment_args: dict[str, Any] = {}
    reward: str | None = None  # likewise "package.module:function"; overrides the environment's own reward
    workers: PositiveInt = 1  # processes
    concurrency: PositiveInt = 64  # episodes in flight per worker
    max_turns: PositiveInt = 16
    max_tokens: PositiveInt = 4096  # per trajectory, prompt and observations included
    max_tokens_per_turn: PositiveInt = 1024
    episode_timeout: float = Field(3600.0, gt=0)  # seconds of wall time
    max_retries: int = Field(5, ge=0)  # generation attempts per turn when an engine fails
    sampling: SamplingConfig = SamplingConfig()


class EngineConfig(Section):
    """SGLang servers. ``sglang`` passes any of its flags through, e.g. ``{mem_fraction_static: 0.8}``."""

    count: PositiveInt = 1
    tp: PositiveInt = 1
    host: str = "127.0.0.1"
    port: int = Field(0, ge=0, le=65535)  # 0: a free port per engine; else port, port + 1, …
    max_restarts: int = Field(3, ge=0)
    start_timeout: float = Field(600.0, gt=0)  # seconds until the server must answer
    health_timeout: PositiveInt = 30  # seconds without a token, when asked for one, until it gets no more turns
    sglang: dict[str, Any] = {}

    @property
    def sampling_mask_max_tokens(self) -> int:
        """The most ids of a truncated support that a server reports for one token."""
        return self.sglang.get("sampling_mask_max_tokens", SAMPLING_MASK_MAX_TOKENS)


class WeightsConfig(Section):
    """How new weights reach the engines (docs/weights.md)."""

    mode: Literal["group", "disk", "delta"] = "group"
    directory: Path | None = None  # disk, delta: where trainer and engines both see it; None: weights/ of the run
    local_directory: Path | None = None  # delta: for the sidecars' copies; None: inside `directory`
    bucket_bytes: PositiveInt = 256 * 2**20  # sent at once; a source rank needs twice as much memory
    sources_per_stage: PositiveInt = 1  # trainer ranks of each pipeline stage that send
    pause: Literal["retract", "in_place"] = (
        "retract"  # in_place: requests in flight keep keys and values of old weights
    )
    verify_every: int = Field(0, ge=0)  # pushes from one comparison of checksums to the next; 0: none
    timeout: float = Field(300.0, gt=0)  # seconds that any one call or broadcast may take before its engine is dropped


class BufferConfig(Section):
    host: str = "127.0.0.1"
    port: int = Field(0, ge=0, le=65535)  # 0: any free port
    lease_seconds: float = Field(120.0, gt=0)
    max_attempts: PositiveInt = 5  # leases of one visit before its task is set aside
    max_body_bytes: PositiveInt = 256 * 2**20
    max_stored_bytes: PositiveInt = 64 * 2**30


class EvalConfig(Section):
    """Held-out success at temperature 1 under one pinned weight version. ``every: 0``: only start and end."""

    every: int = Field(0, ge=0)  # policy steps
    prompts: PositiveInt = 512
    mismatch_min_tokens: PositiveInt = 1000  # fewer same-version tokens than this fail the check
    mismatch_limit: float | None = Field(None, gt=0)  # mean |log-prob difference| above it ends the run


class CheckpointConfig(Section):
    save_interval: PositiveInt = 50  # policy steps
    keep: PositiveInt = 2  # complete ones; with 1 there is none to fall back to from a damaged one
    asynchronous: bool = False  # written while training goes on, from a second copy of the state in host memory


class LoggingConfig(Section):
    """What a run tells the outside, besides logs, ``metrics.jsonl`` and TensorBoard."""

    samples_every: int = Field(20, ge=0)  # RL steps between entries in samples.jsonl, for `report`; 0: none
    samples: PositiveInt = 4  # trajectories per entry
    wandb_project: str | None = None  # needs the package wandb
    prometheus_port: int | None = Field(None, ge=0, le=65535)  # /metrics of the trainer's rank 0; 0: any free one
    prometheus_host: str = "127.0.0.1"


class WaitAlarm(Section):
    """``warn`` writes a line to the trainer's log; ``stop`` saves a checkpoint and ends the run."""

    limit: float = Field(ge=0)
    action: Literal["warn", "stop"] = "warn"


class Alarm(WaitAlarm):
    """Goes off when its quantity is beyond ``limit`` in ``steps`` RL steps in a row."""

    steps: PositiveInt = 1


class AlarmsConfig(Section):
    """What is watched while the trainer runs; docs/metrics.md names the quantities."""

    nonfinite: Literal["ignore", "warn", "stop"] = "stop"  # a metric of any stage that is NaN or infinite
    entropy_below: Alarm | None = None  # train/entropy
    masked_above: Alarm | None = None  # 1 - dis/accepted_fraction
    mismatch_above: Alarm | None = None  # lag/own_abs_logprob_diff, where there are such tokens
    no_data_for: WaitAlarm | None = None  # seconds that a step has waited for its batch


class ClusterConfig(Section):
    """The trainer's nodes, which ``megatron-sao plan`` holds a run against; how many GPUs of each it uses is
    ``parallel.nproc_per_node``."""

    gpu_memory_gb: float = Field(80.0, gt=0)  # of one GPU, in 10^9 bytes
    host_memory_gb: float = Field(1000.0, gt=0)  # of one node


class RunConfig(Section):
    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$")
    seed: int = 0
    deterministic: bool = True
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig
    parallel: ParallelConfig = ParallelConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    sft: SFTConfig = SFTConfig()
    value: ValueConfig = ValueConfig()
    rl: RLConfig = RLConfig()
    engine: EngineConfig = EngineConfig()
    weights: WeightsConfig = WeightsConfig()
    buffer: BufferConfig = BufferConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    alarms: AlarmsConfig = AlarmsConfig()
    cluster: ClusterConfig = ClusterConfig()

    @model_validator(mode="after")
    def _parts_fit(self) -> RunConfig:
        algorithm, rl = self.algorithm, self.rl
        grouped, critic = algorithm.advantage == "group", algorithm.advantage == "critic"
        refusals = {
            f"rl.group_size = {rl.group_size} with algorithm.advantage = {algorithm.advantage!r}: groups are compared "
            "by advantage: group, which needs at least 2; everything else samples one rollout per prompt": (
                grouped != (rl.group_size > 1)
            ),
            f"rl.batch_size = {rl.batch_size} is not a multiple of rl.group_size = {rl.group_size}": (
                rl.batch_size % rl.group_size != 0
            ),
            f"rl.batch_size = {rl.batch_size} is not a multiple of rl.minibatches = {rl.minibatches}": (
                rl.batch_size % rl.minibatches != 0
            ),
            f"value.steps = {self.value.steps} pretrains a critic, but algorithm.advantage = {algorithm.advantage!r} "
            "has none; set value.steps to 0": self.value.steps > 0 and not critic,
            f"algorithm.truncation = bootstrap needs a critic, but algorithm.advantage = {algorithm.advantage!r} has "
            "none; set it to terminal": algorithm.truncation == "bootstrap" and not critic,
            "algorithm.loss_denominator = accepted_tokens counts what DIS accepts, but algorithm.policy_loss = "
            "ppo_clip rejects nothing; use action_tokens or trajectories": (
                algorithm.loss_denominator == "accepted_tokens" and algorithm.policy_loss != "dis"
            ),
            f"algorithm.pi_old = {algorithm.pi_old} with algorithm.policy_loss = dis, which has no old policy: leave "
            "pi_old out, or set policy_loss to ppo_clip": (
                algorithm.pi_old != "recomputed" and algorithm.policy_loss == "dis"
            ),
            "parallel.offload_optimizer = true with model.dtype = float32, where the main weights are the model's own "
            "and cannot leave; set it to false or model.dtype to bfloat16": (
                self.parallel.offload_optimizer and self.model.dtype == "float32"
            ),
            f"parallel.offload_idle_model = true with algorithm.advantage = {algorithm.advantage!r}: without a critic "
            "no model makes way for another; set it to false": self.parallel.offload_idle_model and not critic,
            f"algorithm.pi_old = latest_pushed: checkpoint.save_interval = {self.checkpoint.save_interval} must be a "
            f"multiple of rl.sync_interval = {rl.sync_interval}, so that a resumed run knows the pushed weights": (
                algorithm.pi_old == "latest_pushed" and self.checkpoint.save_interval % rl.sync_interval != 0
            ),
        }
        for sentence, refused in refusals.items():
            if refused:
                raise ValueError(sentence)
        return self

    @model_validator(mode="after")
    def _distributed_optimizer_is_adam(self) -> RunConfig:
        optimizers = {
            "sft.optimizer": self.sft.optimizer,
            "value.optimizer": self.value.optimizer,
            "rl.policy_optimizer": self.rl.policy_optimizer,
            "rl.critic_optimizer": self.rl.critic_optimizer,
        }
        for field, optimizer in optimizers.items():
            if self.parallel.distributed_optimizer and optimizer.name != "adam":
                raise ValueError(
                    f"parallel.distributed_optimizer = true with {field}.name = {optimizer.name}: Megatron distributes "
                    "the state of Adam alone; set the former to false or the latter to adam"
                )
        return self

    @model_validator(mode="after")
    def _supports_are_reported(self) -> RunConfig:
        top_k = self.rollout.sampling.top_k
        limit = self.engine.sampling_mask_max_tokens
        if type(limit) is not int or limit < 1:
            raise ValueError(
                f"engine.sglang.sampling_mask_max_tokens = {limit!r}: write a positive whole number, or leave it out "
                f"for SGLang's own {SAMPLING_MASK_MAX_TOKENS}"
            )
        if top_k > limit:
            raise ValueError(
                f"rollout.sampling.top_k = {top_k}, but the engines report supports of at most {limit} tokens and "
                f"would abort beyond; lower it, or raise engine.sglang.sampling_mask_max_tokens to {top_k}"
            )
        return self


def load_config(path: str | Path, overrides: list[str] | None = None) -> RunConfig:
    """Read, override and validate a run config.

    Args:
        path: YAML file.
        overrides: ``"section.field=value"`` strings; values are YAML.

    Raises:
        ConfigError: unreadable file, malformed YAML, unknown key, wrong type, impossible combination.
    """
    try:
        raw = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold a mapping of sections, not {type(raw).__name__}")
    for override in overrides or []:
        _apply_override(raw, override)
    return parse_config(raw, " ".join([str(path), *(f"--set {override}" for override in overrides or [])]))


def parse_config(raw: dict[str, Any], source: str = "config") -> RunConfig:
    """Validate a plain mapping; see :func:`load_config` for the errors."""
    try:
        return RunConfig.model_validate(raw)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{source}: {_sentence(problem)}" for problem in error.errors())) from None


def override_config(config: RunConfig, overrides: list[str]) -> RunConfig:
    """``config`` with ``"section.field=value"`` strings applied; see :func:`load_config` for the errors."""
    raw = config.model_dump(mode="json")
    for override in overrides:
        _apply_override(raw, override)
    return parse_config(raw, "the config with " + " ".join(overrides))


def dump_config(config: RunConfig) -> str:
    """The resolved config as YAML that :func:`load_config` reads back to an equal object."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _apply_override(raw: dict[str, Any], override: str) -> None:
    key, separator, value = override.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"--set {override!r}: expected section.field=value")
    node = raw
    *parents, leaf = key.strip().split(".")
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise ConfigError(f"--set {override!r}: {parent!r} is a value, not a section")
    try:
        node[leaf] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {override!r}: the value is not valid YAML: {error}") from error


def _sentence(problem: dict[str, Any]) -> str:
    loc, where = problem["loc"], ".".join(map(str, problem["loc"]))
    if problem["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(loc[-1]), _fields_at(loc[:-1]), n=1, cutoff=0.0)
        nearest = ".".join(map(str, (*loc[:-1], *near)))
        return f"unknown key {where!r}" + (f"; the nearest known key is {nearest!r}" if near else "")
    if problem["type"] == "missing":
        return f"{where!r} is required and missing"
    message = problem["msg"].removeprefix("Value error, ")
    if isinstance(problem["input"], dict):
        return f"{where}: {message}" if where else message  # a check across sections names its fields itself
    return f"{where!r} = {problem['input']!r}: {message}"


def _fields_at(location: tuple[str | int, ...]) -> list[str]:
    section: type[BaseModel] = RunConfig
    for part in location:
        annotation = section.model_fields[str(part)].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        section = annotation
    return list(section.model_fields)
