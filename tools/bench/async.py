"""``python -m tools.bench.async``: what the barriers of synchronous training cost, by the spread of turn latencies.

Time is simulated, scheduling is not. Real: the buffer's store with its SQLite index, so leases, pacing by
``rl.max_staleness``, sampling groups, dropping of stale trajectories and the order of batches are the product's own
code, called as the server calls it. Simulated: the clock, the engines (``--slots`` episodes at once, whose turns take
log-normal times of a fixed mean, whatever else runs) and the trainer (``--train`` seconds per step, ``--push`` seconds
in which the engines stand still). Half the variance of a turn's log-latency belongs to its prompt, so members of a
group are alike. The oldest token of an episode has the version that was served when it began.

| schedule | what it waits for |
|---|---|
| asynchronous | nothing: batches of whatever is finished, at most ``--staleness`` versions old |
| asynchronous, groups | whole groups of ``--group`` rollouts |
| one step off | a whole batch, generated while the one before is trained on |
| synchronous | a whole batch, generated under the weights it trains |
| synchronous, groups | the same, in groups |
"""

from __future__ import annotations

import argparse
import heapq
import math
import os
import random
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from megatron_sao.buffer.segments import Record
from megatron_sao.buffer.store import Store
from megatron_sao.config import parse_config
from megatron_sao.data.tasks import Task
from tools.bench.buffer import trajectory

TURNS = 3
HEARTBEAT_SECONDS = 5.0


class Schedule(NamedTuple):
    name: str
    staleness: int | None = None  # versions; None: --staleness
    grouped: bool = False
    whole_batches: bool = False  # the next batch's episodes start together, when the trainer has taken the last batch


SCHEDULES = [
    Schedule("asynchronous"),
    Schedule("asynchronous, groups", grouped=True),
    Schedule("one step off", 1, whole_batches=True),
    Schedule("synchronous", 0),
    Schedule("synchronous, groups", 0, grouped=True),
]


