"""A run directory as a run leaves it, written by hand: config, metrics, samples, logs, checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel

from megatron_sao.config import RunConfig, dump_config
from tests.trajectories import make_config

WORDS = ["<pad>", "two", "plus", "three", " is", "\n", " five"]
HOSTILE = "</script><script>document.title='owned'</script>"  # the text of token 7
NOW = 1.7e9


def write_run(run_dir: Path) -> RunConfig:
    """Three SFT and four RL steps, of which step 2 was repeated after a resume, and two evaluations."""
    run_dir.mkdir(parents=True)
    tokenizer = Tokenizer(WordLevel({word: n for n, word in enumerate([*WORDS, HOSTILE])}, unk_token="<pad>"))
    tokenizer.decoder = Fuse()
    model = run_dir.parent / "model"
    model.mkdir()
    tokenizer.save(str(model / "tokenizer.json"))
    config = make_config(model, rl={"steps": 8, "batch_size": 2, "max_staleness": 1}, sft={"steps": 3})
    (run_dir / "config.yaml").write_text(dump_config(config))
    write_lines(run_dir / "metrics.jsonl", [*_sft(), *_rl()])
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"time": 1, "stage": "rl", "st')  # what a killed trainer leaves
    write_lines(run_dir / "samples.jsonl", [_sample(0, "first", 0.0), _sample(2, "second", 1.0)])
    (run_dir / "logs").mkdir()
    (run_dir / "logs" / "trainer.log").write_text(
        "2026-01-02 03:04:05,678 INFO rank 0 rl-1: train/kl=0.1\n"
        "2026-01-02 03:04:06,678 WARNING rank 0 rl-1: ALARM: train/entropy = 0.01, below alarms.entropy_below.limit\n"
    )
    for name in ("rl-2", "sft-2", "rl-10"):
        (run_dir / "checkpoints" / name).mkdir(parents=True)
        (run_dir / "checkpoints" / name / "meta.json").write_text("{}")
    (run_dir / "checkpoints" / "latest").write_text("rl-10\n")
    return config


def write_lines(path: Path, records: list[dict]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def _sft() -> list[dict]:
    return [
        {"time": NOW, "stage": "sft", "step": n, "train/sft_loss": 2.0 / (n + 1), "time/policy": 1.0, "time/step": 1.0}
        for n in range(3)
    ]


def _rl() -> list[dict]:
    steps = [_step(n, success) for n, success in ((0, 0.25), (1, 0.5), (2, 0.99), (2, 0.625), (3, 0.75))]
    evaluations = [
        {
            "time": NOW,
            "stage": "rl",
            "step": n,
            "eval/success_rate": rate,
            "eval/prompts": 8,
            "time/step": 9.0,
            "idle_fraction": 0.0,
        }
        for n, rate in ((0, 0.25), (4, 0.875))
    ]
    return [evaluations[0], *steps, evaluations[1]]


def _step(step: int, success: float) -> dict:
    return {
        "time": NOW + 10 * step, "stage": "rl", "step": step, "train/success_rate": success, "train/entropy": 0.5,
        "dis/accepted_fraction": 0.75, "dis/below_fraction": 0.25, "dis/rho_bin_0.7": 0.25, "dis/rho_bin_1.01": 0.75,
        "dis/rho_max": float("nan"), "staleness/max": 1, "staleness/count_0": 1.0, "time/wait": 6.0, "time/policy": 2.0,
        "time/step": 8.0, "idle_fraction": 0.75, "env/calls": 3.0, "tokens_per_second": 123.0,
    }  # fmt: skip


def _sample(step: int, task: str, success: float) -> dict:
    return {
        "time": NOW, "step": step, "id": f"id-{task}", "task_id": task, "reward": success, "success": success,
        "truncated": False, "num_tokens": 7, "tokens": [1, 2, 3, 4, 5, 6, 7], "mask": [0, 0, 0, 1, 0, 1, 1],
        "versions": [["1.0", 0, 7]], "rollout_logprobs": [-0.5, -0.25, None], "logprobs": [-0.5, -2.5, -0.1],
        "advantages": [0.5, -1.0, 0.25], "values": [0.1, 0.2, 0.3], "rewards": [0.0, 0.0, success],
    }  # fmt: skip
