"""The tensors of a checkpoint on disk, by name and shape, from its ``config.json`` alone.

They come from ``transformers``: its model on the meta device, with the experts that it keeps stacked in memory split
back by its own conversion. Nothing here knows how this project maps names, so that the two can be compared.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging

Shapes = dict[str, tuple[int, ...]]
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def tensors_on_disk(path: Path) -> tuple[Shapes, Shapes]:
    """Shapes of the model's tensors and of its multi-token-prediction layers', unquantised.

    The latter are layers behind the last one, which ``transformers`` leaves out; some releases also store a copy of
    embedding and head in each of them.
    """
    config = AutoConfig.from_pretrained(path)
    layers, draft_layers = config.num_hidden_layers, getattr(config, "num_nextn_predict_layers", 0) or 0
    if draft_layers:
        config = _with_layers(path, config, layers + draft_layers)
    logging.disable_progress_bar()
    shapes = _shapes(config)
    model = {name: shape for name, shape in shapes.items() if _layer(name) < layers}
    draft = {name: shape for name, shape in shapes.items() if _layer(name) >= layers}
    for layer in range(layers, layers + draft_layers):
        prefix, hidden = f"model.layers.{layer}.", config.hidden_size
        draft |= {prefix + f"{norm}.weight": (hidden,) for norm in ("enorm", "hnorm", "shared_head.norm")}
        draft[prefix + "eh_proj.weight"] = (hidden, 2 * hidden)
        for part in ("embed_tokens", "shared_head.head"):
            draft[prefix + f"{part}.weight"] = (config.vocab_size, hidden)
    return model, draft


def _with_layers(path: Path, config: PreTrainedConfig, count: int) -> PreTrainedConfig:
    """The same model with more layers of its last kind. Lists with an entry per layer are derived anew where
    ``config.json`` leaves them out, and otherwise prolonged."""
    raw = PreTrainedConfig.get_config_dict(path)[0]
    per_layer = {
        name: value + value[-1:] * (count - config.num_hidden_layers)
        for name, value in raw.items()
        if isinstance(value, list) and len(value) == config.num_hidden_layers
    }
    return type(config).from_dict(raw | per_layer | {"num_hidden_layers": count})


def _shapes(config: PreTrainedConfig) -> Shapes:
    config.quantization_config = None
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    tied: set[str] = set(model.all_tied_weights_keys)
    state: dict[str, Any] = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    return {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(model, state).items()}


def _layer(name: str) -> int:
    """Of a tensor that belongs to no layer: -1."""
    match = _LAYER.match(name)
    return int(match[1]) if match else -1