@dataclass
class Simulation:
    """One run of a schedule on a virtual clock; the next event is the earliest in ``events``."""

    options: argparse.Namespace
    schedule: Schedule
    sigma: float
    directory: Path
    now: float = 0.0
    step: int = 0
    idle: float = 0.0
    waiting_since: float | None = 0.0
    playing: int = 0
    staleness: list[int] = field(default_factory=list)
    events: list[tuple[float, int, str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        options, group = self.options, self.options.group if self.schedule.grouped else 1
        self._rng = random.Random(options.seed)
        self._prompts: dict[str, float] = {}
        limit = options.staleness if self.schedule.staleness is None else self.schedule.staleness
        config = parse_config(
            {
                "name": "bench", "model": {"path": "unused"}, "data": {"train": "unused"},
                "rollout": {"environment": "unused:Unused", "max_tokens": 100},
                "algorithm": {"advantage": "group" if self.schedule.grouped else "critic"},
                "rl": {"batch_size": options.batch, "group_size": group, "max_staleness": limit},
                "buffer": {"lease_seconds": 1e9},
            }
        )  # fmt: skip
        tasks = [Task(str(i), str(i), None, {}) for i in range(1000)]
        self._store = Store(self.directory, config, tasks, [], lambda: self.now)
        self._store.register_trainer("bench", 0)
        self._store.engines.register("e", "http://e", 1)
        self._publish()

    def run(self) -> dict[str, float]:
        """Train ``--steps`` steps; the first tenth is left out of the figures."""
        self._after(0, "heartbeat")
        self._ask()
        first, began, idle = self.options.steps // 10, 0.0, 0.0
        while self.step < self.options.steps:
            self.now, _, kind, what = heapq.heappop(self.events)
            getattr(self, f"_{kind}")(*([] if what is None else [what]))
            if kind == "trained" and self.step == first:
                began, idle = self.now, self.idle
        stats = self._store.stats()
        self._store.close()
        hours = (self.now - began) / 3600
        return {
            "steps_per_hour": (self.step - first) / hours,
            "idle": (self.idle - idle) / (self.now - began),
            "dropped": stats["dropped_stale_fraction"],
            "staleness": sum(self.staleness) / len(self.staleness),
        }

    def _after(self, seconds: float, kind: str, what: Any = None) -> None:
        heapq.heappush(self.events, (self.now + seconds, self._rng.getrandbits(60), kind, what))

    def _heartbeat(self) -> None:
        self._store.engines.heartbeat("e")
        self._after(HEARTBEAT_SECONDS, "heartbeat")

    def _lease(self) -> None:
        """Fill the free slots with whatever the buffer grants."""
        free = self.options.slots - self.playing
        if self.schedule.whole_batches:
            free = 0 if self.playing else min(free, self.options.batch)
        if not free:
            return
        for lease in self._store.visits.lease("w", free, str(self._rng.getrandbits(60))) or []:
            self.playing += 1
            self._after(self._duration(lease["task"]["id"]), "finished", (lease, self.step))

    def _duration(self, task: str) -> float:
        """Seconds of an episode: log-normal turns with mean ``--turn``, whatever sigma is."""
        shared = self._prompts.setdefault(f"{task}/{self.sigma}", self._rng.gauss(0, self.sigma * 0.5**0.5))
        turns = (shared + self._rng.gauss(0, self.sigma * 0.5**0.5) for _ in range(TURNS))
        return sum(self.options.turn * math.exp(x - self.sigma**2 / 2) for x in turns)

    def _finished(self, played: tuple[dict[str, Any], int]) -> None:
        lease, version = played
        self.playing -= 1
        done = trajectory(
            8, 0, id=f"{lease['visit_id']}@{version}", run_id="bench", task_id=lease["task"]["id"],
            epoch=lease["epoch"], attempt=lease["attempt"],
        )  # fmt: skip
        object.__setattr__(done, "versions", [(f"1.{version}", 1, 8)])
        object.__setattr__(done, "group", lease["group"])
        (answer,) = self._store.submit([(done, Record.of(done.encode()))])
        if not isinstance(answer, str):
            raise answer
        self._ask()

    def _ask(self) -> None:
        """The trainer asks for its batch if it waits for one; then the workers ask for leases."""
        if self.waiting_since is not None:
            entries = self._store.batch("rl", self.step, 1, self.options.batch, self.step)
            if entries is not None:
                self.idle += self.now - self.waiting_since
                self.waiting_since = None
                self.staleness += [self.step - int(entry["id"].partition("@")[2]) for entry in entries]
                self._after(self.options.train, "trained")
        self._lease()

    def _trained(self) -> None:
        """A step is done: new weights go to the engines, during which everything in flight stands still."""
        self.step += 1
        self._publish()
        if self.step % 10 == 0:
            self._store.commit("rl", self.step, 1)
        push = self.options.push
        self.events = [
            (time + push, order, kind, what) if kind == "finished" else (time, order, kind, what)
            for time, order, kind, what in self.events
        ]
        heapq.heapify(self.events)
        self._after(push, "pushed")

    def _pushed(self) -> None:
        self.waiting_since = self.now
        self._ask()

    def _publish(self) -> None:
        self._store.mark_engine("e", "dirty", None, 1)
        self._store.mark_engine("e", "clean", f"1.{self.step}", 1)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=64, help="trajectories of a step")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--slots", type=int, default=64, help="episodes that the engines play at once")
    parser.add_argument("--staleness", type=int, default=6, help="rl.max_staleness of the asynchronous schedules")
    parser.add_argument("--turn", type=float, default=10.0, help=f"mean seconds of a turn; an episode has {TURNS}")
    parser.add_argument("--train", type=float, default=30.0, help="seconds of a trainer's step")
    parser.add_argument("--push", type=float, default=1.0, help="seconds of a weight push")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    # In memory where there is such a place: nothing here is to survive.
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    print("| sigma | schedule | steps/h | speed-up | trainer idle | stale | mean staleness |")
    print("|---|---|---|---|---|---|---|")
    for sigma in (0.5, 1.0, 1.5):
        rows = []
        for schedule in SCHEDULES:
            with tempfile.TemporaryDirectory(dir=memory) as directory:
                rows.append((schedule, Simulation(options, schedule, sigma, Path(directory)).run()))
        slowest = rows[-1][1]["steps_per_hour"]
        for schedule, row in rows:
            print(
                f"| {sigma} | {schedule.name} | {row['steps_per_hour']:.0f} | {row['steps_per_hour'] / slowest:.2f} | "
                f"{row['idle']:.0%} | {row['dropped']:.1%} | {row['staleness']:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
