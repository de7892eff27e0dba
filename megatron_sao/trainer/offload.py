"""Weights that wait in host memory while another model has the GPU."""

from __future__ import annotations

from collections.abc import Iterable

import torch

_PIECE = 2**28  # bytes; page-locked memory is given out in powers of two, so that all but the last piece are exact


class HostCopy:
    """Room in host memory for a model's parameters, to which they can leave and from which they return.

    What leaves are the storages: every tensor on them stays what it was, the distributed optimizer's shards of the
    weights too, but must not be read meanwhile. Megatron's own ``offload_to_cpu`` does so with the buffers of the
    distributed optimizer; this holds the frozen parameters as well, which lie in none.

    Args:
        parameters: on one device.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        found = {p.untyped_storage()._cdata: p.untyped_storage() for p in parameters}  # many share one
        self._storages = [*found.values()]
        self._sizes = [storage.nbytes() for storage in self._storages]
        self._on_gpu = self._storages[0].device.type == "cuda"
        self._memory: list[torch.Tensor] = []  # made when it is first needed, not beside a checkpoint being read
        self.away = False

    @property
    def nbytes(self) -> int:
        return sum(self._sizes)

    def leave(self) -> None:
        """Move the weights to the host."""
        if not self._memory:
            self._memory = [
                torch.empty(min(_PIECE, self.nbytes - start), dtype=torch.uint8, pin_memory=self._on_gpu)
                for start in range(0, self.nbytes, _PIECE)
            ]
        for weights, host in self._pairs():
            host.copy_(weights, non_blocking=True)
        self._synchronize()
        for storage in self._storages:
            storage.resize_(0)
        self.away = True
        if self._on_gpu:
            torch.cuda.empty_cache()  # the other model's pieces have other sizes

    def come_back(self) -> None:
        """Move them back, if they are away."""
        if not self.away:
            return
        for storage, size in zip(self._storages, self._sizes, strict=True):
            storage.resize_(size)
        for weights, host in self._pairs():
            weights.copy_(host, non_blocking=True)
        self._synchronize()
        self.away = False

    def _pairs(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Bytes of a storage, and where they are on the host: one storage after the other, across pieces."""
        at = 0
        for storage, size in zip(self._storages, self._sizes, strict=True):
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            done = 0
            while done < size:
                piece, start = divmod(at + done, _PIECE)
                count = min(size - done, _PIECE - start)
                yield whole[done : done + count], self._memory[piece][start : start + count]
                done += count
            at += size

    def _synchronize(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()  # other streams read the weights, and freed memory is another's at once
