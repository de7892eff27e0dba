"""What ``megatron-sao run`` checks before it starts anything, and how it reads the metrics."""

import json
import os
import socket
import sys
import time
from pathlib import Path

import pytest

from megatron_sao.cli import main as cli
from megatron_sao.config import ConfigError, RunConfig, dump_config, parse_config
from megatron_sao.launch import local
from megatron_sao.launch.process import SupervisedProcess, SupervisedRanks
from megatron_sao.launch.progress import Metrics, Progress, clock


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1+1="}\n')
    return make(tmp_path)


def make(tmp_path: Path, **sections: dict) -> RunConfig:
    base = {
        "name": "a-run",
        "model": {"path": tmp_path / "model"},
        "data": {"train": tmp_path / "tasks.jsonl"},
        "rollout": {"environment": "json:loads"},  # importable
    }
    return parse_config(base | sections)


def test_a_complete_config_passes_and_gets_distinct_ports(config, tmp_path):
    local.check_inputs(config)
    local.check_run_dir(config, tmp_path / "runs" / "new")
    ports = local.choose_ports(make(tmp_path, engine={"count": 3}))
    assert len(set(ports)) == 4 and all(ports)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"path": "/nowhere/model"}}, "model.path = /nowhere/model is not a directory"),
        ({"data": {"train": "/nowhere/t.jsonl"}}, "data.train = /nowhere/t.jsonl is not a file"),
        ({"sft": {"steps": 5}}, "sft.steps = 5 needs demonstrations"),
        ({"parallel": {"world_size": 2}}, "parallel.nproc_per_node = 1 and world_size = 2"),
        ({"rollout": {"environment": "json:Nope"}}, r"rollout\.environment = 'json:Nope': .* defines no 'Nope'"),
        ({"rollout": {"environment": "json:loads", "reward": "nope:r"}}, r"rollout\.reward = 'nope:r': no module"),
    ],
)
def test_what_is_missing_is_named(config, tmp_path, sections, message):
    with pytest.raises(ConfigError, match=message):
        given = make(tmp_path, **sections)
        local.check_inputs(given)
        local.check_one_machine(given)
        local.check_environment(given)


def test_a_converted_model_that_is_missing_is_named(config, tmp_path):
    model = {"path": tmp_path / "model", "megatron_path": "/nowhere/m"}
    with pytest.raises(ConfigError, match=r"model\.megatron_path = /nowhere/m is not a directory"):
        local.check_inputs(make(tmp_path, model=model))


def test_a_model_directory_without_config_json_is_named(config, tmp_path):
    (tmp_path / "model" / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"model holds no config\.json"):
        local.check_inputs(config)


def test_a_port_in_use_is_named(tmp_path, config):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"buffer\.port = {port}: cannot listen on 127\.0\.0\.1:{port}"):
            local.choose_ports(make(tmp_path, buffer={"port": port}))


def test_two_parts_with_one_port_are_refused(tmp_path, config):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(ConfigError, match=rf"engine\.port = {port}"):
        local.choose_ports(make(tmp_path, buffer={"port": port}, engine={"port": port}))


def test_a_broken_line_of_the_tasks_is_named_with_its_field(config, tmp_path):
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": "1+')
    with pytest.raises(ConfigError, match=r"data\.train: .*tasks\.jsonl:2: not valid JSON"):
        local.check_inputs(config)


@pytest.mark.parametrize("made", ["metrics.jsonl", "checkpoints/latest", "buffer/segments/00000001.seg"])
def test_a_run_is_resumed_only_with_the_config_it_began_with(tmp_path, config, made):
    run_dir = tmp_path / "run"
    (run_dir / made).parent.mkdir(parents=True)
    (run_dir / "config.yaml").write_text(dump_config(config))
    (run_dir / made).touch()
    local.check_run_dir(make(tmp_path, rl={"steps": 7}), run_dir)  # a mistake that was found before anything was made
    (run_dir / made).write_text("something")
    local.check_run_dir(config, run_dir)
    with pytest.raises(ConfigError, match=r"rl\.steps = 7 now, but 1000 in .*config\.yaml"):
        local.check_run_dir(make(tmp_path, rl={"steps": 7}), run_dir)


