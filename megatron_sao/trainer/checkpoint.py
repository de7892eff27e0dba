"""Checkpoints: everything a stage needs to go on, in Megatron's distributed format, complete or absent.

A checkpoint is named by the position from which training resumes, ``<stage>-<step>``. It appears under a temporary
name and is renamed when every rank has written it; ``latest`` names the newest complete one. Sampling orders and
permutations are functions of (seed, stage, step), so no random state needs to be stored.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.models.gpt.gpt_model import GPTModel
from torch.distributed.checkpoint import CheckpointException

from megatron_sao.config import ConfigError
from megatron_sao.trainer.optimizer_state import load_optimizer_state, sharded_optimizer_state
from megatron_sao.trainer.trainable import Trainable

STAGES = ("sft", "value", "rl")
_NAME = re.compile(r"^(sft|value|rl)-(\d+)$")
_DECIDED_BY = "what has optimizer state depends on the optimizer's name, algorithm.critic_trainable and model.dtype"


class CheckpointError(ConfigError):
    """A checkpoint that cannot be used; the message says which one and why."""


@dataclass(frozen=True, order=True)
class Position:
    """Where training stands: ``step`` is the next step of ``stage``."""

    stage_index: int
    step: int

    @classmethod
    def of(cls, stage: str, step: int) -> Position:
        return cls(STAGES.index(stage), step)

    @property
    def stage(self) -> str:
        return STAGES[self.stage_index]

    def __str__(self) -> str:
        return f"{self.stage}-{self.step}"


@dataclass(frozen=True)
class Contents:
    """Names of the models and of the optimizers that a checkpoint holds; between stages it holds no optimizer."""

    models: list[str]
    optimizers: list[str]


class Checkpoints:
    """The checkpoints of one run. ``save`` and ``load`` are collective.

    Args:
        directory: where they live.
        model_config: the HF ``config.json``; a checkpoint of another model is refused.
        keep: how many complete ones to retain.
    """

    def __init__(self, directory: Path, model_config: dict[str, Any], keep: int) -> None:
        self._directory, self._keep = directory, keep
        self._fingerprint = hashlib.sha256(json.dumps(model_config, sort_keys=True).encode()).hexdigest()

    def latest(self) -> Position | None:
        """The newest complete checkpoint, or None. Raises CheckpointError where it belongs to another model."""
        pointer = self._directory / "latest"
        if not pointer.exists():
            return None
        name = pointer.read_text().strip()
        match = _NAME.match(name)
        try:
            meta = json.loads((self._directory / name / "meta.json").read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{pointer} names {name!r}, which is no complete checkpoint ({error})") from error
        if match is None or meta["config"] != self._fingerprint:
            raise CheckpointError(
                f"the checkpoint {self._directory / name} was made from another config.json; "
                "use another run directory, or the model it was made from"
            )
        return Position.of(match[1], int(match[2]))

    def oldest(self) -> Position:
        """The oldest retained checkpoint: the buffer must keep every batch from there on."""
        return min(self._complete())

    def save(
        self,
        position: Position,
        models: dict[str, list[GPTModel]],
        trained: dict[str, Trainable],
        extra: dict[str, Any] | None = None,
    ) -> None:
        """Write the weights of ``models``, the optimizers of ``trained`` (of the same names) and ``extra`` as JSON.

        Of the others, those beyond ``position`` go, and then the oldest beyond ``keep``.
        """
        final = self._directory / str(position)
        temporary = self._directory / f"{position}.tmp"
        if dist.get_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        dist.barrier()
        dist_checkpointing.save(_sharded_state(models, trained, loading=False), str(temporary))
        dist.barrier()
        if dist.get_rank() == 0:
            meta = {"config": self._fingerprint, "models": sorted(models), "optimizers": sorted(trained)}
            (temporary / "extra.json").write_text(json.dumps(extra or {}))
            (temporary / "meta.json").write_text(json.dumps(meta))
            _sync(temporary)
            shutil.rmtree(final, ignore_errors=True)
            temporary.rename(final)
            self._point_to(position)
            self._remove_surplus(position)
        dist.barrier()

    def load(self, position: Position, models: dict[str, list[GPTModel]], trained: dict[str, Trainable]) -> None:
        """Fill ``models`` and ``trained``, strictly: what the checkpoint lacks or has no place for is an error."""
        path = self._directory / str(position)
        state = _sharded_state(models, trained, loading=True)
        try:
            loaded, left, lacking = dist_checkpointing.load(state, str(path), strict=StrictHandling.RETURN_ALL)
        except (OSError, ValueError, KeyError, RuntimeError, CheckpointException) as error:
            raise CheckpointError(
                f"cannot load the checkpoint {path} ({error}): it is damaged, or this run has another config than the "
                f"one it was made with ({_DECIDED_BY})"
            ) from error
        if lacking:
            raise CheckpointError(
                f"the checkpoint {path} lacks {min(lacking)!r} ({len(lacking)} such in all); resume with the config it "
                f"was made with ({_DECIDED_BY})"
            )
        unread = [key for key in sorted(left) if _belongs_to(key, models) or _belongs_to_optimizer(key, trained)]
        if unread:
            raise CheckpointError(
                f"the checkpoint {path} holds {unread[0]!r} ({len(unread)} such in all), for which this run has no "
                f"place; resume with the config it was made with ({_DECIDED_BY})"
            )
        for name, chunks in models.items():
            for index, chunk in enumerate(chunks):
                prefix = f"{name}."
                weights = {k.removeprefix(prefix): v for k, v in loaded[f"{name}/{index}"].items()}
                chunk.load_state_dict(weights)
        for name, trainable in trained.items():
            try:
                load_optimizer_state(trainable, loaded[f"{name}/optimizer"])
                trainable.scheduler.load_state_dict(loaded[f"{name}/scheduler"])
            except AssertionError as error:  # how Megatron refuses another schedule
                stage, reason = position.stage, str(error).partition("\n")[0]
                optimizer = f"rl.{name}_optimizer" if stage == "rl" else f"{stage}.optimizer"
                raise CheckpointError(
                    f"the checkpoint {path} was made with other optimizer settings ({reason}); resume with the "
                    f"{optimizer} and the number of steps it was made with ({stage}.steps; in RL rl.minibatches and "
                    "algorithm.critic_updates multiply it)"
                ) from error

    def contents(self, position: Position) -> Contents:
        meta = json.loads((self._directory / str(position) / "meta.json").read_text())
        return Contents(meta["models"], meta["optimizers"])

    def extra(self, position: Position) -> dict[str, Any]:
        """What :meth:`save` was given besides models and optimizers."""
        path = self._directory / str(position) / "extra.json"
        try:
            return json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"cannot read {path} ({error}): the checkpoint is damaged or of an older version; let "
                f"{self._directory / 'latest'} name another one, or use another run directory"
            ) from error

    def _remove_surplus(self, saved: Position) -> None:
        # What lies beyond belongs to a future that was abandoned when ``latest`` was set back.
        past = sorted(position for position in self._complete() if position <= saved)
        for position in set(self._complete()).difference(past[-self._keep :]):
            shutil.rmtree(self._directory / str(position))

    def _complete(self) -> list[Position]:
        names = (p.parent.name for p in self._directory.glob("*/meta.json"))
        return [Position.of(m[1], int(m[2])) for m in map(_NAME.match, names) if m]

    def _point_to(self, position: Position) -> None:
        temporary = self._directory / "latest.tmp"
        temporary.write_text(f"{position}\n")
        with temporary.open() as file:
            os.fsync(file.fileno())
        os.replace(temporary, self._directory / "latest")
        _sync_directory(self._directory)


def _belongs_to(key: str, models: Iterable[str]) -> bool:
    return key.startswith(tuple(f"{name}." for name in models))


def _belongs_to_optimizer(key: str, trained: Iterable[str]) -> bool:
    return key.startswith("optimizer.") and any(f".{name}." in key for name in trained)


def _sharded_state(models: dict[str, list[GPTModel]], trained: dict[str, Trainable], loading: bool) -> dict[str, Any]:
    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        # survives a change of TP, PP and DP
        "distrib_optim_sharding_type": "fully_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    state: dict[str, Any] = {}
    for name, chunks in models.items():
        for index, chunk in enumerate(chunks):
            state[f"{name}/{index}"] = chunk.sharded_state_dict(prefix=f"{name}.", metadata=metadata)
    for name, trainable in trained.items():
        weights = {key: value for key, value in state.items() if key.startswith(f"{name}/")}
        if len(weights) == 1:
            weights = {"model": state[f"{name}/0"]}
        else:
            weights = {f"model{index}": state[f"{name}/{index}"] for index in range(len(weights))}
        state[f"{name}/optimizer"] = sharded_optimizer_state(trainable, weights, metadata, loading)
        state[f"{name}/scheduler"] = trainable.scheduler.state_dict()
    return state


def _sync(directory: Path) -> None:
    """Force every file below ``directory`` to disk, so that a rename never precedes its content."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    _sync_directory(directory)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
