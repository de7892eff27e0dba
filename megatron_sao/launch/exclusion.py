"""What follows when nodes of a job fail their checks: how to go on without them, or going on without them."""

from __future__ import annotations

import os
import re
import shlex
import signal
import time

from megatron_sao.config import ConfigError
from megatron_sao.launch.allocation import Allocation, slurm

SUBMITTED = "MEGATRON_SAO_SUBMITTED"  # the user's own command; `megatron-sao slurm` sets it, and sbatch passes it on
UPDATE_SECONDS = 20.0  # that a requeued job may take until Slurm lets its exclusions be changed


def exclusions(job: str, nodes: list[str]) -> str:
    """``nodes`` after those that the job excludes already, as ``--exclude`` takes them."""
    found = re.search(r"\bExcNodeList=(\S+)", _shown(job))
    return ",".join([*([found[1]] if found and found[1] != "(null)" else []), *nodes])


def remedy(excluded: str) -> str:
    """The sentence with the command that submits the run without the nodes ``excluded``."""
    submitted = os.environ.get(SUBMITTED)
    if submitted is None:
        return f"to go on without them, add --exclude={excluded} to each component of the sbatch command it began with"
    # sbatch heeds the last --exclude alone, which names the earlier ones as well
    return f"to go on without them:\n  {submitted} {shlex.quote(f'--sbatch=--exclude={excluded}')}"


def may_requeue(allocation: Allocation, nodes: list[str]) -> bool:
    """Whether the job can start again elsewhere: it is requeueable, and no more than half of its nodes failed. Where
    most do, the fault is elsewhere, and others would fail as well."""
    return 0 < 2 * len(nodes) <= len(allocation.nodes) and bool(re.search(r"\bRequeue=1\b", _shown(allocation.job)))


def requeue_without(job: str, excluded: str) -> None:
    """Requeue this job; its next start gets none of the nodes ``excluded``. A heterogeneous job's components all
    exclude them.

    Slurm changes the exclusions of pending jobs only, and sends the batch script of a requeued one SIGTERM, which is
    ignored from here on: Slurm's KillWait, 30 s by default, is enough for the change.

    Raises:
        ConfigError: it was not requeued, or was without the exclusions.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    slurm("scontrol", "requeue", job)
    deadline = time.monotonic() + UPDATE_SECONDS
    while True:
        try:
            slurm("scontrol", "update", f"JobId={job}", f"ExcNodeList={excluded}")
            return
        except ConfigError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.2)


def _shown(job: str) -> str:
    """Of a heterogeneous job the first component: all are submitted with the same options."""
    return slurm("scontrol", "show", "job", job, "--oneliner").partition("\n")[0]