def test_what_only_observes_may_change_when_a_run_is_resumed(tmp_path, config):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(dump_config(config))
    (run_dir / "metrics.jsonl").write_text("{}\n")
    alarms = {"masked_above": {"limit": 0.5, "action": "stop"}}
    local.check_run_dir(make(tmp_path, alarms=alarms, logging={"samples_every": 5}), run_dir)


@pytest.mark.parametrize(
    ("steps", "latest", "exported", "complete"),
    [
        (7, "rl-7", True, True),
        (7, "rl-7", False, False),
        (7, "rl-6", True, False),
        (7, None, True, False),
        (0, "value-0", True, True),  # only a cold start: no checkpoint is made after it
        (0, "rl-0", True, True),
        (0, "value-0", False, False),
        (0, None, True, True),
    ],
)
def test_a_run_is_complete_when_its_policy_is_exported_and_no_step_is_left(
    tmp_path, config, steps, latest, exported, complete
):
    run_dir = tmp_path / "run"
    for folder in ("checkpoints", "hf"):
        (run_dir / folder).mkdir(parents=True)
    if latest is not None:
        (run_dir / "checkpoints" / "latest").write_text(f"{latest}\n")
    if exported:
        (run_dir / "hf" / "config.json").write_text("{}")
    assert local.is_complete(make(tmp_path, rl={"steps": steps}), run_dir) is complete


def test_a_directory_that_is_no_run_is_refused(tmp_path, config):
    with pytest.raises(ConfigError, match=r"holds no config\.yaml"):
        local.check_run_dir(config, tmp_path)


def test_the_log_of_an_evaluation_is_no_run(tmp_path, config):
    (tmp_path / "new" / "logs").mkdir(parents=True)
    local.check_run_dir(config, tmp_path / "new")


def test_a_config_error_is_one_sentence_and_exit_code_2(tmp_path, capsys):
    (tmp_path / "bad.yaml").write_text("name: x\nrll: {}\n")
    assert cli(["run", str(tmp_path / "bad.yaml")]) == 2
    assert "unknown key 'rll'; the nearest known key is 'rl'" in capsys.readouterr().err


