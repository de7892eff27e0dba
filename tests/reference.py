"""The reference vectors, and comparing tensors with them."""

from __future__ import annotations

import json
from pathlib import Path

import torch

VECTORS = json.loads((Path(__file__).parent / "data" / "sao.json").read_text())
EDGE = {case["name"]: case for case in VECTORS["edge"]}
f64 = torch.float64


def tensor(values: list, dtype: torch.dtype = f64) -> torch.Tensor:
    return torch.tensor([float(v) for v in values], dtype=dtype)


def close(actual: torch.Tensor, expected: list | torch.Tensor, tolerance: float = 1e-12) -> None:
    expected = expected if isinstance(expected, torch.Tensor) else tensor(expected)
    torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=tolerance, atol=tolerance)
