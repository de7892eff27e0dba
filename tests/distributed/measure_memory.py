"""Convert one model after the other, there and back, and print the memory that each took above the bare process.

python -m tests.distributed.measure_memory SHARD_BYTES MODEL...
"""

from __future__ import annotations

import gc
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_sao.config import ModelConfig, ParallelConfig
from megatron_sao.convert import hf_to_megatron, megatron_to_hf
from megatron_sao.trainer.runtime import start_runtime, stop_runtime


def resident(field: str) -> int:
    """Bytes: VmRSS, what there is now, or VmHWM, the most there has been."""
    return 1024 * int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def peak(work: Callable[..., None], *args: Any) -> int:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    work(*args)
    return resident("VmHWM")


def main(shard_bytes: int, models: list[Path]) -> None:
    start_runtime(ModelConfig(path=models[0]), ParallelConfig(), seed=0, deterministic=True)
    bare = resident("VmRSS")
    results = []
    for model in models:
        megatron, back = model.with_name(f"{model.name}-megatron"), model.with_name(f"{model.name}-back")
        there = peak(hf_to_megatron.convert, model, megatron, ParallelConfig(), shard_bytes)
        results.append([there - bare, peak(megatron_to_hf.convert, megatron, back, None, "source", shard_bytes) - bare])
    stop_runtime()
    print(json.dumps(results))


if __name__ == "__main__":
    main(int(sys.argv[1]), [Path(argument) for argument in sys.argv[2:]])
