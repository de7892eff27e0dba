"""A trainer that kills itself with -9 at a chosen point, in one child per life of one warm parent.

``python -m tests.system.killed_trainer CONFIG`` reads one JSON line per life from its standard input,
``{"run_dir", "batches", "kill", "asynchronous"}``: where, on what (null: the buffer), the name of one of POINTS (null:
at none) and how it saves. It answers each with how the life ended: ``{"signal"}`` or ``{"code"}``. The parent has
imported everything and started nothing, so a life costs no more than the training in it. A live trainer appends what
it is served to ``served.jsonl`` in its run directory.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_sao.buffer.client import BufferClient
from megatron_sao.config import load_config
from megatron_sao.trainer import checkpoint, checkpoint_files, loop, main, metrics, source
from megatron_sao.trainer.checkpoint import Checkpoints
from megatron_sao.trainer.critic import Critic
from megatron_sao.trainer.policy import Policy
from megatron_sao.trainer.trainable import Trainable

# name: (object, attribute, whether before or after a call of it, which call of this life).
# A life trains up to two steps and saves; only from "after `latest`" on does it leave a newer checkpoint than it found.
POINTS: dict[str, tuple[Any, str, str, int]] = {
    "before it registers": (BufferClient, "register_trainer", "before", 1),
    "registered, the answer lost": (BufferClient, "register_trainer", "after", 1),
    "before it asks for a batch": (BufferClient, "batch", "before", 1),
    "batch assigned, the answer lost": (BufferClient, "batch", "after", 1),
    "next batch assigned, the answer lost": (BufferClient, "batch", "after", 2),
    "fetching trajectories": (BufferClient, "trajectory", "before", 3),
    "before the values": (Critic, "fill_values", "before", 1),
    "after the values": (Critic, "fill_values", "after", 2),
    "before the first critic step": (Critic, "step", "before", 1),
    "between the critic steps": (Critic, "step", "before", 2),
    "after the critic steps": (Critic, "step", "after", 2),
    "after the next step's first critic step": (Critic, "step", "after", 3),
    "before the policy step": (Policy, "step", "before", 1),
    "in the policy step, the optimizer done": (Trainable, "train_step", "after", 3),
    "after the policy step": (Policy, "step", "after", 1),
    "after the next policy step": (Policy, "step", "after", 2),
    "before the push": (loop, "publish", "before", 1),
    "between push and checkpoint": (loop, "publish", "after", 2),
    "before the metrics": (metrics.MetricsWriter, "write", "before", 1),
    "before the save": (Checkpoints, "save", "before", 1),
    "the temporary directory made": (checkpoint, "_sharded_state", "before", 2),  # the first is for loading
    "the shards written": (checkpoint_files, "checksum", "before", 1),
    "before the fsync": (checkpoint_files, "sync", "before", 1),
    "before meta.json": (checkpoint_files, "write_meta", "before", 1),
    "before the rename": (checkpoint_files, "publish", "before", 1),
    "before `latest`": (checkpoint_files, "write_atomically", "before", 1),
    "after `latest`": (checkpoint_files, "write_atomically", "after", 1),
    "before an old checkpoint is deleted": (checkpoint_files, "remove", "before", 1),
    "in the middle of deleting it": (checkpoint_files.shutil, "rmtree", "before", 2),
    "after the save, before the commit": (BufferClient, "commit", "before", 1),
    "committed, the answer lost": (BufferClient, "commit", "after", 1),
}


def arm(owner: Any, name: str, when: str, call: int) -> None:
    """Have this process killed before or after the ``call``-th call of ``owner.name``."""
    original, calls = getattr(owner, name), 0

    def deadly(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **kwargs)
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, deadly)


def record_batches(path: Path) -> None:
    batch: Callable = source.LiveSource.batch

    def recording(self: Any, stage: str, step: int, *args: Any, **kwargs: Any) -> Any:
        trajectories = batch(self, stage, step, *args, **kwargs)
        with path.open("a") as file:
            file.write(json.dumps([stage, step, [trajectory.id for trajectory in trajectories]]) + "\n")
        return trajectories

    source.LiveSource.batch = recording


def live(config: str, run_dir: str, batches: str | None, kill: str | None, asynchronous: bool) -> None:
    if kill is not None:
        arm(*POINTS[kill])
    if batches is None:
        record_batches(Path(run_dir) / "served.jsonl")
    overrides = [f"checkpoint.asynchronous={asynchronous}"]
    main.main(load_config(config, overrides), Path(run_dir), Path(batches) if batches else None)


def serve(config: str) -> None:
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                live(config, **json.loads(line))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        status = os.waitpid(child, 0)[1]
        killed = os.WIFSIGNALED(status)
        answer = {"signal": os.WTERMSIG(status)} if killed else {"code": os.waitstatus_to_exitcode(status)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
