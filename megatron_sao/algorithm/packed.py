"""The one layout all of the maths uses: packed 1-D tensors, one entry per token."""

from __future__ import annotations

from torch import Tensor


def check_packed(**tensors: Tensor) -> None:
    """Refuse tensors that are not 1-D and of one length: broadcasting would silently give a wrong loss.

    Raises:
        ValueError: names the tensor and its shape.
    """
    first, *others = tensors
    expected = tensors[first].shape
    if len(expected) != 1:
        raise ValueError(f"{first} has shape {tuple(expected)}; pass a packed 1-D tensor, one entry per token")
    for name in others:
        if tensors[name].shape != expected:
            raise ValueError(
                f"{name} has shape {tuple(tensors[name].shape)} and {first} {tuple(expected)}; "
                "pass packed 1-D tensors of one length"
            )
