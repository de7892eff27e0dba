"""The command line: its help, and its refusals."""

from __future__ import annotations

import pytest

from megatron_sao.cli import COMMANDS, EXAMPLES, RUN_COMMANDS, _parser
from megatron_sao.cli import main as cli


def test_every_commands_help_shows_an_example_that_it_takes(capsys):
    assert list(EXAMPLES) == [*COMMANDS, *RUN_COMMANDS]
    for name, example in EXAMPLES.items():
        with pytest.raises(SystemExit, match="0"):
            cli([name, "--help"])
        assert f"example: {example}\n" in capsys.readouterr().out
        assert _parser().parse_args(example.split()[1:]).command == name


@pytest.mark.parametrize(
    "line",
    ["status runs/x --watch 0", "slurm c.yaml --chain 0", "plan c.yaml --gpus -1", "eval c.yaml --prompts 0"],
)
def test_a_number_that_is_too_small_is_refused(line, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli(line.split())
    assert "is too small: give" in capsys.readouterr().err


def test_a_dry_run_shows_the_job_of_a_model_that_is_not_there_and_then_says_so(capsys):
    config = "model_configs/qwen3_8b.yaml"
    assert cli(["slurm", config, "--nodes=1", "--gpus-per-node=8", "--set", "model.path=/nowhere", "--dry-run"]) == 2
    shown = capsys.readouterr()
    assert "1 × trainer, engines, buffer and workers, 8 GPUs each\nsbatch --parsable" in shown.out
    assert "model.path = /nowhere is not a directory" in shown.err
