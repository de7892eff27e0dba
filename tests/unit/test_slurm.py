"""What of the Slurm launcher needs no Slurm: reading its answers, placing parts, building commands."""

from __future__ import annotations

import argparse
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_sao.config import ConfigError, RunConfig, load_config, parse_config
from megatron_sao.launch.allocation import Allocation, Node, first_port, lay_out, parse_cpus, parse_gpus
from megatron_sao.launch.preflight import Place, Plan, _problems
from megatron_sao.launch.site import Site
from megatron_sao.launch.slurm import go_on_without, note_start
from megatron_sao.launch.step import SupervisedStep
from megatron_sao.launch.submit import plan, sbatch


def make(**sections: dict) -> RunConfig:
    base = {
        "name": "a-run",
        "model": {"path": "/models/m"},
        "data": {"train": "/data/tasks.jsonl"},
        "rollout": {"environment": "none:None"},
    }
    return parse_config(base | sections)


def nodes(names: str, gpus: int = 8, group: int | None = None) -> list[Node]:
    return [Node(name, f"10.0.0.{name[1:]}", group, 64, gpus) for name in names.split()]


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("4+0 gres:gpu:4", 4), ("7 gres:gpu:h200:8", 8), ("7 gres/gpu:2", 2), ("7 gres/gpu:h200:8", 8),
        ("7 gpu:h100=8", 8), ("7 N/A", 0), ("7 gres:nic:2", 0),
    ],
)  # fmt: skip
def test_gpus_per_node_are_read_in_every_form_that_squeue_prints(text, gpus):
    assert parse_gpus(text) == gpus


def test_cpus_per_node_are_read_node_by_node():
    assert parse_cpus("8(x2),4") == [8, 8, 4]


def test_ports_of_the_next_84_jobs_do_not_overlap_and_stay_below_the_ephemeral_range():
    starts = sorted(first_port(str(job)) for job in range(1000, 1085))
    assert all(later - earlier >= 256 for earlier, later in itertools.pairwise(starts))
    assert starts[-1] + 256 <= 32768


BIG = {"parallel": {"world_size": 16, "nproc_per_node": 8, "tp": 8}, "engine": {"count": 3, "tp": 4}}


def test_three_components_are_head_trainer_and_rollout_nodes():
    layout = lay_out([nodes("n1", 0), nodes("n2 n3"), nodes("n4 n5")], make(**BIG))
    assert layout.head.name == "n1"
    assert [node.name for node in layout.trainer] == ["n2", "n3"]
    assert [node.name for node in layout.engines] == ["n4", "n4", "n5"]
    assert layout.cpus_per_slot(layout.trainer[0]) == 8
    assert layout.cpus_per_slot(layout.engines[0]) == 8


def test_a_plain_job_gives_the_trainer_its_nodes_and_the_engines_the_others_or_the_same():
    layout = lay_out([nodes("n1 n2 n3")], make(**BIG | {"engine": {"count": 2, "tp": 4}}))
    assert [node.name for node in layout.engines] == ["n3", "n3"]
    assert layout.head.name == "n1"
    shared = make(parallel={"world_size": 4, "nproc_per_node": 4}, engine={"count": 2, "tp": 2})
    layout = lay_out([nodes("n1")], shared)
    assert (layout.slots(layout.head), layout.cpus_per_slot(layout.head)) == (8, 8)


@pytest.mark.parametrize(
    ("groups", "sections", "message"),
    [
        ([nodes("n1"), nodes("n2")], BIG, r"the trainer has 1 nodes and needs 2"),
        ([nodes("n1 n2"), nodes("n3")], BIG, r"node n3 has 8 GPUs for 12 ranks and engine GPUs"),
        ([nodes("n1"), nodes("n2", 0)], {"model": {"path": "m", "device": "cuda"}}, r"n2 has 0 GPUs for 1"),
        ([nodes("n1")] * 4, {}, r"the job has 4 components"),
    ],
)
def test_a_job_that_does_not_fit_the_config_is_refused_with_the_remedy(groups, sections, message):
    with pytest.raises(ConfigError, match=message):
        lay_out(groups, make(**sections))


