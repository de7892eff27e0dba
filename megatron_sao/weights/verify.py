"""What an engine must report as the checksums of its weights, computed from the tensors that were sent to it.

SGLang fuses HF tensors (q, k and v; gate and up; all experts of a layer), divides them over its tensor-parallel ranks,
pads the vocabulary, and reports for each result the first eight bytes of its SHA-256. The same is done here as the
tensors pass by, without keeping any of them.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from megatron_sao.config import ConfigError
from megatron_sao.models.hf import HFModel
from megatron_sao.weights.gather import Bucket

CHECKED_MODEL_TYPES = ("glm4_moe", "llama")  # those whose fused layout is written down here, and tested
_VOCABULARY_MULTIPLE = 64  # SGLang's
_WIDTH_MULTIPLE = 32  # of a rank's share, to which SGLang pads on a CPU
_LAYER = re.compile(r"model\.layers\.(\d+)\.")

Division = Literal["rows", "columns", "vocabulary", "none"]


@dataclass(frozen=True)
class Part:
    """An HF tensor's place in an engine's tensor: the ``index``-th of ``count`` parts, divided over ranks."""

    name: str
    index: int
    count: int
    division: Division


def engine_part(name: str, experts: int) -> Part:
    """Where SGLang puts the HF tensor ``name``; ``experts`` are the routed ones of a layer."""
    prefix, _, leaf = name.rpartition(".")
    module, _, last = prefix.rpartition(".")
    if last in ("q_proj", "k_proj", "v_proj"):
        return Part(f"{module}.qkv_proj.{leaf}", "qkv".index(last[0]), 3, "rows")
    if match := re.fullmatch(r"(.*\.experts)\.(\d+)", module):
        owner, expert = match[1], int(match[2])
        if last == "down_proj":
            return Part(f"{owner}.w2_weight", expert, experts, "columns")
        return Part(f"{owner}.w13_weight", 2 * expert + (last == "up_proj"), 2 * experts, "rows")
    if last in ("gate_proj", "up_proj"):
        return Part(f"{module}.gate_up_proj.{leaf}", int(last == "up_proj"), 2, "rows")
    if last in ("o_proj", "down_proj"):
        return Part(name, 0, 1, "columns")
    return Part(name, 0, 1, "vocabulary" if last in ("embed_tokens", "lm_head") else "none")


def _check_unpadded(model: HFModel, tp: int) -> None:
    widths = dict.fromkeys(("intermediate_size", "moe_intermediate_size"), _WIDTH_MULTIPLE * tp)
    heads = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), tp)
    for name, multiple in (widths | heads).items():
        if (size := model.raw.get(name) or 0) % multiple:
            raise ConfigError(
                f"weights.verify_every: for {tp} ranks SGLang pads {name} = {size} to a multiple of {multiple}, and "
                "the checksums of padded tensors are not computed here; set it to 0, or choose another engine.tp"
            )


@dataclass
class _Fused:
    """An engine's tensor in the making, on all of its ranks."""

    hashes: list[Any]
    count: int
    seen: int = field(default=0)


class EngineChecksums:
    """The checksums of an engine with ``tp`` ranks, from full HF tensors given one by one.

    The parts of one engine tensor must come in order, experts ascending; different engine tensors in any order.

    Args:
        dtype: in which the engine serves.
        experts: routed experts per layer of ``model``.

    Raises:
        ConfigError: for a model whose layout inside SGLang is not known here: another type, or sizes that it pads.
    """

    def __init__(self, model: HFModel, tp: int, dtype: torch.dtype) -> None:
        if model.model_type not in CHECKED_MODEL_TYPES:
            known = ", ".join(CHECKED_MODEL_TYPES)
            raise ConfigError(
                f"weights.verify_every: SGLang's layout of a {model.model_type} is not known, only that of {known}; "
                "set it to 0"
            )
        self.tp, self._dtype, self._experts = tp, dtype, model.num_experts
        self._layers: int = model.raw["num_hidden_layers"]
        _check_unpadded(model, tp)
        self._fused: dict[str, _Fused] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        match = _LAYER.match(name)
        if match and int(match[1]) >= self._layers:
            return  # a draft layer, which the engine does not serve
        part = engine_part(name, self._experts)
        fused = self._fused.get(part.name)
        if fused is None:
            fused = self._fused[part.name] = _Fused([hashlib.sha256() for _ in range(self.tp)], part.count)
        if part.index != fused.seen:
            raise ValueError(f"{name} is part {part.index} of {part.name}, but part {fused.seen} is due")
        fused.seen += 1
        tensor = tensor.to(torch.float32 if self._is_float32(part.name) else self._dtype)
        for rank, digest in enumerate(fused.hashes):
            digest.update(_bytes(self._slice(part, tensor, rank)))

    def result(self) -> list[dict[str, str]]:
        """Checksum by the engine's tensor name, for each of its ranks. Raises ValueError for one that misses parts."""
        for name, fused in self._fused.items():
            if fused.seen != fused.count:
                raise ValueError(f"{name} has {fused.seen} of its {fused.count} parts")
        return [
            {name: fused.hashes[rank].digest()[:8].hex() for name, fused in self._fused.items()}
            for rank in range(self.tp)
        ]

    def _is_float32(self, engine_name: str) -> bool:
        """SGLang keeps the router in float32."""
        return engine_name.endswith((".mlp.gate.weight", ".mlp.gate.e_score_correction_bias"))

    def _slice(self, part: Part, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        if part.division == "none":
            return tensor
        if part.division == "columns":
            return tensor.chunk(self.tp, dim=1)[rank]
        if part.division == "vocabulary":
            padded = -(-tensor.shape[0] // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
            return torch.nn.functional.pad(tensor, (0, 0, 0, padded - tensor.shape[0])).chunk(self.tp)[rank]
        return tensor.chunk(self.tp)[rank]


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())


def add_bucket(checksums: list[EngineChecksums], bucket: Bucket) -> None:
    for checksum in checksums:
        for name, tensor in bucket.tensors:
            checksum.add(name, tensor)


def differences(expected: list[dict[str, str]], reported: list[dict[str, str]]) -> list[str]:
    """What is wrong with an engine's checksums, a phrase per tensor; empty where they agree."""
    if len(expected) != len(reported):
        return [f"{len(reported)} ranks reported instead of {len(expected)}"]
    wrong = []
    for rank, (ours, theirs) in enumerate(zip(expected, reported, strict=True)):
        at = f" (rank {rank})" if len(expected) > 1 else ""
        wrong += [f"{name}{at}" for name in ours if name in theirs and theirs[name] != ours[name]]
        wrong += [f"{name}{at} is missing in the engine" for name in ours.keys() - theirs.keys()]
        wrong += [f"{name}{at} was never sent" for name in theirs.keys() - ours.keys()]
    return sorted(wrong)
