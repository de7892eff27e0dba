"""Alarms: what sets them off, and what a stop leaves behind."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_sao.config import AlarmsConfig, RunConfig, dump_config
from megatron_sao.data.batches import RecordedBatches
from megatron_sao.models.backend import Backend
from megatron_sao.trainer.alarms import Alarms, AlarmStop
from megatron_sao.trainer.loop import Stage, run_rl
from megatron_sao.trainer.main import Run
from megatron_sao.trainer.source import LiveSource
from tests.distributed.offline import BATCH, offline_config, read_metrics

pytestmark = pytest.mark.distributed


def alarms(world: Backend, **settings: object) -> Alarms:
    return Alarms(AlarmsConfig(**settings), world.device)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "ALARM" in record.getMessage()]


@pytest.mark.parametrize(
    ("field", "limit", "metrics", "sentence"),
    [
        (
            "entropy_below", 0.1, {"train/entropy": 0.05},
            "train/entropy = 0.05, below alarms.entropy_below.limit = 0.1",
        ),
        (
            "masked_above", 0.25, {"dis/accepted_fraction": 0.5},
            "1 - dis/accepted_fraction = 0.5, above alarms.masked_above.limit = 0.25",
        ),
        (
            "mismatch_above", 1e-3, {"lag/own_abs_logprob_diff": 0.02, "lag/own_tokens": 3.0},
            "lag/own_abs_logprob_diff = 0.02, above alarms.mismatch_above.limit = 0.001",
        ),
    ],
)  # fmt: skip
def test_a_quantity_beyond_its_limit_stops_the_run_and_one_at_the_limit_does_not(
    field: str, limit: float, metrics: dict[str, float], sentence: str, world: Backend
) -> None:
    with pytest.raises(AlarmStop) as caught:
        alarms(world, **{field: {"limit": limit, "action": "stop"}}).check(metrics)
    assert str(caught.value) == f"stopped by an alarm: {sentence}"
    inside = {
        "train/entropy": 0.1,
        "dis/accepted_fraction": 0.75,
        "lag/own_abs_logprob_diff": 1e-3,
        "lag/own_tokens": 3,
    }
    alarms(world, **{field: {"limit": limit, "action": "stop"}}).check(inside)
    alarms(world, **{field: {"limit": limit, "action": "stop"}}).check({})
    alarms(world).check(metrics)


def test_a_mismatch_over_no_tokens_at_all_is_none(world: Backend) -> None:
    watched = alarms(world, mismatch_above={"limit": 0.0, "action": "stop"})
    watched.check({"lag/own_abs_logprob_diff": 0.02, "lag/own_tokens": 0.0})


def test_an_alarm_waits_for_its_steps_in_a_row_and_warns_once_until_it_is_over(
    world: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    watched = alarms(world, entropy_below={"limit": 0.1, "steps": 2})
    heard = []
    for entropy in (0.05, 0.5, 0.05, 0.05, 0.05, 0.5, 0.05, 0.05):
        watched.check({"train/entropy": entropy})
        heard.append(len(warnings(caplog)))
    assert heard == [0, 0, 0, 1, 1, 1, 1, 2]
    assert warnings(caplog)[0].endswith("below alarms.entropy_below.limit = 0.1 in 2 steps in a row")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_not_finite_stops_the_run_warns_or_is_ignored(
    value: float, world: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = {"train/reward_mean": 1.0, "train/kl": value, "note": "nan"}
    with pytest.raises(AlarmStop, match=r"train/kl = -?(nan|inf) \(1 metrics are not finite\)"):
        alarms(world).check(metrics)
    caplog.clear()
    alarms(world, nonfinite="ignore").check(metrics)
    assert warnings(caplog) == []
    alarms(world, nonfinite="warn").check(metrics)
    assert len(warnings(caplog)) == 1


def test_a_step_without_data_warns_once_or_stops(
    world: Backend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [100.0]
    monkeypatch.setattr("megatron_sao.trainer.alarms.time.monotonic", lambda: now[0])
    warn = alarms(world, no_data_for={"limit": 60}).waiting()
    stop = alarms(world, no_data_for={"limit": 60, "action": "stop"}).waiting()
    off = alarms(world).waiting()
    for now[0] in (130.0, 160.0):
        warn(), stop(), off()
    assert warnings(caplog) == []
    now[0] = 161.0
    warn(), warn(), off()
    assert len(warnings(caplog)) == 1
    with pytest.raises(AlarmStop, match=r"no batch for 61 s, more than alarms\.no_data_for\.limit = 60"):
        stop()


class NoBatch:
    """A buffer that never has a batch."""

    def batch(self, *_: object, **__: object) -> None:
        return None


class NoEngines:
    incarnation, version = 1, "1.0"

    def refresh(self, policy_version: int) -> None: ...

    def close(self) -> None: ...


def test_a_run_without_data_stops_with_a_checkpoint_at_the_step_that_waited(
    world: Backend, glm4_moe: Path, batches: Path, tmp_path: Path
) -> None:
    run, stage = starved(world, glm4_moe, batches, tmp_path)
    stage.source = run.recorded
    run_rl(stage, 1, 0)
    stage.source = LiveSource(NoBatch(), NoEngines(), run.world, run.stop, run.alarms)
    with pytest.raises(AlarmStop, match=r"stopped by an alarm: no batch for .* resumes from rl-1"):
        run_rl(stage, 2, 1)
    assert (tmp_path / "checkpoints" / "latest").read_text() == "rl-1\n"


def test_a_run_without_data_for_its_very_first_step_stops_as_it_was_started(
    world: Backend, glm4_moe: Path, batches: Path, tmp_path: Path
) -> None:
    _, stage = starved(world, glm4_moe, batches, tmp_path)
    with pytest.raises(AlarmStop, match=r"no batch for .* resumes from rl-0"):
        run_rl(stage, 2, 0)
    assert not list((tmp_path / "checkpoints").glob("*/meta.json"))


def starved(world: Backend, model: Path, batches: Path, run_dir: Path) -> tuple[Run, Stage]:
    """A run and its RL stage, for which no batch ever comes."""
    run = Run(offline_config(model, alarms={"no_data_for": {"limit": 0, "action": "stop"}}), run_dir, batches, world)
    stage = run._rl_stage(0)
    stage.source = LiveSource(NoBatch(), NoEngines(), run.world, run.stop, run.alarms)
    return run, stage


def stopping(model: Path, **parallel: int) -> RunConfig:
    """Rejects most tokens, and stops at the second step in a row where more than 1 % are rejected."""
    alarms = {"masked_above": {"limit": 0.01, "steps": 2, "action": "stop"}}
    algorithm = {"eps_low": 0.2, "eps_high": 0.2}
    sections = {"checkpoint": {"save_interval": 3}, "logging": {"samples_every": 1, "samples": BATCH}}
    return offline_config(model, alarms=alarms, algorithm=algorithm, parallel=parallel, **sections)


def read_samples(run_dir: Path) -> dict[tuple[int, str], dict]:
    lines = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    return {(sample["step"], sample["id"]): sample for sample in lines}


@pytest.fixture(scope="module")
def stopped(world: Backend, glm4_moe: Path, batches: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of one rank that an alarm stopped."""
    run_dir = tmp_path_factory.mktemp("stopped")
    with pytest.raises(AlarmStop, match=r"masked_above\.limit = 0\.01 in 2 steps in a row; the same .* from rl-2"):
        Run(stopping(glm4_moe), run_dir, batches, world).run()
    return run_dir


