"""Memory and time of log-probabilities from hidden states, forward and backward, beside two alternatives.

``.venv/bin/python -m tools.bench.logprobs [--tokens 8192] [--vocab 154880] [--hidden 1024]``

``linear_logprobs`` is this project's; ``unchunked`` is a linear layer and log_softmax; ``torch`` is
torch.nn.functional.linear_cross_entropy with its chunked options, which gives no entropy and knows no vocabulary that
is split over ranks. Memory is the peak of the process above inputs, head weight and head gradient, at the size given
(``unchunked`` would need 3 times the logits there and is left out); time is taken at a vocabulary of 32,768, where all
three fit, as the best of the repeats. Each figure comes from a process of its own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_sao.config import ModelConfig, ParallelConfig
from megatron_sao.trainer.logprobs import linear_logprobs
from megatron_sao.trainer.runtime import start_runtime, stop_runtime

TIMED_VOCAB, TIMED_TOKENS = 32_768, 2048
REPEATS = 3

Method = Callable[[Tensor, Tensor, Tensor], Tensor]


def chunked(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return linear_logprobs(hidden, weight, labels, temperature=1.0, vocab_size=len(weight))[0]


def unchunked(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return (hidden @ weight.T).log_softmax(-1).gather(1, labels[:, None])[:, 0]


def torch_chunked(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions()
    return -F.linear_cross_entropy(hidden, weight, labels, reduction="sum", options=options)


METHODS: dict[str, Method] = {"linear_logprobs": chunked, "unchunked": unchunked, "torch": torch_chunked}


def measure(method: str, tokens: int, vocab: int, hidden_size: int, repeats: int) -> tuple[float, float]:
    """Best seconds, and peak bytes above what stood before the first call; forward and backward, in this process."""
    start_runtime(ModelConfig(path="unused"), ParallelConfig(), seed=0, deterministic=True)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, generator=generator).requires_grad_()
    weight = (torch.randn(vocab, hidden_size, generator=generator) / hidden_size**0.5).requires_grad_()
    labels = torch.randint(vocab, (tokens,), generator=generator)
    METHODS[method](hidden[:1], weight, labels[:1]).sum().backward()  # allocates the gradients
    before = reset_peak()
    seconds = float("inf")
    for _ in range(repeats):
        hidden.grad = weight.grad = None
        started = time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()
        METHODS[method](hidden, weight, labels).sum().backward()
        seconds = min(seconds, (time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()) - started)
    peak = memory("VmHWM") - before
    stop_runtime()
    return seconds, peak


def memory(field: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at its peak since :func:`reset_peak`."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def reset_peak() -> int:
    """Forget the peak. Returns the present size."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def in_a_process(method: str, tokens: int, vocab: int, hidden_size: int, repeats: int) -> tuple[float, float]:
    command = [sys.executable, "-m", "tools.bench.logprobs", "--measure", method, str(repeats)]
    sizes = ["--tokens", str(tokens), "--vocab", str(vocab), "--hidden", str(hidden_size)]
    seconds, peak = subprocess.run([*command, *sizes], check=True, capture_output=True, text=True).stdout.split()[-2:]
    return float(seconds), float(peak)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=154_880)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        method, repeats = options.measure
        print(*measure(method, options.tokens, options.vocab, options.hidden, int(repeats)))
        return
    logits = options.tokens * options.vocab * 4
    print(f"memory at {options.tokens} x {options.vocab} x {options.hidden} (the logits alone: {logits / 1e9:.2f} GB)")
    for method in ("linear_logprobs", "torch"):
        seconds, peak = in_a_process(method, options.tokens, options.vocab, options.hidden, repeats=1)
        print(f"  {method:16} {peak / 1e9:6.2f} GB   {seconds:6.1f} s")
    print(f"time at {TIMED_TOKENS} x {TIMED_VOCAB} x {options.hidden}")
    times = {name: in_a_process(name, TIMED_TOKENS, TIMED_VOCAB, options.hidden, REPEATS)[0] for name in METHODS}
    for name, seconds in times.items():
        print(f"  {name:16} {seconds:6.2f} s   {seconds / times['unchunked']:5.2f} x unchunked")


if __name__ == "__main__":
    main()
