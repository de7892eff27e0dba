"""Convert a Megatron checkpoint back into a Hugging Face model directory for `transformers` and SGLang.

    python tools/convert_megatron_to_hf.py --megatron models/glm-4.5-air-megatron --out models/back
    python tools/convert_megatron_to_hf.py --megatron runs/air/checkpoints/rl-100 --hf models/glm-4.5-air \\
        --out models/trained

The second exports the policy of a training run; --hf is the model.path it was started from. --dtype source (the
default) gives every tensor the dtype it had there, FP8 included. Under torchrun or srun (RANK set) each rank writes its
share of the files, and so do the ranks that --ranks starts. Memory: a few times the largest tensor, per rank. Killed,
the same command goes on. Exit code 2 with a sentence on failure, and nothing is left under OUT's name.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # bytes are moved, nothing is computed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from megatron_sao.config import ParallelConfig
from megatron_sao.convert.megatron_to_hf import convert
from megatron_sao.convert.options import add_options, tool_parser
from megatron_sao.convert.ranks import run_tool
from megatron_sao.models.backend import Backend


def main(arguments: list[str] | None = None) -> int:
    parser = tool_parser(__doc__)
    add_options(parser, "--megatron", "--out", optional=("--hf", "--shard-size"))
    parser.add_argument("--dtype", choices=["source", "bfloat16", "float32", "fp8"], default="source")
    parser.add_argument("--ranks", type=int, default=1, help="processes that share the files (default 1)")
    options = parser.parse_args(arguments)
    ranks = int(os.environ.get("WORLD_SIZE", options.ranks))

    def work(_parallel: ParallelConfig, _backend: Backend) -> int:
        convert(options.megatron, options.out, options.hf, options.dtype, options.shard_size)
        return 0

    return run_tool(lambda: ParallelConfig(world_size=ranks, nproc_per_node=ranks), options.megatron, work)


if __name__ == "__main__":
    sys.exit(main())
