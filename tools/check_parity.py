"""Compare a Megatron checkpoint with `transformers`: the logits of both on the same tokens, in float32.

    python tools/check_parity.py --hf models/glm-4.5-air --megatron models/glm-4.5-air-megatron --tp 2
    python tools/check_parity.py --hf models/smollm2 --megatron models/smollm2-megatron --prompts prompts.txt --json

The first takes random tokens. The second has `transformers` continue each line of the file greedily and asks whether
Megatron would have written the same. --megatron is a converted directory or a checkpoint of a training run, read under
the layout given; as many ranks are started as that takes, unless torchrun or srun has (RANK set). Exit code 0: the
logits differ by --tolerance of the largest logit at most, and all texts are equal; 1: they do not;
2: with a sentence, where they cannot be compared.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from megatron_sao.config import ConfigError, ParallelConfig
from megatron_sao.convert.options import add_layout, add_options, layout_of, tool_parser
from megatron_sao.convert.parity import Parity, compare
from megatron_sao.convert.ranks import run_tool
from megatron_sao.models.backend import Backend
from megatron_sao.models.hf import read_hf_model
from megatron_sao.trainer.checkpoint import policy_checkpoint


def report(parity: Parity, tolerance: float) -> str:
    text = (
        f"{parity.tokens} tokens: logits differ by at most {parity.max_difference:.2e}, on average by "
        f"{parity.mean_difference:.2e}; the largest logit is {parity.largest_logit:.3g}, so relatively by "
        f"{parity.relative_difference:.2e} (tolerance {tolerance:g}); the most likely token is the same at "
        f"{parity.top1_agreement:.2%} of positions"
    )
    return text + (f"; {parity.equal_texts} of {parity.texts} greedy texts are equal" if parity.texts else "")


def main(arguments: list[str] | None = None) -> int:
    parser = tool_parser(__doc__)
    add_options(parser, "--hf", "--megatron")
    add_layout(parser)
    parser.add_argument("--sequences", type=int, default=4, help="of random tokens (default 4)")
    parser.add_argument("--length", type=int, default=64, help="of the longest of them (default 64)")
    parser.add_argument("--prompts", type=Path, help="text file, a prompt per line, instead of random tokens")
    parser.add_argument("--new-tokens", type=int, default=16, help="to continue each prompt by (default 16)")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="relative to the largest logit (default 1e-4)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)

    def work(parallel: ParallelConfig, backend: Backend) -> int:
        policy_checkpoint(options.megatron, read_hf_model(options.hf).raw, backend.device)
        prompts = None
        if options.prompts is not None:
            prompts = _lines(options.prompts), options.new_tokens
        random = options.sequences, options.length
        parity = compare(options.hf, options.megatron, parallel, backend.device, random, prompts)
        if parity is None:
            return 0  # rank 0 tells
        print(json.dumps(parity.as_dict(options.tolerance)) if options.json else report(parity, options.tolerance))
        return 0 if parity.passes(options.tolerance) else 1

    return run_tool(lambda: layout_of(options), options.hf, work)


def _lines(path: Path) -> list[str]:
    try:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {path} cannot be read: {error}") from error
    if not lines:
        raise ConfigError(f"--prompts {path} holds no prompt; write one per line")
    return lines


if __name__ == "__main__":
    sys.exit(main())
