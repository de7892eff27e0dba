"""What Slurm gave this job, and which part of the run goes where. Names, addresses and sizes come from Slurm's own
commands: node names need not resolve."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from megatron_sao.config import ConfigError, RunConfig

COMMAND_SECONDS = 60.0  # that a busy controller may take for an answer
# Below 32768, from where on Linux takes ports for outgoing connections.
FIRST_PORT, PORTS_PER_JOB, JOBS = 10_000, 256, 85


@dataclass(frozen=True)
class Node:
    """One node of the job; ``group`` is its component of a heterogeneous job, None in a plain one."""

    name: str
    address: str
    group: int | None
    cpus: int
    gpus: int


@dataclass(frozen=True)
class Allocation:
    """A running job. ``groups`` holds the nodes of each component, a plain job's in one."""

    job: str
    restarts: int
    groups: list[list[Node]]

    @property
    def nodes(self) -> list[Node]:
        return [node for group in self.groups for node in group]


@dataclass(frozen=True)
class Layout:
    """Where the parts run: buffer and workers on ``head``, the trainer's ranks on ``trainer``, engine i on
    ``engines[i]``."""

    head: Node
    trainer: list[Node]
    engines: list[Node]
    ranks_per_node: int
    engine_gpus: int

    def slots(self, node: Node) -> int:
        """How many ranks and engine GPUs share ``node``."""
        return self.ranks_per_node * (node in self.trainer) + self.engine_gpus * self.engines.count(node)

    def cpus_per_slot(self, node: Node) -> int:
        return max(1, node.cpus // max(1, self.slots(node)))


def slurm(*command: str) -> str:
    """Output of a Slurm command. Raises ConfigError with its own words where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
    except FileNotFoundError:
        raise ConfigError(f"{command[0]} is not on PATH; run this where Slurm's commands are") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"`{' '.join(command)}` gave no answer within {COMMAND_SECONDS:.0f} s") from None
    if done.returncode:
        raise ConfigError(f"`{' '.join(command)}` failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def read_allocation(env: Mapping[str, str] = os.environ) -> Allocation:
    """The job this process is the batch script of. Raises ConfigError outside of one."""
    if "SLURM_JOB_ID" not in env:
        raise ConfigError("--slurm is for the batch script of a Slurm job; submit one with `megatron-sao slurm CONFIG`")
    job, components = env["SLURM_JOB_ID"], int(env.get("SLURM_HET_SIZE", 0))
    gpus = [parse_gpus(line) for line in sorted(slurm("squeue", "-h", "-j", job, "-o", "%i %b").splitlines())]
    groups = []
    for index, suffix in enumerate([f"_HET_GROUP_{number}" for number in range(components)] or [""]):
        names = slurm("scontrol", "show", "hostnames", env[f"SLURM_JOB_NODELIST{suffix}"]).split()
        addresses = _addresses(names)
        cpus = parse_cpus(env[f"SLURM_JOB_CPUS_PER_NODE{suffix}"])
        group = index if components else None
        sized = zip(names, cpus, strict=True)
        groups.append([Node(name, addresses[name], group, count, gpus[index]) for name, count in sized])
    return Allocation(job, int(env.get("SLURM_RESTART_COUNT", 0)), groups)


def _addresses(names: list[str]) -> dict[str, str]:
    shown = slurm("scontrol", "show", "node", ",".join(names), "--oneliner")
    return dict(re.findall(r"NodeName=(\S+).*?NodeAddr=(\S+)", shown))


def parse_gpus(text: str) -> int:
    """GPUs per node from ``squeue -o %b``, e.g. ``gres:gpu:h200:4``; 0 for ``N/A``."""
    found = re.search(r"\bgpu(?:[:/][^:=,\s]*[A-Za-z][^:=,\s]*)?[:=](\d+)", text)
    return int(found[1]) if found else 0


def parse_cpus(text: str) -> list[int]:
    """CPUs of each node from ``SLURM_JOB_CPUS_PER_NODE``: ``8(x2),4`` is 8, 8, 4."""
    cpus: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        cpus += [int(count)] * int(times or 1)
    return cpus


def lay_out(groups: list[list[Node]], config: RunConfig) -> Layout:
    """Three components are head, trainer and rollout nodes, two trainer and rollout nodes; of a plain job's nodes the
    trainer gets the first it needs and the engines the others, or the same where there are no others.

    Raises:
        ConfigError: too few or too many nodes, or too few GPUs on one.
    """
    parallel, engine = config.parallel, config.engine
    count = parallel.world_size // parallel.nproc_per_node
    if len(groups) == 1:
        trainer, rollout = groups[0][:count], groups[0][count:] or groups[0]
        head = groups[0][0]
    elif len(groups) in (2, 3):
        *first, trainer, rollout = groups
        head = first[0][0] if first else trainer[0]
    else:
        raise ConfigError(f"the job has {len(groups)} components; it takes one, two or three (see docs/running.md)")
    if len(trainer) != count:
        raise ConfigError(
            f"the trainer has {len(trainer)} nodes and needs {count}: parallel.world_size = {parallel.world_size} "
            f"over parallel.nproc_per_node = {parallel.nproc_per_node}"
        )
    per_node = -(-engine.count // len(rollout))
    engines = [rollout[index // per_node] for index in range(engine.count)]
    layout = Layout(head, trainer, engines, parallel.nproc_per_node, engine.tp)
    for node in {*trainer, *engines} if config.model.device != "cpu" else ():
        if layout.slots(node) > node.gpus and (node.gpus or config.model.device == "cuda"):
            raise ConfigError(
                f"node {node.name} has {node.gpus} GPUs for {layout.slots(node)} ranks and engine GPUs; ask for more "
                "nodes or GPUs per node, or lower engine.count, engine.tp or parallel.nproc_per_node"
            )
    return layout


def first_port(job: str) -> int:
    """Where the PORTS_PER_JOB ports of a job begin; the JOBS jobs after it have others."""
    return FIRST_PORT + int(job) % JOBS * PORTS_PER_JOB


def seconds_left(job: str) -> float | None:
    """Until the job's time limit; None without one."""
    ends = [line for line in slurm("squeue", "-h", "-j", job, "-o", "%e").split() if line[:1].isdigit()]
    return min((datetime.fromisoformat(end) - datetime.now()).total_seconds() for end in ends) if ends else None
