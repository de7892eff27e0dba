"""Real parts in a real Slurm job: the demo, small, on a head, a trainer and a rollout node."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from tests.distributed.offline import read_metrics
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import FAKES, Job
from tests.system.runs import evaluations, read_events, steps_done, write_config
from tools.make_tiny_model import main as make_tiny_model

pytestmark = pytest.mark.timeout(600)

STEPS = 60  # enough for all that happens meanwhile
SHAPE = ("--gpus-per-node=2", "--cpus-per-node=4", "--sbatch=--mem=4000 --time=20")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model and data."""
    path = tmp_path_factory.mktemp("demo") / "tiny"
    make_tiny_model(["--out", str(path)])
    return path


@pytest.fixture
def submit(cluster: Cluster, tmp_path: Path) -> Iterator:
    jobs: list[Job] = []

    def start(config: Path, *options: str, **env: str) -> Job:
        jobs.append(Job(cluster, tmp_path, config, *options, *SHAPE, env=env))
        return jobs[-1]

    yield start
    for job in jobs:
        cluster.run("scancel", *job.ids, check=False)
        cluster.wait_for(lambda: cluster.node_states() == ["idle"] * 4, 60, "idle nodes")


def family(job: Job) -> list[psutil.Process]:
    """The parts' processes and all that they started."""
    found: set[psutil.Process] = set()
    for part in job.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= {process for process in (part, *part.children(recursive=True)) if process.name() != "srun"}
    return list(found)


def kill(job: Job, word: str) -> None:
    """Kill -9 the process that has ``word`` on its command line (or as its title)."""
    victims = []
    for process in family(job):
        with contextlib.suppress(psutil.NoSuchProcess):
            victims += [process] if word in process.cmdline() else []
    victims[0].kill()


def test_the_demo_survives_kills_and_a_requeue_and_runs_to_its_end(submit, cluster, tiny: Path, tmp_path: Path) -> None:
    settings = yaml.safe_load(write_config(tmp_path, tiny, max_staleness=3, steps=STEPS).read_text())
    settings["eval"]["every"] = STEPS // 2
    config = tmp_path / "demo.yaml"
    config.write_text(yaml.safe_dump(settings))
    job = submit(config, "--nodes=1,1,1", SAO_PREFLIGHT="150", SAO_SCRATCH=str(cluster.root / "scratch"))
    job.wait_for(lambda: steps_done(job.run_dir), 300, "first step")
    assert "3 nodes passed their checks" in job.log
    for victim in ("sglang::scheduler", "buffer", "train"):
        done = len(read_events(job.run_dir))
        kill(job, victim)
        job.wait_for(lambda n=done: len(read_events(job.run_dir)) > n + 1, 200, f"events after killing {victim}")
    processes, done = family(job), max(steps_done(job.run_dir))
    cluster.run("scancel", "--batch", "--signal=USR1", job.id)
    job.wait_for(lambda: f"requeueing job {job.id}" in job.log, 60, "requeue after the signal")
    checkpoint = (job.run_dir / "checkpoints" / "latest").read_text().strip()
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    assert job.finish(300) == "COMPLETED", job.logs()

    assert "SLURM_RESTART_COUNT = 1" in job.log
    assert f"training starts at {checkpoint}" in (job.run_dir / "logs" / "trainer.log").read_text()
    assert int(checkpoint.removeprefix("rl-")) > done, "the step in hand was finished and saved"
    assert steps_done(job.run_dir) == list(range(STEPS)), "no step is left out"
    assert all(e["mismatch/mean_abs_logprob_diff"] < 1e-5 for e in evaluations(job.run_dir).values())
    assert (job.run_dir / "hf" / "model.safetensors").is_file()
    assert list((cluster.root / "scratch").iterdir()) == []
    assert job.processes() == []


def test_many_requeues_give_the_weights_and_metrics_of_one_job(submit, cluster, tiny: Path, tmp_path: Path) -> None:
    """In SFT, since live rollouts are never twice the same: real trainer and buffer, stand-ins for the rest."""
    config = yaml.safe_load(write_config(tmp_path, tiny, steps=0).read_text())
    config["sft"]["steps"], config["value"]["steps"] = 60, 0
    config["checkpoint"]["save_interval"] = 1000
    del config["data"]["eval"]
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(config))
    fakes = {"FAKE_PACKAGES": "rollout", "PYTHONPATH": str(FAKES), "SAO_PREFLIGHT": "0"}

    def run(name: str, requeue_at: tuple[int, ...]) -> Path:
        (tmp_path / f"{name}-pids").mkdir()
        job = submit(
            tmp_path / "sft.yaml", "--nodes=1,1", f"--run-dir={tmp_path / name}",
            FAKE_PIDS=str(tmp_path / f"{name}-pids"), **fakes,
        )  # fmt: skip
        job.run_dir = tmp_path / name
        for count, step in enumerate(requeue_at, 1):
            job.wait_for(lambda s=step: len(read_events(job.run_dir)) > s, 120, f"step {step}")
            cluster.run("scancel", "--batch", "--signal=USR1", job.id)
            job.wait_for(lambda n=count: f"SLURM_RESTART_COUNT = {n}" in job.log, 120, f"restart {count}")
        assert job.finish(200) == "COMPLETED", job.logs()
        return job.run_dir

    whole, cut = run("whole", ()), run("cut", (3, 20))
    assert read_metrics(cut) == read_metrics(whole)
    assert (cut / "hf" / "model.safetensors").read_bytes() == (whole / "hf" / "model.safetensors").read_bytes()
