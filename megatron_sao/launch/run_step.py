"""``python -m megatron_sao.launch.run_step ARGUMENTS``, in a batch script: ``python ARGUMENTS`` as the tasks of one job
step, in the site's container where it has one. Several tasks are ranks of one world."""

from __future__ import annotations

import os
import sys

from megatron_sao.config import ConfigError
from megatron_sao.launch.allocation import first_port, read_allocation
from megatron_sao.launch.site import Site


def main(arguments: list[str]) -> None:
    """Become the srun; raises ConfigError outside of a job."""
    allocation, site = read_allocation(), Site.from_environment()
    nodes = allocation.groups[0]
    per_node = int(os.environ.get("SLURM_NTASKS_PER_NODE", 1))
    world = per_node * len(nodes)
    env = site.environment(os.environ, site.interface)
    if world > 1:
        env |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(per_node)}
        env |= {"MASTER_ADDR": nodes[0].address, "MASTER_PORT": str(first_port(allocation.job))}
    cpus = max(1, min(node.cpus for node in nodes) // per_node)
    command = site.command("step", nodes, arguments, paths=[], per_node=per_node, gpus=nodes[0].gpus, cpus=cpus)
    os.execvpe(command[0], command, env)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        sys.exit(f"megatron-sao: {error}")
