"""Which layers a pipeline stage holds, and whether it may."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from megatron_sao.config import ConfigError, ParallelConfig

if TYPE_CHECKING:
    from megatron_sao.models.hf import HFModel


def stage_sizes(num_layers: int, parallel: ParallelConfig) -> list[int]:
    """Layers of every (virtual) pipeline stage, in the order in which a token passes them.

    Raises:
        ConfigError: the layers cannot be divided so.
    """
    first, last = parallel.pp_first_layers, parallel.pp_last_layers
    given = [size for size in (first, last) if size is not None]
    ranks, rest = parallel.pp - len(given), num_layers - sum(given)
    middle = [rest // ranks] * ranks if ranks > 0 else []
    sizes = [*([first] if first else []), *middle, *([last] if last else [])]
    chunks = parallel.vpp or 1
    if sum(sizes) != num_layers or min(sizes) < 1 or any(size % chunks for size in sizes):
        raise ConfigError(
            f"{num_layers} layers cannot be divided over parallel.pp = {parallel.pp} ranks with pp_first_layers = "
            f"{first}, pp_last_layers = {last} and vpp = {parallel.vpp}: the ranks without a number must have equally "
            "many, and each a multiple of vpp; change one of these"
        )
    return [size // chunks for size in sizes] * chunks


def check_pipeline(model: HFModel, parallel: ParallelConfig) -> None:
    """Refuse a division of the layers that the model does not allow.

    Raises:
        ConfigError: unequal stages, or one that starts with a layer that shares the choice of an indexer before it.
    """
    num_layers, types = model.raw["num_hidden_layers"], model.indexer_types
    starts = [0, *accumulate(stage_sizes(num_layers, parallel))][:-1]
    wrong = [start + 1 for start in starts if types and types[start] == "shared"]
    if wrong:
        full = [layer + 1 for layer, kind in enumerate(types) if kind == "full"]
        raise ConfigError(
            f"parallel.pp = {parallel.pp}: pipeline stages would start on layers {wrong}, which take over what an "
            f"indexer of the stage before has chosen; stages may start on layers {full}. Set parallel.pp_first_layers "
            "and pp_last_layers, or change pp and vpp"
        )
