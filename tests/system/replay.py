"""A stopped live run beside an offline one over the batches that its buffer recorded."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_sao.buffer.store import Store
from megatron_sao.config import RunConfig
from megatron_sao.data.batches import write_batch
from megatron_sao.data.tasks import load_tasks
from megatron_sao.data.trajectory import Trajectory, parse_version
from megatron_sao.models.backend import Backend
from megatron_sao.run_identity import run_identity
from megatron_sao.trainer.loop import Stage, run_rl
from megatron_sao.trainer.main import Run
from tests.distributed.offline import assert_same_checkpoint, read_metrics
from tests.system.runs import read_events


@dataclass(frozen=True)
class Recorded:
    """What the buffer of a run holds that never forgot a batch, because no checkpoint was ever deleted.

    Attributes:
        batches: the trajectories of every step that asked for some, by (stage, step).
        waiting: those that no step has had yet.
        accepted, dropped: how many it ever took, and how many it dropped as stale.
    """

    batches: dict[tuple[str, int], list[Trajectory]]
    waiting: list[Trajectory]
    accepted: int
    dropped: int

    @property
    def trained(self) -> list[Trajectory]:
        return [trajectory for batch in self.batches.values() for trajectory in batch]


def recorded(run_dir: Path, config: RunConfig) -> Recorded:
    tasks = load_tasks(config.data.train), load_tasks(config.data.eval)
    store = Store(run_dir / "buffer", config, *tasks, run_id=run_identity(run_dir, config.name))
    try:
        archive = store.archive
        batches = {
            (batch["stage"], batch["step"]): [archive.trajectory(id) for id in batch["ids"]]
            for batch in archive.recorded_batches()
        }
        waiting = [archive.trajectory(entry["id"]) for entry in archive.index() if entry["state"] == "stored"]
        stats = store.stats()
        return Recorded(batches, waiting, stats["train_trajectories_accepted"], stats["dropped_stale"])
    finally:
        store.close()


def assert_every_trajectory_was_trained_once(found: Recorded) -> None:
    """None is in two batches, none that was accepted is missing, and no visit was played into training twice."""
    everything = found.trained + found.waiting
    assert len({trajectory.id for trajectory in everything}) == len(everything) == found.accepted - found.dropped
    assert len({(trajectory.task_id, trajectory.epoch) for trajectory in everything}) == len(everything)
    assert list(found.batches) == sorted(found.batches, key=lambda key: (key[0] == "rl", key[1]))
    steps = [step for stage, step in found.batches if stage == "rl"]
    assert steps == list(range(len(steps)))


class Offline:
    """The offline run, with the engines' log-probabilities compared on the way.

    Attributes:
        under: by (version, step): the largest difference between the engines' log-probabilities of the tokens labelled
            with the version and those of the weights that the step starts from.
        compared: tokens compared with the weights that their label names.
    """

    def __init__(self, config: RunConfig, found: Recorded, directory: Path, world: Backend) -> None:
        self.directory, self.under, self.compared = directory, {}, 0
        self._by_version: dict[int, list[Trajectory]] = defaultdict(list)
        for trajectory in found.trained:
            for version in {parse_version(label)[1] for label in trajectory.action_versions}:
                self._by_version[version].append(trajectory)
        for (stage, step), batch in found.batches.items():
            write_batch(directory / "batches", stage, step, batch)
        run = Run(config, directory, directory / "batches", world)
        run._run_stage("sft", 0, config.sft.steps)
        run._run_stage("value", 0, config.value.steps)
        rl = run._rl_stage(0)
        batch = rl.source.batch

        def watched(stage: str, step: int, *rest: Any, **named: Any) -> list[Trajectory]:
            self._compare(rl, step, step)
            self._compare(rl, step - 1, step)
            return batch(stage, step, *rest, **named)

        rl.source.batch = watched
        run_rl(rl, run._steps("rl", 0), 0)

    def _compare(self, stage: Stage, version: int, step: int) -> None:
        trajectories = self._by_version[version]
        if not trajectories:
            return
        labels = {label for t in trajectories for label in t.action_versions if parse_version(label)[1] == version}
        batch = stage.microbatches(trajectories)
        logprobs = stage.policy.logprobs(batch, stage.config.rollout.sampling.temperature)
        masks = [micro.sampled_under(labels) for micro in batch]
        self.under[version, step] = max(
            float((ours - micro.rollout_logprobs)[mask].abs().max())
            for micro, ours, mask in zip(batch, logprobs, masks, strict=True)
            if mask.any()
        )
        if version == step:
            self.compared += sum(int(mask.sum()) for mask in masks)

    def assert_versions_name_the_weights(self, found: Recorded) -> None:
        """All tokens have the log-probabilities of the weights that their label names, and not of the next step's."""
        assert self.compared == sum(trajectory.num_action_tokens for trajectory in found.trained)
        assert max(d for (version, step), d in self.under.items() if version == step) < 1e-4, self.under
        assert statistics.median(d for (version, step), d in self.under.items() if version < step) > 1e-3, self.under

    def assert_same_weights_and_metrics(self, run_dir: Path) -> None:
        """Bit for bit: every line that any life of the trainer wrote, and every checkpoint that there is."""
        expected = read_metrics(self.directory)
        for event in read_events(run_dir):
            if not any(name.startswith("train/") for name in event):
                continue
            for name, value in expected[event["stage"], event["step"]].items():
                # Only the live run can tell its own weights from a dead incarnation's, which have the same number.
                # And it was to have more steps.
                if not name.startswith(("lag/", "progress/")):
                    assert event[name] == value, (event["stage"], event["step"], name)
        checkpoints = sorted((run_dir / "checkpoints").glob("rl-*/meta.json"))
        compared = [path.parent for path in checkpoints if path.parent.name != "rl-0"]
        assert len(compared) >= 3
        for path in compared:
            assert_same_checkpoint(path, self.directory / "checkpoints" / path.name)
