"""Real Slurm jobs over stand-in parts: launch, failures, requeues and limits."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.jobs import FakeJob

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def submit(cluster: Cluster, tmp_path: Path) -> Iterator:
    jobs: list[FakeJob] = []

    def start(behaviour: dict[str, str], *options: str, **env: str) -> FakeJob:
        jobs.append(FakeJob(cluster, tmp_path, behaviour, *options, **env))
        return jobs[-1]

    yield start
    for job in jobs:
        cluster.run("scancel", *job.ids, check=False)
        cluster.wait_for(lambda: cluster.node_states() == ["idle"] * 4, 40, "idle nodes")
        assert job.processes() == []


def test_what_dies_for_good_ends_the_job_with_its_last_words_last(submit, cluster):
    job = submit({"trainer": "fail"}, "--nodes=1,1,1")
    job.wait_started(trainer=3)
    began = time.monotonic()
    assert job.finish() == "FAILED"
    assert time.monotonic() - began < 60
    assert job.log.rstrip().endswith("ArithmeticError: the trainer has had enough")
    assert re.search(r"trainer died for good \(task 0 on n\d: exit code 1, 2 restarts\)", job.log)
    token = (job.run_dir / "token").read_text()
    assert token not in job.log
    assert not any(token in path.read_text() for path in (job.run_dir / "logs").iterdir())


def test_killed_parts_are_replaced_an_engine_is_done_without_and_a_chain_goes_on(submit, cluster):
    job = submit({"trainer": "stoppable"}, "--nodes=1,1", "--chain=2")
    job.wait_started(trainer=1, buffer=1, engine=2, worker=1)
    endpoint = json.loads((job.run_dir / "endpoint.json").read_text())
    addresses = [endpoint["buffer"], *endpoint["engines"]]
    assert endpoint["job"] == job.id
    assert len(set(addresses)) == 3 and not any("127.0.0.1" in address for address in addresses), "each on its node"
    for part in ("buffer", "worker"):
        os.kill(job.started(part)[-1], signal.SIGKILL)
        job.wait_started(**{part: 2})
    for killed in range(4):  # three restarts, and then it goes on without
        engine = job.started("engine")[0 if killed == 0 else -1]
        os.kill(engine, signal.SIGKILL)
        if killed < 3:
            job.wait_started(engine=3 + killed)
    job.wait_for(lambda: "the run goes on without it" in job.log, 30, "farewell to the engine")
    assert len(job.started("trainer")) == 1
    cluster.run("scancel", "--batch", "--signal=USR1", job.id)
    assert job.finish() == "COMPLETED"
    assert "stopped at a checkpoint" in job.log
    first, job.id = job.id, job.ids[1]
    job.wait_started(trainer=2)
    assert cluster.job(first)["JobState"] == "COMPLETED", "never two on one directory"
    began = time.monotonic()
    cluster.run("scancel", job.id)
    assert job.finish() == "CANCELLED"
    cluster.wait_for(lambda: job.processes() == [], 30, "end of all processes")
    assert time.monotonic() - began < 40


def test_requeues_by_hand_by_a_lost_node_and_at_the_limit_and_the_end_of_a_crash_loop(submit, cluster):
    """Each of three starts ends in its own way without a checkpoint made; the fourth is refused."""
    job = submit({"trainer": "stoppable"}, "--nodes=1,1", "--sbatch=--time=3 --signal=B:USR1@90")
    job.wait_started(trainer=1, engine=2)
    cluster.run("scontrol", "requeue", job.id)
    job.wait_started(trainer=2, engine=4)
    assert "SLURM_RESTART_COUNT = 1" in job.log

    lost = job.nodes()[-1]
    cluster.run("scontrol", "update", f"NodeName={lost}", "State=DOWN", "Reason=test")
    try:
        job.wait_started(trainer=3, engine=6)
        assert "SLURM_RESTART_COUNT = 2" in job.log
        assert lost not in job.nodes()
    finally:
        cluster.run("scontrol", "update", f"NodeName={lost}", "State=RESUME")
    job.wait_for(lambda: "SIGUSR1: the trainer has" in job.log, 150, "signal before the time limit")
    job.wait_for(lambda: f"requeueing job {job.id}" in job.log, 30, "requeue")
    assert job.finish(90) == "FAILED"
    assert "the last 3 starts of this run all began at checkpoint none" in job.log
    assert len(job.started("trainer")) == 3


def test_a_bad_node_is_named_before_anything_starts(submit):
    job = submit({}, "--nodes=1,1,1", "--sbatch=--exclude=n4", SAO_PREFLIGHT="120", FAKE_BAD_NODE="n2")
    assert job.finish(150) == "FAILED"
    assert "node n2: versions differ: torch is 0.0.1 there" in job.log
    assert re.search(r"^  megatron-sao slurm \S+/fake.yaml .* --sbatch=--exclude=n4,n2$", job.log, re.MULTILINE)
    assert job.started("trainer") == []
    assert (job.run_dir / "config.yaml").is_file(), "it can be submitted again"


@pytest.mark.slow  # two rounds of checks, and what a requeue waits
def test_a_site_may_have_the_job_go_on_without_a_bad_node(submit, cluster):
    site = {"SAO_PREFLIGHT": "120", "SAO_BAD_NODES": "exclude", "FAKE_BAD_NODE": "n2"}
    job = submit({"trainer": "succeed"}, "--nodes=1,1,1", **site)
    assert job.finish(200) == "COMPLETED"
    assert "requeueing job" in job.log and "SLURM_RESTART_COUNT = 1, on n1 n3 n4" in job.log
    assert len(job.started("trainer")) == 1
    shown = cluster.run("scontrol", "show", "job", job.id, "--oneliner").splitlines()
    assert ["ExcNodeList=n2" in component for component in shown] == [True] * 3
