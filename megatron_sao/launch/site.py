"""What is particular to a cluster: Python, container, network, scratch.

Read from SAO_* environment variables, which the batch scripts take from the site's own file (slurm/site.example.sh).
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_sao.config import ConfigError
from megatron_sao.launch.allocation import Node

FIELDS = (
    "SAO_PYTHON", "SAO_CONTAINER", "SAO_MOUNTS", "SAO_INTERFACE", "SAO_SCRATCH", "SAO_PREFLIGHT", "SAO_BAD_NODES",
)  # fmt: skip
SHELL = ("SAO_SITE", "SAO_LAUNCHER")  # for the batch scripts alone
# What Slurm sets for the whole job would shape every step, where each step says itself what it needs.
SHAPING = (
    "SLURM_CPUS_PER", "SLURM_GPUS", "SLURM_GRES", "SLURM_MEM", "SLURM_NTASKS", "SLURM_TRES", "SLURM_DISTRIBUTION",
    "SRUN_CPUS",
)  # fmt: skip
PREFLIGHT_SECONDS = 60.0


@dataclass(frozen=True)
class Site:
    """How a part is run on a node.

    Attributes:
        python: the interpreter with the project's dependencies, inside the container where there is one.
        container: an image; a .sif file is run by apptainer, anything else by pyxis (``srun --container-image``).
        mounts: further directories that parts see in the container, at the same paths.
        interface: the network interface for everything; None: whatever leads to Slurm's node addresses.
        scratch: a directory on each node's own disk for temporary files and compilers' caches.
        preflight: seconds within which every node must have passed its checks; 0: no checks.
        bad_nodes: when some fail them, end the job, or requeue it without them.
    """

    python: str
    container: str | None = None
    mounts: tuple[str, ...] = ()
    interface: str | None = None
    scratch: str | None = None
    preflight: float = PREFLIGHT_SECONDS
    bad_nodes: Literal["end", "exclude"] = "end"

    @staticmethod
    def from_environment(env: Mapping[str, str] = os.environ) -> Site:
        """Raises ConfigError for a SAO_* variable or a value that means nothing."""
        for name in env:
            if name.startswith("SAO_") and name not in (*FIELDS, *SHELL):
                near = difflib.get_close_matches(name, FIELDS, n=1, cutoff=0.0)[0]
                raise ConfigError(f"{name} is no setting of a site; the nearest is {near} (slurm/site.example.sh)")
        container = env.get("SAO_CONTAINER") or None
        try:
            preflight = float(env.get("SAO_PREFLIGHT") or PREFLIGHT_SECONDS)
        except ValueError:
            raise ConfigError(f"SAO_PREFLIGHT = {env['SAO_PREFLIGHT']!r}: give seconds; 0 for no checks") from None
        bad_nodes = env.get("SAO_BAD_NODES") or "end"
        if bad_nodes not in ("end", "exclude"):
            raise ConfigError(f"SAO_BAD_NODES = {bad_nodes!r}: say end, or exclude to requeue the job without them")
        if env.get("SAO_SCRATCH") and not preflight:
            raise ConfigError("SAO_SCRATCH with SAO_PREFLIGHT = 0: it is the checks that make the directory; set one")
        return Site(
            env.get("SAO_PYTHON") or ("python3" if container else sys.executable),
            container,
            tuple(env.get("SAO_MOUNTS", "").split()),
            env.get("SAO_INTERFACE") or None,
            env.get("SAO_SCRATCH") or None,
            preflight,
            bad_nodes,
        )

    def environment(
        self, env: Mapping[str, str], interface: str | None, scratch_of: str | None = None
    ) -> dict[str, str]:
        """``env`` for the steps of a job whose nodes talk over ``interface`` (None: nothing is known of it). With a
        job's id temporary files go to its scratch directories, which must be there."""
        env = {name: value for name, value in env.items() if not name.startswith(SHAPING)}
        if interface is not None:
            for library in ("NCCL", "GLOO"):
                env.setdefault(f"{library}_SOCKET_IFNAME", interface)
        if self.scratch is not None and scratch_of is not None:
            folder = self.scratch_folder(scratch_of)
            env |= {
                "TMPDIR": folder,
                "TRITON_CACHE_DIR": f"{folder}/triton",
                "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            }
        return env

    def scratch_folder(self, job: str) -> str:
        """On every node; made by the preflight, removed with the job."""
        return f"{self.scratch}/sao-{job}"

    def command(
        self,
        name: str,
        nodes: list[Node],
        arguments: list[str],
        *,
        paths: list[Path],
        per_node: int = 1,
        gpus: int = 0,
        cpus: int | None = None,
    ) -> list[str]:
        """The srun that runs ``python arguments`` as a job step.

        Args:
            nodes: of one component of the job.
            paths: directories that it must see in a container.
            per_node: tasks on each node.
            gpus: on each node, for this step alone.
            cpus: of each task, for this step alone; None: it shares all with other steps.
        """
        step = ["srun", f"--job-name={name}", f"--nodes={len(nodes)}", f"--nodelist={','.join(n.name for n in nodes)}"]
        step += [f"--ntasks={per_node * len(nodes)}", f"--ntasks-per-node={per_node}"]
        step += ["--mem=0", "--kill-on-bad-exit=1"]  # all of the job's memory, which steps share
        step += ["--overlap"] if cpus is None else ["--exact", f"--cpus-per-task={cpus}"]
        step += [f"--gpus-per-node={gpus}"] if gpus else []
        step += [f"--het-group={nodes[0].group}"] if nodes[0].group is not None else []
        step += ["--label"] if per_node * len(nodes) > 1 else []
        container, wrapper = self._container(paths, gpus)
        return [*step, *container, *wrapper, self.python, *arguments]

    def _container(self, paths: list[Path], gpus: int) -> tuple[list[str], list[str]]:
        """Options of srun, and the command in front of Python."""
        if self.container is None:
            return [], []
        scratch = [self.scratch] if self.scratch else []
        seen = dict.fromkeys([str(Path.cwd()), *(str(path.absolute()) for path in paths), *self.mounts, *scratch])
        if self.container.endswith(".sif"):
            nv = ["--nv"] if gpus else []
            return [], ["apptainer", "exec", *nv, "--bind", ",".join(seen), "--pwd", str(Path.cwd()), self.container]
        mounts = ",".join(f"{path}:{path}" for path in seen)
        options = [f"--container-image={self.container}", f"--container-mounts={mounts}"]
        return [*options, f"--container-workdir={Path.cwd()}", "--no-container-mount-home"], []
