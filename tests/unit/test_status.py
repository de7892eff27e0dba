"""``megatron-sao status`` of a run that nobody serves any more."""

import fcntl
import threading

import pytest

from megatron_sao.cli import main as cli
from megatron_sao.config import ConfigError, load_config
from megatron_sao.launch import local
from megatron_sao.launch.local import exclusive
from tests.recorded_run import write_run


def test_the_status_of_a_stopped_run(tmp_path, capsys):
    write_run(tmp_path / "run")
    assert cli(["status", str(tmp_path / "run")]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line[0] != " ")
    assert "no buffer answers: stopped" in lines["state"] and "last event" in lines["state"]
    assert lines["step"] == "rl 4 of 8, 0:40 left at this pace"
    assert lines["rate"] == "10 s per step, tokens/s 123"
    assert lines["time"] == "wait 75%, policy 25%"
    assert lines["held-out"] == "0.250 at rl 0, 0.875 at rl 4"
    assert lines["checkpoints"] == "sft-2 rl-2 rl-10; resumes from rl-10"


def test_the_status_of_a_run_that_has_not_got_its_buffer_yet(tmp_path, capsys):
    write_run(tmp_path / "run")
    with exclusive(tmp_path / "run"):
        cli(["status", str(tmp_path / "run")])
    assert "no buffer answers: its launcher starts or ends it" in capsys.readouterr().out
    cli(["status", str(tmp_path / "run")])
    assert "no buffer answers: stopped" in capsys.readouterr().out


def test_errors_in_the_logs_are_shown_with_their_log_the_newest_last(tmp_path, capsys):
    write_run(tmp_path / "run")
    (tmp_path / "run" / "logs" / "worker-0.log").write_text("x INFO fine\nx ERROR worker-0: gives up\n")
    cli(["status", str(tmp_path / "run")])
    errors = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert "trainer.log: 2026-01-02 03:04:06,678 WARNING rank 0 rl-1: ALARM: train/entropy" in errors[0]
    assert errors[1] == "  worker-0.log: x ERROR worker-0: gives up"


def test_a_run_that_has_not_begun_has_a_status(tmp_path, capsys):
    write_run(tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").unlink()
    assert cli(["status", str(tmp_path / "run")]) == 0
    assert "no step is done yet" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "file", "content", "sentence"),
    [
        ("status", "metrics.jsonl", '{"event": 3}', "metrics.jsonl, line 1, is of another version of this program"),
        ("report", "metrics.jsonl", '{"stage": "grpo", "step": 3}', "metrics.jsonl, line 1, is of another version"),
        ("report", "samples.jsonl", "[1]", "samples.jsonl, line 1, is of another version"),
        ("report", "metrics.jsonl", "", "holds no metrics yet"),
        ("status", "buffer.json", "{}", "buffer.json names no buffer"),
        ("inspect", "buffer.json", "nothing", "buffer.json names no buffer"),
        ("inspect", "buffer/index.sqlite", "no database" * 100, "index.sqlite is damaged (file is not a database)"),
        ("status", "config.yaml", "name: [", "config.yaml is not valid YAML"),
    ],
)
def test_files_that_cannot_be_read_are_a_sentence_and_exit_code_2(command, file, content, sentence, tmp_path, capsys):
    write_run(tmp_path / "run")
    (tmp_path / "run" / "buffer").mkdir()
    (tmp_path / "run" / file).write_text(content + "\n")
    assert cli([command, str(tmp_path / "run")]) == 2
    assert sentence in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_a_sentence_and_exit_code_2(tmp_path, capsys):
    write_run(tmp_path / "run")
    assert cli(["report", str(tmp_path / "run"), "--out", str(tmp_path / "nowhere" / "x.html")]) == 2
    assert "x.html cannot be written: No such file or directory" in capsys.readouterr().err


def test_a_finished_run_is_called_complete_and_a_client_that_left_is_no_error(tmp_path, capsys):
    run = tmp_path / "run"
    write_run(run)
    (run / "hf").mkdir()
    (run / "hf" / "config.json").write_text("{}")
    (run / "checkpoints" / "latest").write_text(f"rl-{load_config(run / 'config.yaml').rl.steps}\n")
    (run / "logs" / "trainer.log").unlink()
    line = "[http_server] Error: Request is disconnected from the client side (type 1)"
    (run / "logs" / "sglang-0.log").write_text(line)
    assert cli(["status", str(run)]) == 0
    shown = capsys.readouterr().out
    assert f"complete, its policy is in {run / 'hf'}" in shown
    assert "none in the logs" in shown


def test_a_glance_at_the_lock_keeps_no_launcher_from_starting(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "_LOCK_SECONDS", 60.0)
    (tmp_path / "launcher.lock").touch()
    with (tmp_path / "launcher.lock").open() as glance:
        fcntl.flock(glance, fcntl.LOCK_SH)
        threading.Timer(0.2, fcntl.flock, (glance, fcntl.LOCK_UN)).start()
        with exclusive(tmp_path):
            monkeypatch.setattr(local, "_LOCK_SECONDS", 0.5)
            with pytest.raises(ConfigError, match="belongs to a run in progress"), exclusive(tmp_path):
                pass
