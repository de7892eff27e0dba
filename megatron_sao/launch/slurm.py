"""``megatron-sao run --slurm``: the run's parts as steps of the Slurm job whose batch script this is.

They find each other as on one machine (``launch.supervise``); what differs is where they run, at which addresses, and
that a job may end before the run does: before the time limit the trainer checkpoints and the job is requeued.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Literal

from megatron_sao.config import ConfigError, RunConfig, dump_config
from megatron_sao.launch.allocation import (
    Allocation,
    Layout,
    Node,
    first_port,
    lay_out,
    read_allocation,
    seconds_left,
    slurm,
)
from megatron_sao.launch.exclusion import exclusions, may_requeue, remedy, requeue_without
from megatron_sao.launch.local import check_inputs, check_run_dir, exclusive, is_complete
from megatron_sao.launch.preflight import Place, Plan, PreflightFailed, Report, check_nodes
from megatron_sao.launch.process import EXIT_STOPPED
from megatron_sao.launch.site import Site
from megatron_sao.launch.step import SupervisedStep, run_steps
from megatron_sao.launch.supervise import (
    CHECKPOINT_SECONDS,
    MAX_RESTARTS,
    MAX_TRAINER_RESTARTS,
    STOP_BUFFER_SECONDS,
    STOP_SECONDS,
    Parts,
    Supervisor,
    part_arguments,
    part_environment,
    write_endpoint,
)

MAX_FRUITLESS_STARTS = 3  # of the run from one and the same checkpoint
REQUEUE_SECONDS = 10.0  # of the job's time, kept for the requeue itself
SCRATCH_SECONDS = 15.0  # for removing the scratch directories


def main(config: RunConfig, run_dir: Path, at_limit: Literal["requeue", "end"]) -> int:
    """Run in this job; returns the exit code of the batch script.

    Args:
        at_limit: what follows when SIGUSR1 announced the time limit and the trainer has its checkpoint: requeue the
            job, or end it well, so that the next of a chain of jobs goes on.

    Raises:
        ConfigError: something is missing, or the job does not fit the config; nothing was started.
    """
    run_dir = run_dir.absolute()
    allocation, site = read_allocation(), Site.from_environment()
    layout = lay_out(allocation.groups, config)
    check_inputs(config)
    check_run_dir(config, run_dir)
    if is_complete(config, run_dir):
        print(f"megatron-sao: the run in {run_dir} is complete; its policy is in {run_dir / 'hf'}")
        return 0
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    names = " ".join(node.name for node in allocation.nodes)
    print(f"megatron-sao: job {allocation.job}, SLURM_RESTART_COUNT = {allocation.restarts}, on {names}", flush=True)
    with exclusive(run_dir):
        (run_dir / "config.yaml").write_text(dump_config(config))  # makes it a run's directory, whatever comes next
        if not note_start(run_dir, allocation):
            return 1
        job = Job(config, run_dir, allocation, site, layout)
        failed = None
        try:
            code = job.run()
        except PreflightFailed as problem:
            failed = problem
        finally:
            job.remove_scratch()
    if failed is not None:
        print(f"megatron-sao: a check before the start failed\n{failed}", file=sys.stderr, flush=True)
        return go_on_without(failed.nodes, allocation, site) if failed.nodes else 1
    if code == EXIT_STOPPED and job.stop_requested:
        if at_limit == "requeue":
            print(f"megatron-sao: requeueing job {allocation.job}", flush=True)
            slurm("scontrol", "requeue", allocation.job)
        return 0
    return code


def go_on_without(nodes: list[str], allocation: Allocation, site: Site) -> int:
    """Requeue the job without ``nodes`` where the site wants it and it can help, else say which command does without
    them; returns the exit code of the batch script. ``note_start`` bounds how often."""
    excluded = exclusions(allocation.job, nodes)
    if site.bad_nodes == "exclude" and may_requeue(allocation, nodes):
        print(f"megatron-sao: requeueing job {allocation.job} without {excluded} (SAO_BAD_NODES)", flush=True)
        requeue_without(allocation.job, excluded)
        return 0
    print(f"megatron-sao: {remedy(excluded)}", file=sys.stderr)
    return 1


def note_start(run_dir: Path, allocation: Allocation) -> bool:
    """Add this start to ``starts.jsonl``, or return False: the last ones all began at the checkpoint where the run
    still is."""
    latest, log = run_dir / "checkpoints" / "latest", run_dir / "starts.jsonl"
    checkpoint = latest.read_text().strip() if latest.is_file() else None
    starts = [json.loads(line) for line in log.read_text().splitlines()] if log.is_file() else []
    last = starts[-MAX_FRUITLESS_STARTS:]
    if len(last) == MAX_FRUITLESS_STARTS and all(start["checkpoint"] == checkpoint for start in last):
        print(
            f"megatron-sao: the last {len(last)} starts of this run all began at checkpoint {checkpoint or 'none'} and "
            f"made no other, so it is not started again; see {run_dir / 'logs'}, then remove {log} to try once more",
            file=sys.stderr,
        )
        return False
    start = {
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        "job": allocation.job,
        "restarts": allocation.restarts,
        "checkpoint": checkpoint,
    }
    with log.open("a") as file:
        file.write(json.dumps(start) + "\n")
    return True


class Job:
    """One run in one job: its checks, its steps, and what is left of its time."""

    def __init__(self, config: RunConfig, run_dir: Path, allocation: Allocation, site: Site, layout: Layout) -> None:
        self._config, self._run_dir, self._allocation = config, run_dir, allocation
        self._site, self._layout = site, layout
        self._port = first_port(allocation.job)  # the buffer's; then the trainer's, then the engines'
        self._gpus = config.model.device != "cpu"
        data = [path.parent for _, path in config.data if path is not None]
        self._paths = [run_dir.parent, config.model.path, *data]
        self.stop_requested = False

    def run(self) -> int:
        """Check the nodes and run the parts on them; returns the supervisor's exit code. Raises PreflightFailed."""
        reports = self._preflight() if self._site.preflight else {}
        parts = self._parts(reports)
        supervisor = Supervisor(self._config, self._run_dir, parts, self._checkpoint_seconds)
        code = supervisor.run()
        self.stop_requested = supervisor.stop_requested
        return code

    def remove_scratch(self) -> None:
        """Where the job ends by itself; what Slurm ends leaves its scratch directories to the site's own cleaning."""
        if self._site.scratch is not None:
            code = (
                f"import shutil; shutil.rmtree({self._site.scratch_folder(self._allocation.job)!r}, ignore_errors=True)"
            )
            run_steps(
                self._everywhere("clean", ["-c", code]), self._site.environment(os.environ, None), SCRATCH_SECONDS
            )

    def _checkpoint_seconds(self) -> float:
        with contextlib.suppress(ConfigError):  # a controller that does not answer now must not end the run
            left = seconds_left(self._allocation.job)
            if left is not None:
                return max(0.0, left - STOP_SECONDS - STOP_BUFFER_SECONDS - REQUEUE_SECONDS)
        return CHECKPOINT_SECONDS

    def _everywhere(self, name: str, arguments: list[str], gpus: bool = False) -> list[list[str]]:
        """Commands of steps that run ``python arguments`` once on each node of the job, one step per component."""
        return [
            self._site.command(name, nodes, arguments, paths=self._paths, gpus=nodes[0].gpus if gpus else 0)
            for nodes in self._allocation.groups
        ]

    def _preflight(self) -> dict[str, Report]:
        ports: dict[str, list[int]] = {node.name: [] for node in self._allocation.nodes}
        ports[self._layout.head.name].append(self._port)
        ports[self._layout.trainer[0].name].append(self._port + 1)
        for index, node in enumerate(self._layout.engines):
            ports[node.name].append(self._port + 2 + index)
        nodes = [self._layout.head, *(node for node in self._allocation.nodes if node != self._layout.head)]
        files = [self._config.model.path, *(path for _, path in self._config.data if path is not None)]
        job, interface = self._allocation.job, self._site.interface
        plan = Plan(
            nodes={node.name: Place(node.address, ports[node.name], self._gpus_used(node)) for node in nodes},
            files=[str(path.absolute()) for path in files],
            interface=interface,
            scratch=self._site.scratch_folder(job) if self._site.scratch else None,
            port=self._port + 2 + self._config.engine.count,
            cuda=self._config.model.device == "cuda",
            seconds=self._site.preflight,
        )
        env = self._site.environment({**os.environ, "OMP_NUM_THREADS": "1"}, interface)
        began = time.monotonic()
        steps = partial(self._everywhere, "preflight", gpus=self._gpus)
        reports = check_nodes(self._run_dir / f"preflight-{job}", plan, steps, env)
        print(f"megatron-sao: {len(reports)} nodes passed their checks in {time.monotonic() - began:.0f} s", flush=True)
        return reports

    def _gpus_used(self, node: Node) -> int:
        return self._layout.slots(node) if self._gpus and node.gpus else 0

    def _parts(self, reports: dict[str, Report]) -> Parts:
        layout, config = self._layout, self._config
        address = {node.name: node.address for node in self._allocation.nodes}
        address |= {name: report.address for name, report in reports.items()}
        interfaces = {report.interface for report in reports.values()}
        interface = self._site.interface or (interfaces.pop() if len(interfaces) == 1 else None)
        head = address[layout.head.name]
        buffer_url = f"http://{head}:{self._port}"
        urls = [f"http://{address[node.name]}:{self._port + 2 + index}" for index, node in enumerate(layout.engines)]
        token = write_endpoint(config, self._run_dir, buffer_url, urls, self._allocation.job)
        env = self._site.environment(part_environment(buffer_url, token), interface, self._allocation.job)

        def part(name: str, node: Node, *command: str, gpus: int = 0) -> SupervisedStep:
            arguments = part_arguments(self._run_dir, *command)
            cpus = layout.cpus_per_slot(node) * layout.engine_gpus if command[0] == "engine" else None
            step = self._site.command(name, [node], arguments, paths=self._paths, gpus=gpus, cpus=cpus)
            return SupervisedStep(name, step, env, self._run_dir / "logs", MAX_RESTARTS)

        engines = []
        for index, node in enumerate(layout.engines):
            where = ["--port", str(self._port + 2 + index), "--set", f"engine.host={address[node.name]}"]
            gpus = min(layout.engine_gpus, self._gpus_used(node))
            engines.append(part(f"engine-{index}", node, "engine", "--index", str(index), *where, gpus=gpus))
        workers = [
            part(f"worker-{index}", layout.head, "rollout", "--worker-id", f"worker-{index}")
            for index in range(config.rollout.workers)
        ]
        buffer = part("buffer", layout.head, "buffer", "--host", head, "--port", str(self._port))
        return Parts(buffer, self._trainer(env, address[layout.trainer[0].name]), engines, workers)

    def _trainer(self, env: dict[str, str], master: str) -> SupervisedStep:
        layout, world = self._layout, self._config.parallel.world_size
        first = layout.trainer[0]
        env = env | {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(layout.ranks_per_node)}
        env |= {"MASTER_ADDR": master, "MASTER_PORT": str(self._port + 1)}
        command = self._site.command(
            "trainer",
            layout.trainer,
            part_arguments(self._run_dir, "train"),
            paths=self._paths,
            per_node=layout.ranks_per_node,
            gpus=min(layout.ranks_per_node, self._gpus_used(first)),
            cpus=min(layout.cpus_per_slot(node) for node in layout.trainer),
        )
        return SupervisedStep("trainer", command, env, self._run_dir / "logs", MAX_TRAINER_RESTARTS)
