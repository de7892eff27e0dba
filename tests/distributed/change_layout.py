"""Many layouts in one process, one after another: to start a process takes longer than most of their steps."""

from __future__ import annotations

import gc

from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.common.embeddings import RotaryEmbedding, YarnRotaryEmbedding

from megatron_sao.config import ParallelConfig
from megatron_sao.trainer.runtime import set_layout


def change_layout(parallel: ParallelConfig, seed: int = 0) -> None:
    """:func:`set_layout`, once every model of the layout before is gone, which would keep its groups. What keeps a
    model: the caches of its embedding's methods, and the hooks on its gradients, which the garbage collector cannot see
    where a tensor that autograd has made leads to them."""
    for embedding in (RotaryEmbedding, YarnRotaryEmbedding):
        embedding.forward.cache_clear()
    for thing in gc.get_objects():
        if issubclass(type(thing), DistributedDataParallel):
            vars(thing).clear()
    gc.collect()
    set_layout(parallel, seed)
