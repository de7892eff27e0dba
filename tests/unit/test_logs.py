"""What a log line looks like, and what is never in one."""

import logging
import re

from megatron_sao import logs


def line(message: str, monkeypatch, position: str = "", **extra) -> str:
    monkeypatch.setattr(logs, "_position", position)
    record = logging.LogRecord("x", logging.WARNING, "file.py", 1, message, (), None)
    record.__dict__.update(extra)
    return logs.LineFormatter("rank 3").format(record)


def test_a_line_has_time_level_rank_and_step(monkeypatch):
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} WARNING rank 3: hello", line("hello", monkeypatch))
    monkeypatch.setattr(logs, "_position", "")
    logs.at_step("rl", 12)
    assert line("hello", monkeypatch, logs._position).endswith("WARNING rank 3 rl-12: hello")


def test_an_event_is_one_line_also_with_line_breaks_and_a_traceback(monkeypatch):
    try:
        raise ValueError("first\nsecond")
    except ValueError as error:
        text = line("a\nb", monkeypatch, exc_info=(type(error), error, error.__traceback__))
    assert "\n" not in text
    assert r"a\nb" in text and r"ValueError: first\nsecond" in text and "test_logs.py" in text


def test_the_runs_token_and_the_wandb_key_are_never_written(monkeypatch):
    monkeypatch.setenv("MEGATRON_SAO_TOKEN", "tok-123")
    monkeypatch.setenv("WANDB_API_KEY", "key-456")
    text = line("Bearer tok-123, key-456 and tok-123", monkeypatch)
    assert text.endswith("Bearer <MEGATRON_SAO_TOKEN>, <WANDB_API_KEY> and <MEGATRON_SAO_TOKEN>")


def test_what_is_said_again_and_again_is_logged_seldom():
    records = []
    log = logging.Logger("disk")
    log.addHandler(handler := logging.Handler())
    handler.emit = records.append
    log.addFilter(logs.Seldom(10.0))
    for second in range(31):
        record = log.makeRecord("disk", logging.ERROR, "file.py", 1, f"full at {second}", (), None)
        record.created = 1_800_000_000.0 + second
        log.handle(record)
    assert [record.getMessage() for record in records] == [f"full at {second}" for second in (0, 10, 20, 30)]
