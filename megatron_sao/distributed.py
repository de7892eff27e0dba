"""Small values between trainer ranks. As JSON, because pickle must not cross a network."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

_AT_ONCE = 1024  # bytes of a value that go with its size; most values have fewer


def broadcast_json(value: Any, device: torch.device, source: int = 0) -> Any:
    """``value`` of rank ``source`` on every rank; the others' argument is ignored. Collective."""
    if dist.get_world_size() == 1:
        return value
    data = _encode(value if dist.get_rank() == source else None, device)
    size = torch.tensor([data.numel()], device=device)
    dist.broadcast(size, source)
    if dist.get_rank() != source:
        data = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(data, source)
    return _decode(data)


def all_gather_json(value: Any, device: torch.device) -> list[Any]:
    """``value`` of every rank, in rank order, on all ranks. Collective."""
    if dist.get_world_size() == 1:
        return [value]
    data = _encode(value, device)
    size = torch.tensor([data.numel()], device=device).view(torch.uint8)
    first = _all_gather(torch.cat([size, data[:_AT_ONCE]]), len(size) + _AT_ONCE)
    sizes = [int(row[: len(size)].view(torch.int64)) for row in first]
    heads = [row[len(size) :] for row in first]
    if max(sizes) > _AT_ONCE:
        rest = _all_gather(data[_AT_ONCE:], max(sizes) - _AT_ONCE)
        heads = [torch.cat(parts) for parts in zip(heads, rest, strict=True)]
    return [_decode(row[:size]) for row, size in zip(heads, sizes, strict=True)]


def _all_gather(data: torch.Tensor, size: int) -> list[torch.Tensor]:
    """``data`` of every rank, each padded to ``size`` bytes."""
    padded = torch.zeros(size, dtype=torch.uint8, device=data.device)
    padded[: len(data)] = data
    rows = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, padded)
    return rows


def _encode(value: Any, device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)


def _decode(data: torch.Tensor) -> Any:
    return json.loads(bytes(data.cpu().numpy()))