def test_a_site_variable_that_means_nothing_names_the_nearest():
    with pytest.raises(ConfigError, match=r"SAO_CONTANER is no setting of a site; the nearest is SAO_CONTAINER"):
        Site.from_environment({"SAO_CONTANER": "x"})
    with pytest.raises(ConfigError, match=r"SAO_PREFLIGHT = 'soon'"):
        Site.from_environment({"SAO_PREFLIGHT": "soon"})
    with pytest.raises(ConfigError, match=r"SAO_BAD_NODES = 'leave'"):
        Site.from_environment({"SAO_BAD_NODES": "leave"})


def command(site: Site, **options) -> list[str]:
    return site.command("engine-0", nodes("n4", group=2), ["-m", "x"], paths=[Path("/models/m")], **options)


def test_a_step_asks_for_just_what_it_needs():
    plain = command(Site("python"), gpus=4, cpus=32)
    assert plain[0] == "srun" and plain[-3:] == ["python", "-m", "x"]
    assert {"--het-group=2", "--nodelist=n4", "--gpus-per-node=4", "--cpus-per-task=32", "--exact"} <= set(plain)
    assert "--overlap" in command(Site("python")) and "--exact" not in command(Site("python"))


def test_containers_get_the_runs_directories_at_the_same_paths():
    pyxis = command(Site("python3", "/images/sao.sqsh", ("/shared",)), gpus=1, cpus=1)
    here = os.getcwd()
    assert "--container-image=/images/sao.sqsh" in pyxis
    assert f"--container-mounts={here}:{here},/models/m:/models/m,/shared:/shared" in pyxis
    apptainer = command(Site("python3", "/images/sao.sif"), gpus=1, cpus=1)
    inside = ["--bind", f"{here},/models/m", "--pwd", here, "/images/sao.sif", "python3", "-m", "x"]
    assert apptainer[apptainer.index("apptainer") :] == ["apptainer", "exec", "--nv", *inside]


def test_the_jobs_own_sizes_do_not_reach_its_steps_and_the_users_network_choice_does():
    env = {"SLURM_GPUS_PER_NODE": "8", "SLURM_MEM_PER_NODE_HET_GROUP_1": "5", "SLURM_JOB_ID": "7"}
    found = Site("python", scratch="/scratch").environment(env | {"NCCL_SOCKET_IFNAME": "ib1"}, "ib0", "7")
    assert found == {
        "SLURM_JOB_ID": "7", "NCCL_SOCKET_IFNAME": "ib1", "GLOO_SOCKET_IFNAME": "ib0", "TMPDIR": "/scratch/sao-7",
        "TRITON_CACHE_DIR": "/scratch/sao-7/triton", "TORCHINDUCTOR_CACHE_DIR": "/scratch/sao-7/inductor",
    }  # fmt: skip


def submission(**options) -> argparse.Namespace:
    defaults = {"config": "c.yaml", "set": ["seed=1"], "cpus_per_node": None, "chain": None, "sbatch": []}
    return argparse.Namespace(**defaults | options)


def test_the_sbatch_command_has_a_component_per_kind_of_node():
    config = make(**BIG)
    line = sbatch(config, Path("runs/a-run"), submission(sbatch=["--partition=gpu"]), plan(config, None, 8))
    colon = line.index(":")
    assert {"--nodes=2", "--gpus-per-node=8", "--exclusive", "--mem=0", "--partition=gpu"} <= set(line[:colon])
    assert {"--nodes=2", "--gpus-per-node=8", "--exclusive", "--mem=0", "--partition=gpu"} <= set(line[colon:])
    assert {"--job-name=a-run", "--dependency=singleton"} <= set(line[:colon])
    assert "--job-name=a-run.1" in line, "components of one name would wait for each other"
    assert line[-4:] == ["c.yaml", "--run-dir=runs/a-run", "--set", "seed=1"]
    assert sbatch(config, Path("r"), submission(chain=3), plan(config, "2,2,1", 8))[-1] == "--slurm=end"


