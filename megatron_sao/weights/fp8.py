"""Block-quantised FP8 as DeepSeek-V3 and GLM-5 are published in: e4m3 weights, one float32 scale per block.

The scale of ``NAME.weight`` is ``NAME.weight_scale_inv``, ``[ceil(rows / block), ceil(columns / block)]``; a weight is
its codes times the scale of their block. Blocks at the lower and right edge may be smaller.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch

FP8 = torch.float8_e4m3fn
SCALE_SUFFIX = "_scale_inv"
QUANTIZATION_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
_LARGEST = torch.finfo(FP8).max  # 448
# The linear layers that engines run in FP8. Routers, embeddings and heads stay, and so do what an indexer weighs its
# heads with and the projection that joins a multi-token-prediction layer to the decoder.
_QUANTISABLE = re.compile(r"\.layers\.\d+\..*(_proj|_proj_with_mqa|\.wq_b|\.wk)\.weight$")
_KEPT = re.compile(r"\.(weights_proj|eh_proj)\.weight$")


class FP8Error(ValueError):
    """FP8 values without meaning; the message says which block."""


def is_quantisable(name: str) -> bool:
    """Whether a tensor of this HF name is stored in FP8 by checkpoints that are."""
    return bool(_QUANTISABLE.search(name)) and not _KEPT.search(name)


def unquantised_modules(names: Iterable[str]) -> list[str]:
    """Linear layers that a loader would take for quantised ones unless ``modules_to_not_convert`` names them."""
    return sorted(name.removesuffix(".weight") for name in names if _KEPT.search(name))


def scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    """Of the scales that belong to a weight ``[rows, columns]``."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def dequantise(codes: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """e4m3 ``[n, m]`` and its scales → bfloat16 ``[n, m]``, one row of blocks at a time.

    A code of zero is zero whatever its scale: some quantisers divide by the maximum of an all-zero block.

    Raises:
        FP8Error: a product is not finite.
    """
    weight = torch.empty(codes.shape, dtype=torch.bfloat16)
    for index, start in enumerate(range(0, len(codes), block[0])):
        rows = codes[start : start + block[0]].float()
        scales = scale[index].float().repeat_interleave(block[1])[: codes.shape[1]]
        values = torch.where(rows == 0, 0.0, rows * scales)
        if not values.isfinite().all():
            raise FP8Error(f"the block row {index} (rows {start} and on) holds NaN, or a scale of it is not finite")
        weight[start : start + block[0]] = values
    return weight


def quantise(
    weight: torch.Tensor, block: tuple[int, int], power_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[n, m]`` → e4m3 codes ``[n, m]`` and float32 scales, each the largest magnitude of its block over 448.

    An all-zero block has the scale 1.

    Args:
        power_of_two: round every scale up to a power of two (``scale_fmt: ue8m0``).
    """
    rows, columns = scale_shape(tuple(weight.shape), block)
    codes = torch.empty(weight.shape, dtype=FP8)
    scale = torch.empty(rows, columns)
    for index in range(rows):
        part = weight[index * block[0] : (index + 1) * block[0]].float()
        padded = torch.nn.functional.pad(part, (0, columns * block[1] - part.shape[1]))
        largest = padded.abs().unflatten(1, (columns, block[1])).amax((0, 2))
        scale[index] = torch.where(largest > 0, largest / _LARGEST, 1.0)
        if power_of_two:
            scale[index] = scale[index].log2().ceil().exp2()
        scaled = part / scale[index].repeat_interleave(block[1])[: part.shape[1]]
        codes[index * block[0] : (index + 1) * block[0]] = scaled.clamp(-_LARGEST, _LARGEST).to(FP8)
    return codes, scale