def test_a_stopped_run_resumes_where_it_stopped_as_if_it_had_not(
    world: Backend, glm4_moe: Path, batches: Path, stopped: Path, tmp_path: Path
) -> None:
    assert (stopped / "checkpoints" / "latest").read_text() == "rl-2\n"
    assert [step for stage, step in read_metrics(stopped) if stage == "rl"] == [0, 1]
    unwatched = stopping(glm4_moe).model_copy(update={"alarms": AlarmsConfig()})
    Run(unwatched, tmp_path, batches, world).run()
    Run(unwatched, stopped, batches, world).run()
    assert read_metrics(stopped) == read_metrics(tmp_path)


def test_samples_are_what_the_step_saw_of_each_action_token(
    world: Backend, glm4_moe: Path, batches: Path, stopped: Path
) -> None:
    samples = read_samples(stopped)
    for step in (0, 1):
        trajectories = RecordedBatches(batches).batch("rl", step)
        assert {t.id for t in trajectories} == {id for of, id in samples if of == step}
        differences, rejected, tokens = [], 0, 0
        for t in trajectories:
            sample = samples[step, t.id]
            acted = t.loss_mask == 1
            assert sample["tokens"] == t.token_ids.tolist() and sample["mask"] == t.loss_mask.tolist()
            assert sample["rollout_logprobs"] == pytest.approx(t.logprobs[acted].tolist(), rel=1e-5)
            assert sample["rewards"] == t.rewards[acted].tolist()
            ratios = [math.exp(a - b) for a, b in zip(sample["logprobs"], sample["rollout_logprobs"], strict=True)]
            rejected += sum(not 0.8 < ratio < 1.2 for ratio in ratios)
            tokens += len(ratios)
            differences += [math.log(ratio) for ratio in ratios]
            # lambda = 1 - 1 / (1.5 n), gamma = 1: the last advantage is the reward minus the value
            assert sample["advantages"][-1] == pytest.approx(t.total_reward - sample["values"][-1], abs=1e-5)
        metrics = read_metrics(stopped)["rl", step]
        assert 1 - rejected / tokens == pytest.approx(metrics["dis/accepted_fraction"])
        bins = {name: share for name, share in metrics.items() if name.startswith("dis/rho_bin_")}
        assert sum(bins.values()) == pytest.approx(1)
        expected = sum(0.95 < math.exp(d) <= 0.99 for d in differences) / tokens
        assert bins["dis/rho_bin_0.99"] == pytest.approx(expected, abs=1e-6)


def test_several_ranks_stop_together_with_code_3_and_write_the_samples_of_one(
    glm4_moe: Path, batches: Path, stopped: Path, tmp_path: Path
) -> None:
    config = stopping(glm4_moe, cp=2, world_size=2, nproc_per_node=2)
    (tmp_path / "config.yaml").write_text(dump_config(config))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    train = ["-m", "megatron_sao.cli", "train", str(tmp_path / "config.yaml")]
    arguments = ["--run-dir", str(tmp_path / "run"), "--batches", str(batches)]
    done = subprocess.run([sys.executable, *torchrun, *train, *arguments], capture_output=True, text=True, timeout=240)
    assert done.returncode == 1, done.stderr[-3000:]
    assert "(exitcode: 3) local_rank" in done.stderr, done.stderr[-3000:]
    assert "ERROR rank 0 rl-1: stopped by an alarm: 1 - dis/accepted_fraction" in done.stderr
    assert "ERROR rank 1 rl-1: stopped by an alarm" in done.stderr
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == "rl-2\n"
    one, two = read_samples(stopped), read_samples(tmp_path / "run")
    assert set(two) == {key for key in one if key[0] < 2}
    for key, sample in two.items():
        assert (sample["tokens"], sample["mask"]) == (one[key]["tokens"], one[key]["mask"])
        for name in ("rollout_logprobs", "logprobs", "advantages", "values", "rewards"):
            assert sample[name] == pytest.approx(one[key][name], abs=1e-4), (key, name)