@pytest.mark.parametrize("wanted", ["two", "1,2,3,4", "0", "2,2,2"])
def test_nodes_must_be_one_to_three_numbers(wanted):
    with pytest.raises(ConfigError, match=f"--nodes {wanted}: give one number"):
        plan(make(**BIG), wanted, 8)


def test_a_run_that_starts_again_and_again_from_one_checkpoint_is_not_started_a_fourth_time(tmp_path, capsys):
    allocation = Allocation("7", 0, [])
    (tmp_path / "checkpoints").mkdir()
    latest = tmp_path / "checkpoints" / "latest"
    latest.write_text("rl-10\n")
    assert [note_start(tmp_path, allocation) for _ in range(4)] == [True, True, True, False]
    assert "the last 3 starts of this run all began at checkpoint rl-10" in capsys.readouterr().err
    latest.write_text("rl-20\n")
    assert note_start(tmp_path, allocation)


def run_as_step(tmp_path: Path, script: str, label: bool = False) -> SupervisedStep:
    argv = ["sh", "-c", script, *(["--label"] if label else [])]
    step = SupervisedStep("part", argv, dict(os.environ), tmp_path)
    step.start()
    assert step.wait(time.monotonic() + 60)
    return step


def test_the_end_of_a_step_is_that_of_the_task_that_failed_first(tmp_path):
    step = run_as_step(
        tmp_path,
        "echo '0: fine'; echo '1: Traceback'; echo '1: ValueError: the cause'; echo '0: lost my peer';"
        "echo 'srun: error: n2: task 1: Exited with exit code 2';"
        "echo '1: slurmstepd-n2: error: *** STEP 1.0 ON n1 CANCELLED ***';"
        "echo 'srun: error: n1: task 0: Killed'; exit 137",
        label=True,
    )
    assert step.exit_code() == 2
    assert step.describe_exit() == "task 1 on n2: exit code 2"
    assert step.last_words().splitlines() == ["Traceback", "ValueError: the cause"]


def test_a_step_that_could_not_start_ends_with_sruns_own_words(tmp_path):
    step = run_as_step(tmp_path, "echo 'srun: error: Unable to create step for job 4: Job/step expired'; exit 1")
    assert step.exit_code() == 1
    assert step.last_words().endswith("Job/step expired")


PLAN = Plan({name: Place("10.0.0.1", [], 0) for name in ("n1", "n2", "n3")}, [], None, None, 1, False, 60.0)


def report(**changes) -> dict:
    good = {"problems": [], "done": True, "versions": {"torch": "2.14.1"}, "files": {"/m": "3 files, ab"}}
    return good | changes


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ({"n1": report(), "n2": report(), "n3": report()}, []),
        (
            {"n1": report(), "n2": report(versions={"torch": "2.13.0"}), "n3": report()},
            ["node n2: versions differ: torch is 2.13.0 there and 2.14.1 elsewhere"],
        ),
        (
            {"n1": report(), "n2": report(), "n3": report(files={"/m": "2 files, cd"})},
            ["node n3: files differ: /m is 2 files, cd there and 3 files, ab elsewhere"],
        ),
        (
            {"n1": report(done=False), "n2": report(problems=["no GPU"], done=False)},
            ["node n2: no GPU"],
        ),
        ({"n1": report(), "n2": report()}, ["node n3: it did not report, for which it had 60 s (SAO_PREFLIGHT)"]),
        (
            {"n1": report(), "n2": report(versions={"torch": "2.13.0"})},
            [
                "versions differ, and none is more frequent: torch is 2.14.1 on n1, 2.13.0 on n2",
                "node n3: it did not report, for which it had 60 s (SAO_PREFLIGHT)",
            ],
        ),
    ],
)
def test_the_node_that_fails_its_checks_is_named(tmp_path, reports, expected):
    for name in reports:
        (tmp_path / name).write_text(PLAN.nonce)
    assert [str(problem) for problem in _problems(reports, tmp_path, PLAN)] == expected


