"""Nanoseconds per token of batched_skip_observation_gae on one core, beside two references from the same run.

``.venv/bin/python -m tools.bench.gae [--trajectories 128] [--tokens 131072] [--repeats 5]``

References: the recursion token by token in Python on torch scalars (measured on a sample), and a stream copy of
the arrays the function reads and writes, which is as fast as memory allows. Each figure is the best of the repeats.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from megatron_sao.algorithm import batched_skip_observation_gae

SAMPLE = 4096  # tokens of the per-token loop, which is linear in them
GAMMA = 1.0


def make_batch(trajectories: int, tokens: int, mean_turn: int, generator: torch.Generator) -> dict[str, Tensor]:
    """B trajectories of L tokens, float64, in turns of random lengths: action and observation by turns, half each."""
    total = trajectories * tokens
    lengths = torch.randint(1, 2 * mean_turn, (total // mean_turn + 4 * mean_turn,), generator=generator)
    lengths[-1] += total  # covers the tail whatever was drawn
    loss_mask = (torch.arange(lengths.numel()) % 2 == 1).repeat_interleave(lengths)[:total]
    return {
        "rewards": torch.randn(total, dtype=torch.float64, generator=generator),
        "values": torch.randn(total, dtype=torch.float64, generator=generator),
        "loss_mask": loss_mask,
        "cu_seqlens": torch.arange(trajectories + 1) * tokens,
        "lam": torch.full((trajectories,), 1 - 1 / (1.5 * tokens / 2), dtype=torch.float64),
        "bootstrap_values": torch.zeros(trajectories, dtype=torch.float64),
    }


def per_token_loop(rewards: Tensor, values: Tensor, loss_mask: Tensor, lam: float) -> tuple[Tensor, Tensor]:
    """The recursion as printed, one trajectory, token by token."""
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    advantage = target = next_value = torch.zeros((), dtype=values.dtype)
    for i in reversed(range(values.numel())):
        if loss_mask[i]:
            advantage = rewards[i] + GAMMA * next_value - values[i] + GAMMA * lam * advantage
            target = rewards[i] + GAMMA * target
            next_value = values[i]
            advantages[i], returns[i] = advantage, target
    return advantages, returns


def best_seconds(call: Callable[[], object], repeats: int) -> float:
    def once() -> float:
        started = time.thread_time()  # of this core: a busy machine's waits are not ours
        call()
        return time.thread_time() - started

    return min(once() for _ in range(repeats))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=131_072, help="per trajectory")
    parser.add_argument("--mean-turn", type=int, default=256, help="mean tokens of a turn, action or observation")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)

    batch = make_batch(args.trajectories, args.tokens, args.mean_turn, torch.Generator().manual_seed(0))
    total = batch["values"].numel()
    sample = [batch[name][:SAMPLE] for name in ("rewards", "values", "loss_mask")]
    outputs = torch.ones_like(batch["rewards"]), torch.ones_like(batch["values"])  # ones: pages already there

    def stream_copy() -> None:
        outputs[0].copy_(batch["rewards"])
        outputs[1].copy_(batch["values"])
        batch["loss_mask"].any()

    seconds = {
        "batched_skip_observation_gae": best_seconds(
            lambda: batched_skip_observation_gae(gamma=GAMMA, **batch), args.repeats
        )
        / total,
        "per-token Python loop": best_seconds(lambda: per_token_loop(*sample, float(batch["lam"][0])), 1)
        / sample[0].numel(),
        "stream copy": best_seconds(stream_copy, args.repeats) / total,
    }
    actions = float(batch["loss_mask"].float().mean())
    print(f"{args.trajectories} trajectories x {args.tokens:,} tokens, {actions:.1%} actions, float64, one thread")
    ours = seconds["batched_skip_observation_gae"]
    for name, value in seconds.items():
        print(f"{name:30} {value * 1e9:10.2f} ns/token {value / ours:10.2f} x ours")


if __name__ == "__main__":
    main()
