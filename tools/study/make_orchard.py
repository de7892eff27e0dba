"""Make the long task's model and data: `python tools/study/make_orchard.py [--out DIR] [--seed N]`.

As tools/make_tiny_model.py for the demo, and of the same architecture.
"""

from __future__ import annotations

import argparse
import random
import sys
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tools.make_tiny_model import make_directory, write_lines, write_model, write_tokenizer
from tools.study.orchard import ALPHABET, days, demonstration

CONTEXT = 256  # an episode has 180 tokens
DATA = {"train": 8192, "eval": 512, "sft": 8000, "noise": 0.5}


def write_data(directory: Path, seed: int) -> None:
    """train.jsonl, eval.jsonl and sft.jsonl with disjoint prompts."""
    rng = random.Random(seed)
    pool: dict[str, int] = {}
    for prompt, day in days(rng):
        pool.setdefault(prompt, day)
        if len(pool) == DATA["train"] + DATA["eval"] + DATA["sft"]:
            break
    rest = iter(pool.items())
    for name in ("eval", "train"):
        tasks = [{"prompt": prompt, "label": day} for prompt, day in islice(rest, DATA[name])]
        write_lines(directory / f"{name}.jsonl", tasks)
    traces = [{"prompt": prompt, "segments": demonstration(rng, day, DATA["noise"])} for prompt, day in rest]
    write_lines(directory / "sft.jsonl", traces)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/models/orchard"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)

    def write(directory: Path) -> None:
        write_model(directory, options.seed, ALPHABET, CONTEXT)
        write_tokenizer(directory, ALPHABET, CONTEXT)
        write_data(directory, options.seed)

    modules = (sys.modules[thing.__module__] for thing in (make_directory, demonstration))
    make_directory(options.out, [Path(__file__), *(Path(m.__file__) for m in modules)], options.seed, write)


if __name__ == "__main__":
    main()
