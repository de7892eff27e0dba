"""The command-line options that the tools for weights have in common."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron_sao.config import ConfigError, ParallelConfig


def byte_size(text: str) -> int:
    """``5GB``, ``300MB`` or a plain number → bytes, as an argparse type."""
    number, factor = text, 1
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if text.upper().endswith(unit):
            number, factor = text[:-2], size
    if not number.isdigit() or int(number) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write e.g. 5GB or 300MB")
    return int(number) * factor


_OPTIONS: dict[str, dict[str, Any]] = {
    "--hf": {"type": Path, "help": "Hugging Face model directory"},
    "--megatron": {"type": Path, "help": "converted directory, or checkpoint of a training run"},
    "--out": {"type": Path, "help": "directory to make; must not exist"},
    "--shard-size": {"type": byte_size, "default": "5GB", "help": "bytes of a file at most (default 5GB)"},
}


def tool_parser(doc: str) -> argparse.ArgumentParser:
    """A parser whose help is the tool's docstring, as it is written."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_options(parser: argparse.ArgumentParser, *required: str, optional: tuple[str, ...] = ()) -> None:
    """Those of the options above that a tool has."""
    for name in (*required, *optional):
        parser.add_argument(name, required=name in required, **_OPTIONS[name])


def add_layout(parser: argparse.ArgumentParser) -> None:
    """The options that :func:`layout_of` reads."""
    for size, meaning in (("tp", "tensor"), ("pp", "pipeline"), ("ep", "expert"), ("etp", "expert-tensor")):
        parser.add_argument(f"--{size}", type=int, default=1, help=f"{meaning}-parallel size (default 1)")
    for stage in ("first", "last"):
        parser.add_argument(f"--pp-{stage}-layers", type=int, help=f"layers of the {stage} pipeline stage, if uneven")


def layout_of(options: argparse.Namespace) -> ParallelConfig:
    """The layout on as few ranks as it takes. Raises ConfigError where it is none."""
    world = options.pp * math.lcm(options.tp, options.ep * options.etp)
    fields = {name: getattr(options, name) for name in ("tp", "pp", "ep", "etp", "pp_first_layers", "pp_last_layers")}
    try:
        return ParallelConfig(**fields, world_size=world, nproc_per_node=world, sequence_parallel=options.tp > 1)
    except ValidationError as error:
        raise ConfigError("; ".join(problem["msg"] for problem in error.errors())) from error
