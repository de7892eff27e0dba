"""docs/your-task.md, followed to the letter: its files load, its environment plays, its reward pays."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_sao.config import RunConfig, load_config
from megatron_sao.data.tasks import load_tasks
from megatron_sao.rollout.client import Generation, ModelLimits
from megatron_sao.rollout.sglang_backend import sglang_command
from megatron_sao.rollout.worker import Player

DOCUMENT = Path(__file__).parents[2] / "docs" / "your-task.md"


class Characters:
    """A tokenizer with one token per character."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(map(chr, token_ids))


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.chdir(tmp_path)
    for name, content in re.findall(r"```\w+ (\S+)\n(.*?)```", DOCUMENT.read_text(), re.DOTALL):
        (tmp_path / name).write_text(content)
    return load_config("my_task.yaml", ["model.device=cpu"])


@pytest.mark.parametrize(
    ("says", "reward"), [(["Paris"], 1.0), (["Lyon", "Oh, Paris"], 0.5), (["Lyon", "Nantes"], 0.0)]
)
def test_the_documented_environment_and_reward_play_an_episode(
    config: RunConfig, says: list[str], reward: float
) -> None:
    (task,) = load_tasks(config.data.train)
    script = list(says)

    async def generate(input_ids, sampling, max_new_tokens, stop_token_ids=(), prefer=None) -> Generation:
        ids = [ord(character) for character in script.pop(0)]
        return Generation(ids, [-0.5] * len(ids), [("1.0", 0, len(ids))], "stop", "e1")

    engine = SimpleNamespace(limits=ModelLimits(vocab_size=128, context=500), generate=generate)
    trajectory = asyncio.run(Player(config, engine, Characters()).play(task, "train", 0, 1))
    assert trajectory.failure is None and trajectory.total_reward == reward
    assert [kind for kind, _, _ in trajectory.turns].count("action") == len(says)


def test_the_documented_sglang_flags_reach_the_command_line(config: RunConfig) -> None:
    argv, _ = sglang_command(config, 30000, Path("model"), "1.0")
    for flag, value in (("--mem-fraction-static", "0.8"), ("--schedule-policy", "lpm")):
        assert argv[argv.index(flag) + 1] == value


def test_it_takes_about_thirty_lines() -> None:
    assert len(DOCUMENT.read_text().splitlines()) <= 40