def test_gpus_are_divided_where_there_are_enough_and_shared_otherwise(tmp_path, config, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    two_ranks = {"world_size": 2, "nproc_per_node": 2}
    model = {"path": tmp_path / "model", "device": "cuda"}
    config = make(tmp_path, model=model, parallel=two_ranks)
    assert local.gpu_shares(config) == [{"CUDA_VISIBLE_DEVICES": "4,5"}, {"CUDA_VISIBLE_DEVICES": "6"}]
    config = make(tmp_path, model=model, parallel=two_ranks, engine={"tp": 2})
    assert local.gpu_shares(config) == [{}, {}]


def test_last_words_are_those_of_the_last_start(tmp_path):
    process = SupervisedProcess(
        "p", [sys.executable, "-c", "print('first'); print('last')"], dict(os.environ), tmp_path, 1
    )
    for start in (process.start, process.restart):
        start()
        assert process.wait(time.monotonic() + 90)
    assert process.last_words().splitlines() == ["first", "last"]
    assert process.last_words(1) == "last"
    assert process.log.read_text().count("first") == 2


@pytest.mark.parametrize(
    ("code", "description"),
    [
        (-9, "rank 1 killed by SIGKILL (by the kernel if memory ran out: see dmesg)"),
        (-35, "rank 1 killed by signal 35"),
        (2, "rank 1 exit code 2"),
    ],
    ids=["killed", "real-time-signal", "failed"],
)
def test_ranks_end_as_the_one_that_failed_first(code, description, tmp_path):
    log = f"""[default0]:hello
[default1]:the cause
[default0]:Connection closed by peer
W1 torch/distributed/elastic/multiprocessing/api.py:906] Sending process 7 closing signal SIGTERM
E1 torch/distributed/elastic/multiprocessing/api.py:1003] failed (exitcode: {code}) local_rank: 1 (pid: 8) of binary: p
torch.distributed.elastic.multiprocessing.errors.ChildFailedError"""
    ranks = SupervisedRanks("p", 2, [], dict(os.environ), tmp_path)
    ranks.argv = [sys.executable, "-c", f"print({log!r}); raise SystemExit(1)"]
    ranks.start()
    assert ranks.wait(time.monotonic() + 90)
    assert (ranks.exit_code(), ranks.describe_exit(), ranks.last_words()) == (code, description, "the cause")


def test_metrics_are_read_as_they_grow(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path, {"sft": 10, "rl": 100})
    assert metrics.describe() == "starting"
    events = [{"stage": "sft", "step": 9, "time": 5.0, "train/sft_loss": 0.5}]
    for step in range(1, 5):
        times = {"time/wait": 3.0, "time/policy": 1.0, "time/step": 4.0}
        events.append({"stage": "rl", "step": step, "time": 10.0 * step, "train/success_rate": step / 10, **times})
    events.append({"stage": "rl", "step": 5, "time": 41.0, "eval/success_rate": 0.25})
    text = "".join(json.dumps(event) + "\n" for event in events)
    path.write_text(text[:-9])
    assert metrics.read() and metrics.evals == {}
    path.write_text(text)
    metrics.read()
    assert metrics.evals == {("rl", 5): 0.25}
    assert metrics.eta() == 95 * 10.0
    assert metrics.time_shares() == [("wait", 0.75), ("policy", 0.25)]
    expected = "rl 5/100 | success 0.400 | held-out 0.250 at rl 5 | time wait 75% policy 25% | ETA 15:50"
    assert metrics.describe() == expected


def test_a_later_line_for_a_step_wins(tmp_path):
    lines = [{"stage": "rl", "step": 4, "time": 1.0, "eval/success_rate": rate} for rate in (0.1, 0.2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    metrics = Metrics(tmp_path / "metrics.jsonl", {})
    metrics.read()
    assert metrics.evals == {("rl", 4): 0.2}


def test_durations_read_like_a_clock():
    assert [clock(seconds) for seconds in (5, 65, 3723)] == ["0:05", "1:05", "1:02:03"]


def test_a_fall_back_to_an_older_checkpoint_is_shown_once_and_an_earlier_runs_not_at_all(tmp_path, capsys):
    old, new = (
        json.dumps({"time": when, "stage": "rl", "step": 2, "checkpoint/fallback_reason": f"fallback {name}"}) + "\n"
        for name, when in (("before", time.time() - 60), ("now", time.time() + 60))
    )
    (tmp_path / "metrics.jsonl").write_text(old + new)
    progress = Progress(make(tmp_path), tmp_path)
    progress.update()
    assert capsys.readouterr().err == "megatron-sao: fallback now\n"
    assert progress.metrics.fallbacks == []


def test_a_resumed_run_says_so_until_its_trainer_speaks(tmp_path, capsys):
    def event(when: float, step: int) -> str:
        return json.dumps({"time": when, "stage": "rl", "step": step, "train/reward_mean": 0.5}) + "\n"

    (tmp_path / "metrics.jsonl").write_text(event(time.time() - 60, 2))
    Progress(make(tmp_path), tmp_path).update()
    assert "starting again; until now: rl 3/" in capsys.readouterr().out
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(event(time.time() + 60, 3))
    Progress(make(tmp_path), tmp_path).update()
    out = capsys.readouterr().out
    assert "rl 4/" in out and "starting again" not in out


def test_a_directory_to_evaluate_that_is_no_model_is_named_by_its_option(tmp_path, capsys):
    (tmp_path / "eval.jsonl").write_text('{"prompt": "a"}\n')
    config = make(tmp_path, data={"train": tmp_path / "eval.jsonl", "eval": tmp_path / "eval.jsonl"})
    (tmp_path / "run.yaml").write_text(dump_config(config))
    assert cli(["eval", str(tmp_path / "run.yaml"), "--hf-dir", str(tmp_path / "nowhere")]) == 2
    assert f"--hf-dir {tmp_path / 'nowhere'} holds no config.json" in capsys.readouterr().err
