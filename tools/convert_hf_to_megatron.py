"""Convert a Hugging Face model directory into a Megatron checkpoint.

    python tools/convert_hf_to_megatron.py --hf models/glm-4.5-air --out models/glm-4.5-air-megatron --tp 4 --ep 8

starts the ranks of that layout on this machine; under torchrun or srun (RANK set) it is one of them. A run starts from
the result under any layout (model.megatron_path). Memory: a few times the largest tensor, per rank. Killed, the same
command goes on. Exit code 2 with a sentence on failure: tensors missing, unexpected or mis-shaped are listed, and
nothing is left under OUT's name.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # bytes are moved, nothing is computed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from megatron_sao.config import ParallelConfig
from megatron_sao.convert.hf_to_megatron import convert
from megatron_sao.convert.options import add_layout, add_options, layout_of, tool_parser
from megatron_sao.convert.ranks import run_tool
from megatron_sao.models.backend import Backend


def main(arguments: list[str] | None = None) -> int:
    parser = tool_parser(__doc__)
    add_options(parser, "--hf", "--out", optional=("--shard-size",))
    add_layout(parser)
    options = parser.parse_args(arguments)

    def work(parallel: ParallelConfig, _backend: Backend) -> int:
        convert(options.hf, options.out, parallel, options.shard_size)
        return 0

    return run_tool(lambda: layout_of(options), options.hf, work)


if __name__ == "__main__":
    sys.exit(main())
