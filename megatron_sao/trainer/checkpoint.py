"""Checkpoints: everything a stage needs to go on, in Megatron's distributed format, complete or absent.

A checkpoint is named by the position from which training resumes, ``<stage>-<step>``. It appears under a temporary
name and is renamed when every rank has written it; ``latest`` names the newest complete one. Every file's checksum is
recorded and verified before it is read: from a damaged checkpoint training falls back to the one before it. Sampling
orders and permutations are functions of (seed, stage, step), so no random state needs to be stored.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.models.gpt.gpt_model import GPTModel
from torch.distributed.checkpoint import CheckpointException

from megatron_sao.config import ConfigError
from megatron_sao.distributed import all_gather_json, broadcast_json
from megatron_sao.trainer import checkpoint_files as files
from megatron_sao.trainer.optimizer_state import load_optimizer_state, sharded_optimizer_state
from megatron_sao.trainer.trainable import Trainable

log = logging.getLogger(__name__)

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


def config_fingerprint(model_config: dict[str, Any]) -> str:
    """By which a checkpoint knows the model it was made of."""
    return hashlib.sha256(json.dumps(model_config, sort_keys=True).encode()).hexdigest()


def policy_checkpoint(directory: Path, model_config: dict[str, Any]) -> dict[str, Any]:
    """What ``meta.json`` says of a checkpoint outside a run, whose policy is wanted: one of another run, or a converted
    Hugging Face directory.

    Raises:
        CheckpointError: it is none, damaged, or of another model.
    """
    try:
        meta = files.read_meta(directory)
    except ValueError as error:
        raise CheckpointError(
            f"{directory} is neither a directory made by tools/convert_hf_to_megatron.py nor a checkpoint of a run "
            f"(RUN/checkpoints/STAGE-STEP): {error}"
        ) from error
    if meta["config"] != config_fingerprint(model_config):
        raise CheckpointError(
            f"{directory} was made from another config.json than that of the model it is to be used with; name the "
            "model it was made from"
        )
    for name in {".metadata", "metadata.json"} & meta["files"].keys():
        if damage := files.damage(directory / name, tuple(meta["files"][name])):
            raise CheckpointError(f"the checkpoint {directory} is damaged: {damage}")
    return meta


class Checkpoints:
    """The checkpoints of one run. All methods but ``contents``, ``extra`` and ``oldest`` are collective.

    Args:
        directory: where they live, on a file system that all ranks share.
        model_config: the HF ``config.json``; a checkpoint of another model is refused.
        keep: how many complete ones to retain.
        device: of this rank, for its collectives.
        asynchronous: whether files are written while training goes on.

    Attributes:
        newest: the newest complete checkpoint that is not abandoned, once :meth:`find_newest` has looked for it.
    """

    def __init__(
        self, directory: Path, model_config: dict[str, Any], keep: int, device: torch.device, asynchronous: bool
    ) -> None:
        self._directory, self._keep, self._device, self._asynchronous = directory, keep, device, asynchronous
        self._fingerprint = config_fingerprint(model_config)
        self._writing: _Writing | None = None
        self.newest: Position | None = None

    def find_newest(self) -> Position | None:
        """The checkpoint that ``latest`` names or, where that is damaged, the newest intact one before it.

        Falling back is reported as an error in the log, and ``latest`` is set back. The buffer serves the batches
        from the older checkpoint on again; the next save takes the damaged one's place or removes it.

        Returns:
            None where there is no checkpoint at all.

        Raises:
            CheckpointError: there are checkpoints but none that can be used, or they belong to another model.
        """
        named, candidates = broadcast_json(self._candidates() if dist.get_rank() == 0 else None, self._device)
        problems = []
        for position in (Position(*candidate) for candidate in candidates):
            problem = self._damage(position)
            if problem is None:
                self._fall_back(position, named, problems)
                return position
            problems.append(problem)
        if named is None and not problems:
            return None
        raise CheckpointError(
            f"no checkpoint in {self._directory} can be used: {'; '.join(problems) or 'there is none'} (the file "
            f"`latest` there names {named!r}); restore the files, let `latest` name another checkpoint, or use another "
            "run directory"
        )

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

        The checkpoint is complete when :meth:`finish` says so, which must be before the next save.

        Raises:
            CheckpointError: it cannot be written; those there were are as they were.
        """
        assert self._writing is None, "finish the save in progress first"
        temporary = self._directory / f"{position}.tmp"
        try:
            if dist.get_rank() == 0:
                files.sweep(self._directory)
                temporary.mkdir(parents=True)
            dist.barrier()
            state = _sharded_state(models, trained, loading=False)
            request = dist_checkpointing.save(state, str(temporary), async_sharded_save=True, async_strategy="mcore")
        except (OSError, CheckpointException) as error:
            raise self._unwritable(temporary, error) from error
        meta = {"config": self._fingerprint, "models": sorted(models), "optimizers": sorted(trained)}
        self._writing = _Writing(position, temporary, request, meta, json.dumps(extra or {}))
        self._writing.start(self._asynchronous)

    def finish(self, wait: bool) -> bool:
        """Complete the save in progress, if every rank has written its part; ``wait`` until it has.

        Of the other checkpoints, those beyond the newest before it go, and then the oldest beyond ``keep``.

        Returns:
            Whether a checkpoint became complete.

        Raises:
            CheckpointError: it cannot be written; those there were are as they were.
        """
        writing = self._writing
        if writing is None:
            return False
        outcomes = all_gather_json(writing.outcome(wait), self._device)
        if None in outcomes:
            return False
        self._writing = None
        try:
            if problems := [error for error, _ in outcomes if error is not None]:
                raise OSError("; ".join(problems))
            for finalize in writing.request.finalize_fns:
                finalize()
            if dist.get_rank() == 0:
                self._complete_save(writing, dict(item for _, checksums in outcomes for item in checksums.items()))
        except (OSError, CheckpointException) as error:
            raise self._unwritable(writing.temporary, error) from error
        dist.barrier()
        self.newest = writing.position
        return True

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
        meta = files.read_meta(self._directory / str(position))
        return Contents(meta["models"], meta["optimizers"])

    def extra(self, position: Position) -> dict[str, Any]:
        """What :meth:`save` was given besides models and optimizers."""
        return json.loads((self._directory / str(position) / "extra.json").read_text())

    def _candidates(self) -> tuple[str | None, list[tuple[int, int]]]:
        """What ``latest`` says, and the checkpoints that may be resumed from, newest first."""
        pointer = self._directory / "latest"
        named = pointer.read_text(errors="replace").strip() if pointer.exists() else None
        match = _NAME.match(named or "")
        if match:
            files.roll_forward(self._directory / named)
        limit = Position.of(match[1], int(match[2])) if match else Position(len(STAGES), 0)
        usable = sorted((position for position in self._complete() if position <= limit), reverse=True)
        return named, [(position.stage_index, position.step) for position in usable]

    def _damage(self, position: Position) -> str | None:
        """What is wrong with a checkpoint, the same sentence on every rank. Each reads its share of the files."""
        path, problem = self._directory / str(position), None
        try:
            meta = files.read_meta(path)
        except ValueError as error:
            problem = str(error)
        else:
            if meta["config"] != self._fingerprint:
                raise CheckpointError(
                    f"the checkpoint {path} was made from another config.json; use another run directory, or the model "
                    "it was made from"
                )
            share = sorted(meta["files"].items())[dist.get_rank() :: dist.get_world_size()]
            found = (files.damage(path / name, tuple(expected)) for name, expected in share)
            problem = next((sentence for sentence in found if sentence is not None), None)
        return next((p for p in all_gather_json(problem, self._device) if p is not None), None)

    def _fall_back(self, position: Position, named: str | None, problems: list[str]) -> None:
        self.newest = position
        if str(position) == named or dist.get_rank() != 0:
            return
        reason = "; ".join(problems) or "that is no complete checkpoint"
        log.error("`latest` names %s, but %s: TRAINING FALLS BACK TO THE CHECKPOINT %s", named, reason, position)
        files.write_atomically(self._directory / "latest", f"{position}\n")

    def _complete_save(self, writing: _Writing, checksums: dict[str, files.Checksum]) -> None:
        """On rank 0, when all ranks have written their files."""
        temporary, position = writing.temporary, writing.position
        (temporary / "extra.json").write_text(writing.extra)
        for path in temporary.iterdir():  # Megatron's metadata and ours
            if path.name not in checksums:
                checksums[path.name] = files.checksum(path)
        files.sync(temporary)
        files.write_meta(temporary, writing.meta | {"files": checksums})
        files.publish(temporary, self._directory / str(position))
        files.write_atomically(self._directory / "latest", f"{position}\n")
        # What lies beyond the newest belongs to a future that was abandoned when ``latest`` was set back.
        past = sorted(p for p in self._complete() if p == position or (self.newest and p <= self.newest))
        for surplus in set(self._complete()).difference(past[-self._keep :]):
            files.remove(self._directory / str(surplus))

    def _unwritable(self, temporary: Path, error: Exception) -> CheckpointError:
        if dist.get_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        existing = next(parent for parent in temporary.absolute().parents if parent.exists())
        free = shutil.disk_usage(existing).free
        reason = str(error)
        if isinstance(error, CheckpointException):  # on rank 0 it holds every rank's failure, elsewhere none
            reason = "; ".join(f"rank {rank}: {failure}" for rank, (failure, _) in error.failures.items())
        return CheckpointError(
            f"cannot write the checkpoint {temporary}: {reason or 'see rank 0'} ({free / 1e9:.2f} GB are free there; "
            f"Megatron says more above); make room, and the run resumes from the checkpoint {self.newest}"
        )

    def _complete(self) -> list[Position]:
        names = (path.parent.name for path in self._directory.glob(f"*/{files.META}"))
        return [Position.of(m[1], int(m[2])) for m in map(_NAME.match, names) if m]


