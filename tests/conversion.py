"""Hugging Face directories to convert, and comparing them with the safetensors package as the judge."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests import tiny_models


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (the file is no mapping)
                assert name not in tensors, f"{name} is in two files"
                tensors[name] = file.get_tensor(name)
    return tensors


def assert_same_tensors(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Names, dtypes, shapes and bytes."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        other = actual[name]
        assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(other.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


def rewrite(directory: Path, tensors: dict[str, torch.Tensor], **config: object) -> Path:
    """Replace the weights of a directory, and fields of its config."""
    save_file({n: t.contiguous() for n, t in tensors.items()}, directory / "model.safetensors", {"format": "pt"})
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return directory


def write_bfloat16_with_mtp(directory: Path) -> Path:
    """glm4_moe as it is published: bfloat16, the expert bias in float32, and a layer after the last that drafts."""
    tiny_models.write_glm4_moe(directory)
    tensors = tensors_of(directory)
    tensors = {n: t if n.endswith("e_score_correction_bias") else t.bfloat16() for n, t in tensors.items()}
    drafts = {n.replace("layers.3.", "layers.4."): t * 3 for n, t in tensors.items() if ".layers.3." in n}
    drafts["model.layers.4.eh_proj.weight"] = torch.randn(48, 96).bfloat16()
    drafts["model.layers.4.shared_head.norm.weight"] = torch.randn(48).bfloat16()
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    return rewrite(directory, tensors | drafts, dtype="bfloat16", num_nextn_predict_layers=1)


def write_fp8(directory: Path, block: tuple[int, int] = (16, 16)) -> Path:
    """deepseek_v3 in block-quantised FP8, with ragged blocks, an all-zero one and a layer that drafts."""
    tiny_models.write_deepseek_v3(directory)
    tensors = {n: t if n.endswith("correction_bias") else t.bfloat16() for n, t in tensors_of(directory).items()}
    tensors["model.layers.1.self_attn.o_proj.weight"][:16, :16] = 0
    drafts = {n.replace("layers.3.", "layers.4."): t * 3 for n, t in tensors.items() if ".layers.3." in n}
    stored = {}
    for name, tensor in (tensors | drafts).items():
        if tensor.dim() == 2 and "_proj" in name:
            stored[name], stored[f"{name}_scale_inv"] = quantise_by_loops(tensor, block)
        else:
            stored[name] = tensor
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": block}
    return rewrite(directory, stored, dtype="bfloat16", num_nextn_predict_layers=1, quantization_config=quantization)


def quantise_by_loops(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = -(-weight.shape[0] // block[0]), -(-weight.shape[1] // block[1])
    codes, scale = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
    for i in range(rows):
        for j in range(columns):
            area = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            part = weight[area].float()
            scale[i, j] = part.abs().max() / 448 if part.any() else 1.0
            codes[area] = (part / scale[i, j]).to(torch.float8_e4m3fn)
    return codes, scale


def dequantise_by_loops(codes: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    weight = torch.empty(codes.shape)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            area = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            weight[area] = codes[area].float() * scale[i, j]
    return weight.bfloat16()
