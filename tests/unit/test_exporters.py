"""Metrics for Prometheus and Weights & Biases."""

import json
import socket
import sys
from types import SimpleNamespace

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from megatron_sao.config import ConfigError, LoggingConfig
from megatron_sao.trainer.exporters import PrometheusEndpoint, WandbRun
from megatron_sao.trainer.metrics import MetricsWriter
from tests.trajectories import make_config


def scrape(port: int) -> dict[tuple[str, str], float]:
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False, timeout=60).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert all(sample.labels["run"] == "test" for sample in samples)
    return {(sample.name, sample.labels["stage"]): sample.value for sample in samples}


def test_prometheus_reads_the_newest_value_of_every_metric_by_stage(tmp_path):
    writer = MetricsWriter(tmp_path, make_config(tmp_path, logging={"prometheus_port": 0}))
    (endpoint,) = writer._exporters
    writer.write("value", 7, {"train/reward_mean": 0.125})
    writer.write("rl", 0, {"train/reward_mean": 0.25, "dis/rho_bin_0.5": 0.0, "note": "text"})
    writer.write("rl", 1, {"train/reward_mean": 0.5})
    assert scrape(endpoint.port) == {
        ("megatron_sao_trainer_train_reward_mean", "value"): 0.125,
        ("megatron_sao_trainer_step", "value"): 7,
        ("megatron_sao_trainer_train_reward_mean", "rl"): 0.5,
        ("megatron_sao_trainer_dis_rho_bin_0_5", "rl"): 0.0,
        ("megatron_sao_trainer_step", "rl"): 1,
    }
    writer.close()
    with pytest.raises(httpx.ConnectError):
        scrape(endpoint.port)


def test_prometheus_is_off_and_on_loopback_unless_told_otherwise(tmp_path):
    writer = MetricsWriter(tmp_path, make_config(tmp_path))
    assert writer._exporters == []
    writer.close()
    assert LoggingConfig().prometheus_host == "127.0.0.1"


def test_a_taken_prometheus_port_is_named():
    with socket.socket() as occupant:
        occupant.bind(("127.0.0.1", 0))
        occupant.listen()
        port = occupant.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"logging\.prometheus_port = {port}: cannot listen on 127\.0\.0\.1"):
            PrometheusEndpoint("test", LoggingConfig(prometheus_port=port))


def test_without_the_package_wandb_the_field_is_refused_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = make_config(tmp_path, logging={"wandb_project": "p"})
    with pytest.raises(ConfigError, match=r"logging\.wandb_project = 'p' needs the package wandb.*pip install wandb"):
        WandbRun(config, tmp_path)


def test_wandb_gets_every_metric_on_a_step_axis_of_its_stage_and_a_resumed_run_keeps_its_id(tmp_path, monkeypatch):
    logged, inits, axes = [], [], {}

    def init(**arguments):
        inits.append(arguments)
        return SimpleNamespace(
            log=logged.append, finish=lambda: logged.append("end"),
            define_metric=lambda name, step_metric: axes.update({name: step_metric}),
        )  # fmt: skip

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    config = make_config(tmp_path, logging={"wandb_project": "p"})
    for step in (4, 3):  # the second start repeats a step
        writer = MetricsWriter(tmp_path, config)
        writer.write("rl", step, {"train/kl": 0.5, "note": "text"})
        writer.close()
    assert logged == [{"rl/train/kl": 0.5, "rl/step": 4}, "end", {"rl/train/kl": 0.5, "rl/step": 3}, "end"]
    assert axes["rl/*"] == "rl/step"
    assert inits[0] == inits[1] and inits[0]["resume"] == "allow" and inits[0]["id"]
    assert inits[0]["project"] == "p" and inits[0]["config"]["rl"]["batch_size"] == 2
    json.dumps(inits[0]["config"])
