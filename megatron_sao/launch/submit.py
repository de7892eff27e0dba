"""``megatron-sao slurm``: the sbatch command for a run, shown and executed. The job itself is slurm/sao.sbatch."""

from __future__ import annotations

import argparse
import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from megatron_sao.config import ConfigError, RunConfig
from megatron_sao.launch.allocation import Node, lay_out, slurm
from megatron_sao.launch.exclusion import SUBMITTED
from megatron_sao.launch.local import check_inputs, check_run_dir

SCRIPT = Path(__file__).parents[2] / "slurm" / "sao.sbatch"


@dataclass(frozen=True)
class Component:
    """Nodes of one kind, in the order in which the job asks for them."""

    role: str
    nodes: int
    gpus: int


def main(config: RunConfig, run_dir: Path, arguments: argparse.Namespace) -> int:
    """Print what would run where, then submit it, unless ``arguments.dry_run``.

    Raises:
        ConfigError: an impossible layout, or inputs that are missing; or what sbatch says.
    """
    gpus = arguments.gpus_per_node
    if gpus is None:
        gpus = 0 if config.model.device == "cpu" else config.parallel.nproc_per_node
    components = plan(config, arguments.nodes, gpus)
    if not SCRIPT.is_file():
        raise ConfigError(f"{SCRIPT} is not there: submit from an environment made with the checkout (make setup)")
    command = sbatch(config, run_dir, arguments, components)
    for component in components:
        print(f"{component.nodes} × {component.role}, {component.gpus} GPUs each")
    print(shlex.join(command))
    check_inputs(config)  # after the plan has been shown, which needs neither model nor data
    check_run_dir(config, run_dir)
    if arguments.dry_run:
        return 0
    os.environ[SUBMITTED] = shlex.join(arguments.command_line)
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(arguments.chain or 1):
        job = slurm(*command).strip().partition(";")[0]
        print(f"submitted job {job}; its log: {run_dir.parent / f'{config.name}-{job}.log'}")
    return 0


def plan(config: RunConfig, nodes: str | None, gpus: int) -> list[Component]:
    """The components of the job for ``--nodes T,R[,H]``.

    Raises:
        ConfigError: not such a list, or the run does not fit on it.
    """
    trainer = config.parallel.world_size // config.parallel.nproc_per_node
    engines_per_node = gpus // config.engine.tp if gpus else config.engine.count
    if not engines_per_node:
        raise ConfigError(f"engine.tp = {config.engine.tp} does not fit on a node of {gpus} GPUs (--gpus-per-node)")
    wanted = nodes or f"{trainer},{-(-config.engine.count // engines_per_node)}"
    try:
        counts = [int(count) for count in wanted.split(",")]
    except ValueError:
        counts = []
    if not 1 <= len(counts) <= 3 or min(counts) < 1 or (len(counts) == 3 and counts[2] != 1):
        raise ConfigError(f"--nodes {wanted}: give one number, or trainer,rollout or trainer,rollout,1")
    roles = [Component("trainer", counts[0], gpus)]
    if len(counts) == 1:
        roles = [Component("trainer, engines, buffer and workers", counts[0], gpus)]
    elif len(counts) == 2:
        roles = [Component("trainer (the first: also buffer and workers)", counts[0], gpus)]
    if len(counts) > 1:
        roles.append(Component("engines", counts[1], gpus))
    if len(counts) == 3:
        roles.insert(0, Component("buffer and workers", 1, 0))
    lay_out([_stand_ins(role) for role in roles], config)
    return roles


def _stand_ins(component: Component) -> list[Node]:
    """Nodes as the job would get them, to see whether the run fits."""
    names = (f"{component.role} node {index}" for index in range(component.nodes))
    return [Node(name, "", None, 1, component.gpus) for name in names]


def sbatch(config: RunConfig, run_dir: Path, arguments: argparse.Namespace, components: list[Component]) -> list[str]:
    """The command line. Jobs of one run have one name and are singletons: never two on the same directory. Components
    after the first are named apart, or they would wait for each other."""
    log = run_dir.parent.absolute() / "%x-%j.log"
    options = [option for text in arguments.sbatch for option in shlex.split(text)]
    command = ["sbatch", "--parsable", f"--job-name={config.name}", "--dependency=singleton", f"--output={log}"]
    for index, component in enumerate(components):
        cpus = arguments.cpus_per_node
        command += [":", f"--job-name={config.name}.{index}"] if index else []
        command += [f"--nodes={component.nodes}", "--ntasks-per-node=1", *options]
        command += [f"--cpus-per-task={cpus}"] if cpus else ["--exclusive", "--mem=0"]
        command += [f"--gpus-per-node={component.gpus}"] if component.gpus else []
    command += [str(SCRIPT), arguments.config, f"--run-dir={run_dir}"]
    command += [part for override in arguments.set for part in ("--set", override)]
    return [*command, "--slurm=end"] if arguments.chain else command
