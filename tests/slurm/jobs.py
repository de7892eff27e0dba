"""Jobs as a user submits them, with ``megatron-sao slurm``, and what one sees of them from outside."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import yaml

from tests.slurm.cluster import Cluster

ROOT = Path(__file__).parents[2]
FAKES = ROOT / "tests" / "system" / "fake_parts"
# The last three are on their way back or out.
ALIVE = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SIGNALING", "REQUEUED", "NODE_FAIL")


class Job:
    """A run submitted to the cluster from ``folder``, which gets its directory and its log.

    Args:
        options: of ``megatron-sao slurm``.
        env: beside what the cluster needs.
    """

    def __init__(self, cluster: Cluster, folder: Path, config: Path, *options: str, env: dict[str, str]) -> None:
        self.cluster, self.folder, self.run_dir = cluster, folder, folder / "run"
        site = {"SAO_LAUNCHER": sys.executable, "SAO_SITE": "none"}
        path = os.pathsep.join([env.pop("PYTHONPATH", ""), str(ROOT)]).strip(os.pathsep)
        self.env = cluster.env | site | {"PYTHONPATH": path} | env
        command = [sys.executable, "-m", "megatron_sao.cli", "slurm", str(config), "--run-dir", str(self.run_dir)]
        done = subprocess.run(
            [*command, *options], cwd=folder, env=self.env, text=True, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr
        self.ids = re.findall(r"submitted job (\d+)", done.stdout)
        self.id = self.ids[0]

    @property
    def log(self) -> str:
        return "".join(path.read_text() for path in self.folder.glob(f"*-{self.id}.log"))

    @property
    def state(self) -> str:
        return self.cluster.job(self.id)["JobState"]

    def wait_for(self, condition: Callable[[], object], seconds: float, what: str) -> None:
        """Wait, as long as the job is neither over nor too slow; a pending one is shown to the scheduler."""
        deadline, woken = time.monotonic() + seconds, 0.0
        while not condition():
            state = self.state
            if state == "PENDING" and time.monotonic() - woken > 1:
                self.cluster.wake(self.id)
                woken = time.monotonic()
            assert state in ALIVE, f"{state}, no {what}\n{self.logs()}"
            assert time.monotonic() < deadline, f"no {what} within {seconds:.0f} s ({state})\n{self.logs()}"
            time.sleep(0.2)

    def finish(self, seconds: float = 60) -> str:
        """The state in which it ended."""
        deadline = time.monotonic() + seconds
        while (state := self.state) in ALIVE:
            assert time.monotonic() < deadline, f"{state} after {seconds:.0f} s\n{self.logs()}"
            if state == "PENDING":
                self.cluster.wake(self.id)
            time.sleep(0.5)
        return state

    def nodes(self) -> list[str]:
        """Of each component in turn."""
        shown = self.cluster.run("squeue", "-h", "-j", self.id, "-o", "%i %N")
        return [line.split()[1] for line in sorted(shown.splitlines())]

    def processes(self) -> list[psutil.Process]:
        """Everything that has the run's directory on its command line or works for something that has."""
        found = []
        for process in psutil.process_iter():
            try:
                mine = process.status() != psutil.STATUS_ZOMBIE and str(self.run_dir) in " ".join(process.cmdline())
            except psutil.NoSuchProcess:
                continue
            if mine:
                found.append(process)
        return found

    def logs(self) -> str:
        """The ends of all logs."""
        logs = [*self.folder.glob("*.log"), *(self.run_dir / "logs").glob("*.log")]
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in logs)


class FakeJob(Job):
    """A job whose parts are stand-ins; ``behaviour`` is e.g. {"trainer": "succeed"}."""

    def __init__(self, cluster: Cluster, folder: Path, behaviour: dict[str, str], *options: str, **env: str) -> None:
        self.pids = folder / "pids"
        self.pids.mkdir()
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text("{}")
        (folder / "tasks.jsonl").write_text('{"prompt": "1+1="}')
        config = {
            "name": "fake",
            "model": {"path": str(folder / "model")},
            "data": {"train": str(folder / "tasks.jsonl")},
            "rollout": {"environment": "none:None"},
            "engine": {"count": 2},
        }
        (folder / "fake.yaml").write_text(yaml.safe_dump(config))
        env |= {f"FAKE_{name.upper()}": words for name, words in behaviour.items()}
        env = {"SAO_PREFLIGHT": "0", "PYTHONPATH": str(FAKES), "FAKE_PIDS": str(self.pids)} | env
        shape = ["--gpus-per-node", "2", "--cpus-per-node", "4", "--sbatch=--mem=1000"]
        super().__init__(cluster, folder, folder / "fake.yaml", *shape, *options, env=env)

    def started(self, name: str) -> list[int]:
        """Process ids of a part, oldest first."""
        return [
            int(path.suffix[1:]) for path in sorted(self.pids.glob(f"{name}.*"), key=lambda p: p.stat().st_mtime_ns)
        ]

    def wait_started(self, seconds: float = 60, **counts: int) -> None:
        self.wait_for(
            lambda: all(len(self.started(name)) >= count for name, count in counts.items()),
            seconds,
            f"{counts} started",
        )