def test_a_node_that_writes_to_another_directory_is_named(tmp_path):
    (tmp_path / "n1").write_text(PLAN.nonce)
    (tmp_path / "n2").write_text("of an earlier check")
    (tmp_path / "n3").write_text(PLAN.nonce)
    (problem,) = _problems({name: report() for name in PLAN.nodes}, tmp_path, PLAN)
    assert problem.node == "n2" and "must be on a shared file system" in problem.what


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in that shows a job of two components and refuses every first update; returns the log of its calls."""
    log, program = tmp_path / "calls", tmp_path / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(
        f"""#!/bin/sh
echo "$*" >> {log}
case $1 in
show) echo "JobId=7 JobState=RUNNING Requeue=1 ReqNodeList=(null) ExcNodeList=n[4-5]"; echo "JobId=8 Requeue=0" ;;
update) [ "$(grep -c ^update {log})" -gt 1 ] || {{ echo "Job is no longer pending execution" >&2; exit 1; }} ;;
esac
"""
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return log


ALLOCATION = Allocation("7", 0, [nodes("n1", group=0), nodes("n2 n3", group=1)])


def test_bad_nodes_come_with_the_very_command_that_does_without_them(scontrol, monkeypatch, capsys):
    monkeypatch.setenv("MEGATRON_SAO_SUBMITTED", "megatron-sao slurm my.yaml '--sbatch=--time=9 --exclude=n[4-5]'")
    assert go_on_without(["n2"], ALLOCATION, Site("python")) == 1
    command = "megatron-sao slurm my.yaml '--sbatch=--time=9 --exclude=n[4-5]' '--sbatch=--exclude=n[4-5],n2'"
    assert capsys.readouterr().err.splitlines()[-1].strip() == command
    monkeypatch.delenv("MEGATRON_SAO_SUBMITTED")
    assert go_on_without(["n2"], ALLOCATION, Site("python")) == 1
    assert "add --exclude=n[4-5],n2 to each component" in capsys.readouterr().err
    assert "requeue" not in scontrol.read_text()


def test_a_site_that_excludes_bad_nodes_requeues_the_job_and_then_changes_what_it_excludes(scontrol, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the tests' own SIGTERM stays as it is
    assert go_on_without(["n2"], ALLOCATION, Site("python", bad_nodes="exclude")) == 0
    done = [line for line in scontrol.read_text().splitlines() if not line.startswith("show")]
    assert done == ["requeue 7", *["update JobId=7 ExcNodeList=n[4-5],n2"] * 2]


def test_where_most_nodes_fail_the_job_ends_since_others_would_fail_as_well(scontrol):
    assert go_on_without(["n1", "n2"], ALLOCATION, Site("python", bad_nodes="exclude")) == 1
    assert "requeue" not in scontrol.read_text()


def test_submitting_and_supervising_need_no_more_than_tools_setup_launcher_txt():
    """They run on the login and batch nodes, where the container with torch is not."""
    code = (
        "import sys, megatron_sao.cli, megatron_sao.launch.slurm, megatron_sao.launch.submit; "
        "print([name for name in ('torch', 'megatron', 'sglang', 'transformers', 'httpx') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_large_run_of_the_documentation_is_a_job_of_49_nodes():
    root = Path(__file__).parents[2]
    config = load_config(root / "model_configs" / "glm5_2_744b.yaml")
    section = (root / "docs" / "running.md").read_text().split("## 48 nodes")[1]
    nodes = re.search(r"--nodes=(\S+) --dry-run\n", section)[1]
    components = plan(config, nodes, 8)
    assert [(component.nodes, component.gpus) for component in components] == [(1, 0), (32, 8), (16, 8)]
    assert plan(config, None, 8)[1].nodes == 16