class _Writing:
    """A save in progress. A thread writes this rank's files and takes their checksums: a thread, because a forked
    process would inherit gloo's, NCCL's and the allocator's locks in whatever state they are. It uses no collectives.
    """

    def __init__(
        self, position: Position, temporary: Path, request: AsyncRequest, meta: dict[str, Any], extra: str
    ) -> None:
        self.position, self.temporary, self.request, self.meta, self.extra = position, temporary, request, meta, extra
        self._checksums: dict[str, files.Checksum] = {}
        self._error: str | None = None
        self._thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)
        self._arguments: list[Any] = []

    def start(self, asynchronous: bool) -> None:
        """Returns when the files are written or, if ``asynchronous``, when all that goes into them is copied."""
        if self.request.async_fn is not None:  # else this rank has nothing to write
            rank, buckets, results = self.request.async_fn_args
            self._arguments = [rank, _copied(buckets) if asynchronous else self.request.preload_fn(), results]
        self._thread.start()
        if not asynchronous:
            self._thread.join()

    def outcome(self, wait: bool) -> tuple[str | None, dict[str, files.Checksum]] | None:
        """(what went wrong, checksums of this rank's files), or None while they are being written."""
        if wait:
            self._thread.join()
        return None if self._thread.is_alive() else (self._error, self._checksums)

    def _write(self) -> None:
        if not self._arguments:
            return
        try:
            self.request.async_fn(*self._arguments)
            self._checksums = {path.name: files.checksum(path) for path in (Path(b[0]) for b in self._arguments[1])}
        except Exception as error:  # reported by finish, on every rank
            self._error = f"rank {self._arguments[0]}: {error!r}"


def _copied(buckets: list[Any]) -> list[Any]:
    """Megatron's write buckets with copies of the tensors in host memory: the next step changes them in place."""
    return [
        (path, key, (raw, [(item, tensor.to("cpu", copy=True)) for item, tensor in tensors]))
        for path, key, (raw, tensors) in buckets
    ]


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
