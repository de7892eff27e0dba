"""The truth about the data: which trajectories exist, which batch went to which step, which trainer rules.

Payloads lie in append-only segment files, everything else in the index. A method that returns has its effect on
the disk. Not thread-safe: the server calls it from one thread.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from sqlite3 import Row
from typing import Any

from megatron_sao.buffer.archive import Archive
from megatron_sao.buffer.database import Database, StoreError
from megatron_sao.buffer.drops import DROP_COUNTERS, Drops
from megatron_sao.buffer.engines import Engines
from megatron_sao.buffer.segments import Record, Segments
from megatron_sao.buffer.visits import Visits
from megatron_sao.config import RunConfig
from megatron_sao.data.batches import STAGES
from megatron_sao.data.tasks import Task
from megatron_sao.data.trajectory import Trajectory, parse_version

RESERVED_BYTES = 32 * 2**20  # of free disk space that no trajectory takes


class Store:
    """The buffer without HTTP.

    Args:
        directory: owned exclusively; created if absent.
        config: of the run.
        tasks, eval_tasks: must be those of the first visits in the directory, as must ``rl.group_size``.
        clock: monotonic seconds.
        run_id: the only run whose trainers and trajectories are let in; default ``config.name``.

    Raises:
        StoreError: another process owns the directory, or it belongs to another run, other tasks or groups. Every
            method raises it for a refusal, with the HTTP status that fits.
    """

    def __init__(
        self,
        directory: Path,
        config: RunConfig,
        tasks: list[Task],
        eval_tasks: list[Task],
        clock: Callable[[], float] = time.monotonic,
        run_id: str | None = None,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._config = config
        self.run_id = run_id or config.name
        self._db = Database(directory / "index.sqlite")
        self._segments = Segments(directory / "segments")
        try:
            self._bind(directory, tasks, eval_tasks)
        except StoreError:
            self.close()
            raise
        self.archive = Archive(self._db, self._segments)
        self.drops = Drops(self._db)
        self.engines = Engines(self._db, clock)
        self.visits = Visits(self._db, self.engines, self.drops, config, tasks, eval_tasks, clock)

    def _bind(self, directory: Path, tasks: list[Task], eval_tasks: list[Task]) -> None:
        """A directory without a visit belongs to this run, its tasks and its groups from now on; another must do so
        already."""
        begun = self._db.scalar("SELECT 1 FROM visits UNION SELECT 1 FROM evaluations") is not None
        digest = hashlib.sha256(json.dumps([asdict(task) for task in tasks + eval_tasks]).encode()).hexdigest()
        data, group_size = self._config.data, self._config.rl.group_size
        ours = {"run_id": self.run_id, "tasks": digest, "group_size": group_size}
        recorded = {key: self._db.get(key) for key in ours}
        problems = {
            "run_id": f"by the run {recorded['run_id']!r}, and this is {self.run_id!r}",
            "tasks": f"from other tasks than {data.train} and {data.eval} hold now",
            "group_size": f"with rl.group_size = {recorded['group_size']}, now it is {group_size}, which gives every "
            "epoch number another meaning",
        }
        for key, problem in problems.items():
            if recorded[key] not in (None, ours[key]) and (begun or key == "run_id"):
                raise StoreError(
                    409, f"{directory} was filled {problem}; restore what it was or choose a new run directory"
                )
        if recorded != ours:
            with self._db.transaction():
                for key, value in ours.items():
                    self._db.set(key, value)

    def close(self) -> None:
        self._segments.close()
        self._db.close()

    # Trainers

    def register_trainer(self, run_id: str, policy_version: int) -> int:
        """Issue the next incarnation. Its predecessors are refused from now on, engines need a push, evaluations
        that have not ended are void."""
        if run_id != self.run_id:
            raise StoreError(
                409,
                f"this buffer serves the run {self.run_id!r}, not {run_id!r}; check the buffer's URL and --run-dir",
            )
        stage, step = self._db.get("committed", [0, 0])
        if STAGES[stage] == "rl" and policy_version < step:
            raise StoreError(
                410,
                f"a trainer at policy version {policy_version} cannot go on here: this run has committed rl {step}, "
                "and what came before is forgotten; resume from a checkpoint not older than that, or start a new run "
                "directory",
            )
        with self._db.transaction():
            incarnation = self._db.run("INSERT INTO trainers(policy_version) VALUES(?)", policy_version).lastrowid
            self.engines.all_dirty()
            for evaluation in self._db.rows("SELECT * FROM evaluations"):
                if self._open_visits(evaluation["id"]):
                    self._void_evaluation(evaluation, "the trainer restarted")
        return incarnation

    def mark_engine(self, id: str, state: str, version: str | None, incarnation: int) -> None:
        self._rules(incarnation)
        self.engines.mark(id, state, version, incarnation)

    def incarnation(self) -> int:
        """The ruling one; 0 before any trainer registered."""
        return self._db.scalar("SELECT coalesce(max(incarnation), 0) FROM trainers")

    def current_version(self) -> str | None:
        """The newest version verified on an engine under the ruling incarnation, else the one it starts from."""
        trainer = self._db.row("SELECT * FROM trainers ORDER BY incarnation DESC LIMIT 1")
        if trainer is None:
            return None
        return trainer["pushed"] or f"{trainer['incarnation']}.{trainer['policy_version']}"

    def _rules(self, incarnation: int) -> None:
        ruling = self.incarnation()
        if incarnation != ruling:
            raise StoreError(
                409,
                f"trainer incarnation {incarnation} does not rule, {ruling} does; this trainer must stop, "
                "or register anew",
            )

    # Trajectories

    def submit(self, items: Sequence[tuple[Trajectory, Record]]) -> list[str | StoreError]:
        """Store validated trajectories, in their encodings, with one fsync for all.

        Returns:
            Per item "accepted", "duplicate", "dropped", or the refusal.

        Raises:
            StoreError: 503, the disk does not take it; nothing of the call is stored.
        """
        self.visits.expire()
        try:
            self._check_room(sum(len(record.payload) for _, record in items))
            # The segments end first: what the index may come to name is never taken back.
            with self._db.transaction(), self._segments.appending():
                ruling = self.incarnation()
                return [self._submit_one(trajectory, record, ruling) for trajectory, record in items]
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            remedy = "free some disk space" if full else "look at the disk of the run directory"
            raise StoreError(503, f"cannot write the trajectory: {error}; {remedy}") from error

    def _check_room(self, size: int) -> None:
        """Raises OSError where a trajectory would take what the index needs: without a commit nothing is given back."""
        disk = os.statvfs(self._directory)
        if disk.f_bavail * disk.f_frsize < size + RESERVED_BYTES:
            raise OSError(
                errno.ENOSPC, f"the last {RESERVED_BYTES >> 20} MiB of the disk are kept for the buffer's index"
            )

    def _submit_one(self, trajectory: Trajectory, record: Record, ruling: int) -> str | StoreError:
        visit = self.visits.find(trajectory.kind, trajectory.epoch, trajectory.task_id)
        refusal = self._refusal(trajectory, visit, ruling)
        if refusal is not None:
            return refusal
        holder = self._db.scalar("SELECT visit FROM trajectories WHERE id=?", trajectory.id)
        if holder is not None and (visit is None or holder != visit["id"]):
            return StoreError(
                422, f"id: {trajectory.id!r} is the id of another visit's trajectory; give each trajectory its own"
            )
        spent = visit["state"] == "done" if visit else trajectory.kind == "train"  # no row: collected long ago
        if holder is not None or spent:
            self._db.count("trajectories_duplicate")
            return "duplicate"
        if visit is None or visit["state"] == "aside":
            reason = (visit and visit["reason"]) or "its evaluation is over"
            self._drop("trajectories_late", trajectory, f"nobody waits for it any more: {reason}")
            return "dropped"
        if self._is_full(trajectory, len(record.payload)):
            return StoreError(
                429,
                f"the buffer is full (buffer.max_stored_bytes = {self._config.buffer.max_stored_bytes}); it takes "
                "trajectories again when the trainer waits for them or has committed a checkpoint",
            )
        evaluation = None
        if trajectory.kind == "eval":
            evaluation = self._db.row("SELECT * FROM evaluations WHERE id=?", trajectory.epoch)
        failure = trajectory.failure or _off_version(trajectory, evaluation)
        if failure is None:
            self.visits.done(visit)
        elif visit["state"] == "leased" and visit["attempt"] == trajectory.attempt:
            self.visits.give_back(visit, failure)
        state = "failed" if failure else "eval" if evaluation else "stored"
        stage_step = (evaluation["stage"], evaluation["step"]) if evaluation else (None, None)
        self._db.run(
            "INSERT INTO trajectories(id, visit, state, stage, step, segment, offset, num_tokens, num_action_tokens, "
            "versions, reason) VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            trajectory.id,
            visit["id"],
            state,
            *stage_step,
            *self._segments.append(record),
            trajectory.num_tokens,
            trajectory.num_action_tokens,
            json.dumps(sorted(trajectory.action_versions, key=parse_version)),
            failure,
        )
        if failure:
            self._drop("trajectories_failed", trajectory, failure)
            return "dropped"
        self._db.count(f"{trajectory.kind}_trajectories_accepted")
        return "accepted"

    def _drop(self, counter: str, trajectory: Trajectory, reason: str) -> None:
        self.drops.add(counter, trajectory.id, trajectory.kind, trajectory.task_id, trajectory.epoch, reason)

    def _is_full(self, trajectory: Trajectory, size: int) -> bool:
        """Whether the byte limit holds this one back. It gives way where the trainer could not go on without: it makes
        room only by committing a checkpoint, and gets to one only with the batches before it. Pacing bounds how many
        come in that way."""
        if self._segments.stored_bytes + size <= self._config.buffer.max_stored_bytes:
            return False
        if trajectory.kind == "eval" or self._trainer_waits():
            self._db.count("accepted_over_limit")
            return False
        return True

    def _trainer_waits(self) -> bool:
        """Whether the batch asked for last does not exist yet."""
        requested = self._db.get("requested")
        return requested is not None and (
            self._db.scalar("SELECT 1 FROM batches WHERE (stage, step)=(?, ?)", *requested[:2]) is None
        )

    def _refusal(self, trajectory: Trajectory, visit: Row | None, ruling: int) -> StoreError | None:
        if trajectory.run_id != self.run_id:
            return StoreError(422, f"run_id: {trajectory.run_id!r} is not this buffer's run {self.run_id!r}")
        for index, (version, _, _) in enumerate(trajectory.versions):
            if parse_version(version)[0] > ruling:
                return StoreError(422, f"versions[{index}]: {version!r} names an incarnation not issued yet ({ruling})")
        entered = visit is not None or self.visits.entered(trajectory.epoch, trajectory.task_id)
        if trajectory.kind == "train" and not entered:
            return StoreError(
                422,
                f"task_id: task {trajectory.task_id!r} has not been leased in epoch {trajectory.epoch}; submit "
                "with the task, epoch and attempt of a lease",
            )
        group = self.visits.groups.label(trajectory.kind, trajectory.task_id, trajectory.epoch)
        if trajectory.group != group:
            return StoreError(
                422, f"group: {trajectory.group!r}, but the lease of this visit says {group!r}; submit with that"
            )
        return None

    # Batches

    def batch(
        self, stage: str, step: int, incarnation: int, batch_size: int, policy_version: int
    ) -> list[dict[str, Any]] | None:
        """The manifest of a step, on the disk before it is returned; None while there are too few complete groups
        (with ``rl.group_size`` 1: trajectories)."""
        self._rules(incarnation)
        if stage == "sft":
            raise StoreError(422, "the stage 'sft' trains on demonstrations; it takes no batch from the buffer")
        groups = self.visits.groups
        if batch_size % groups.size:
            raise StoreError(
                422,
                f"batch_size={batch_size} is not a multiple of rl.group_size = {groups.size}, and a batch holds whole "
                "groups; change one of them",
            )
        key = self._key(stage, step)
        self.visits.expire()
        with self._db.transaction():
            if self._db.get("requested") != [*key, batch_size]:
                self._db.set("requested", [*key, batch_size])
            recorded = self._db.row("SELECT * FROM batches WHERE stage=? AND step=?", *key)
            if recorded is None:
                self._drop_stale(policy_version)
                oldest = groups.oldest_complete(batch_size)
                if len(oldest) < batch_size:
                    return None
                self._db.run("INSERT INTO batches VALUES(?, ?, ?, ?)", *key, batch_size, policy_version)
                for serial in oldest:
                    self._db.run(
                        "UPDATE trajectories SET state='assigned', stage=?, step=? WHERE serial=?", *key, serial
                    )
            elif (recorded["batch_size"], recorded["policy_version"]) != (batch_size, policy_version):
                raise StoreError(
                    409,
                    f"the batch of {stage} {step} was recorded for batch_size={recorded['batch_size']}, "
                    f"policy_version={recorded['policy_version']}, not for {batch_size}, {policy_version}; resume with "
                    "the config it was made with, or choose a new run directory",
                )
        return self.archive.members(*key)

    def commit(self, stage: str, step: int, incarnation: int) -> None:
        """Forget what lies strictly before (stage, step), and every dropped or failed trajectory. Their ids are known
        as collected until the next commit."""
        self._rules(incarnation)
        key = [STAGES.index(stage), step]
        with self._db.transaction():
            if key <= self._db.get("committed", [0, 0]):
                return
            self._db.set("committed", key)
            self._db.run("DELETE FROM trajectories WHERE state='collected'")
            self.visits.collect()
            self._db.run(
                "UPDATE trajectories SET state='collected' WHERE state IN ('dropped', 'failed') "
                "OR (state IN ('assigned', 'eval') AND (stage, step) < (?, ?))",
                *key,
            )
            self._db.run("DELETE FROM batches WHERE (stage, step) < (?, ?)", *key)
            for evaluation in self._db.rows("SELECT id FROM evaluations WHERE (stage, step) < (?, ?)", *key):
                self.visits.forget_evaluation(evaluation["id"])
        live = self._db.rows("SELECT DISTINCT segment FROM trajectories WHERE state!='collected'")
        self._segments.keep_only({row["segment"] for row in live})

    def _key(self, stage: str, step: int) -> tuple[int, int]:
        """(stage, step) as comparable numbers. Raises 410 if it has been collected."""
        key = (STAGES.index(stage), step)
        committed = self._db.get("committed", [0, 0])
        if list(key) < committed:
            raise StoreError(
                410,
                f"{stage} {step} was collected: the trainer committed {STAGES[committed[0]]} {committed[1]}; "
                "resume from a checkpoint not older than that, or start a new run directory",
            )
        return key

    def _drop_stale(self, policy_version: int) -> None:
        resumed_at = {row["incarnation"]: row["policy_version"] for row in self._db.rows("SELECT * FROM trainers")}
        lost = []
        for row in self._db.rows("SELECT serial, id, visit, versions FROM trajectories WHERE state='stored'"):
            oldest = min(_effective(version, resumed_at) for version in json.loads(row["versions"]))
            if policy_version - oldest > self._config.rl.max_staleness:
                reason = f"stale: version {oldest}, policy {policy_version}"
                self._db.run("UPDATE trajectories SET state='dropped', reason=? WHERE serial=?", reason, row["serial"])
                visit = self._db.row("SELECT * FROM visits WHERE id=?", row["visit"])
                self.drops.add("dropped_stale", row["id"], "train", visit["task_id"], visit["epoch"], reason)
                lost.append((visit, reason))
        for visit, reason in lost:  # after all are found: one that is stale itself is not counted as a sibling
            self.visits.groups.drop_siblings(visit, reason)

    # Evaluations

    def start_evaluation(self, stage: str, step: int, incarnation: int, version: str, num_prompts: int) -> None:
        """Open an evaluation; again with the same arguments: nothing; under another version: afresh."""
        self._rules(incarnation)
        key = self._key(stage, step)
        with self._db.transaction():
            existing = self._db.row("SELECT * FROM evaluations WHERE stage=? AND step=?", *key)
            if existing and (existing["version"], existing["num_prompts"]) == (version, num_prompts):
                return
            if existing:
                self._void_evaluation(existing, "the evaluation was started afresh")
            self.visits.start_evaluation(*key, version, num_prompts)

    def evaluation_result(self, stage: str, step: int, incarnation: int) -> list[str] | None:
        """Ids in task order once every visit is done or set aside; None before. A visit set aside has no id."""
        self._rules(incarnation)
        self.visits.expire()
        key = self._key(stage, step)
        number = self._db.scalar("SELECT id FROM evaluations WHERE stage=? AND step=?", *key)
        if number is None:
            raise StoreError(404, f"no evaluation of {stage} {step} was started under this trainer; start it")
        if self._open_visits(number):
            return None
        return [
            row["id"]
            for row in self._db.rows(
                "SELECT trajectories.id FROM trajectories JOIN visits ON visits.id=visit "
                "WHERE kind='eval' AND epoch=? AND trajectories.state='eval' ORDER BY visits.id",
                number,
            )
        ]

    def _open_visits(self, number: int) -> int:
        return self._db.scalar(
            "SELECT count(*) FROM visits WHERE kind='eval' AND epoch=? AND state IN ('ready', 'leased')", number
        )

    def _void_evaluation(self, evaluation: Row, reason: str) -> None:
        for row in self._db.rows(
            "SELECT trajectories.id, task_id, visits.epoch FROM trajectories JOIN visits ON visits.id=visit "
            "WHERE trajectories.state='eval' AND stage=? AND step=?",
            evaluation["stage"],
            evaluation["step"],
        ):
            self.drops.add("eval_trajectories_void", row["id"], "eval", row["task_id"], row["epoch"], reason)
        self._db.run(
            "UPDATE trajectories SET state='dropped', reason=? WHERE state='eval' AND stage=? AND step=?",
            reason,
            evaluation["stage"],
            evaluation["step"],
        )
        self.visits.forget_evaluation(evaluation["id"])

    # Figures

    def stats(self) -> dict[str, Any]:
        """COUNTERS since the run began, and what is there now. Numbers, but for run_id, stage and current_version."""
        self.visits.expire()
        states = [engine["state"] for engine in self.engines.list()]
        visits = {
            (row["kind"], row["state"]): row["n"]
            for row in self._db.rows("SELECT kind, state, count(*) AS n FROM visits GROUP BY kind, state")
        }
        requested = self._db.get("requested")
        counters = dict.fromkeys(COUNTERS, 0) | self._db.counters()
        return {
            "run_id": self.run_id,
            "current_version": self.current_version(),
            "stage": STAGES[requested[0]] if requested else None,
            "step": requested[1] if requested else 0,
            "incarnation": self.incarnation(),
            "outstanding": self.visits.outstanding(),
            "outstanding_limit": self.visits.limit(),
            "visits_leased": visits.get(("train", "leased"), 0),
            "visits_ready": visits.get(("train", "ready"), 0),
            "eval_visits_open": visits.get(("eval", "leased"), 0) + visits.get(("eval", "ready"), 0),
            "trajectories_stored": self._db.scalar("SELECT count(*) FROM trajectories WHERE state='stored'"),
            "stored_bytes": self._segments.stored_bytes,
            **{f"engines_{state}": states.count(state) for state in ("clean", "dirty", "sick", "down")},
            **counters,
            "dropped_stale_fraction": counters["dropped_stale"] / max(1, counters["train_trajectories_accepted"]),
        }


COUNTERS = (
    "train_trajectories_accepted",
    "eval_trajectories_accepted",
    "trajectories_duplicate",
    "accepted_over_limit",
    *DROP_COUNTERS,
    "leases_expired",
    "leases_released",
    "train_visits_set_aside",
    "eval_visits_set_aside",
)


def _off_version(trajectory: Trajectory, evaluation: Row | None) -> str | None:
    """Why an evaluation's trajectory does not count: it must come from the one pinned version."""
    if evaluation is None or trajectory.action_versions <= {evaluation["version"]}:
        return None
    return f"sampled under {sorted(trajectory.action_versions)}, but the evaluation pins {evaluation['version']}"


def _effective(version: str, resumed_at: dict[int, int]) -> int:
    """A token of a dead incarnation is no newer than the checkpoints its successors resumed from."""
    incarnation, n = parse_version(version)
    return min([n] + [resume for later, resume in resumed_at.items() if later > incarnation])
