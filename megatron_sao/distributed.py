"""Small values between trainer ranks. As JSON, because pickle must not cross a network."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


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
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([data.numel()], device=device))
    padded = torch.zeros(int(max(sizes)), dtype=torch.uint8, device=device)
    padded[: data.numel()] = data
    rows = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(rows, padded)
    return [_decode(row[: int(size)]) for row, size in zip(rows, sizes, strict=True)]


def _encode(value: Any, device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)


def _decode(data: torch.Tensor) -> Any:
    return json.loads(bytes(data.cpu().numpy()))
