"""The device a run computes on, chosen once at start-up and handed to everything that needs to know."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import torch

from megatron_sao.config import ConfigError
from megatron_sao.models.adam import bind_adam


@dataclass(frozen=True)
class Backend:
    """Device, collective library and layer implementation of this process.

    Attributes:
        device: where parameters and batches live.
        distributed_backend: torch.distributed backend, ``gloo`` or ``nccl``.
        layers: ``native`` (Megatron's parallel linears, torch SDPA) or ``transformer_engine`` (CUDA only).
    """

    device: torch.device
    distributed_backend: Literal["gloo", "nccl"]
    layers: Literal["native", "transformer_engine"]


def start_backend(device: Literal["auto", "cpu", "cuda"], layers: Literal["native", "transformer_engine"]) -> Backend:
    """Select the backend and prepare this process for it. Call once, before building any Megatron object.

    Raises:
        ConfigError: the device or the layers asked for are not available here.
    """
    cuda = torch.cuda.is_available()
    if device == "cuda" and not cuda:
        raise ConfigError("model.device = 'cuda', but torch sees no CUDA device; use model.device=cpu or auto")
    if device == "cpu" and cuda:
        raise ConfigError(
            "model.device = 'cpu' on a machine with CUDA: hide the devices with CUDA_VISIBLE_DEVICES= or use auto"
        )
    if not cuda:
        if layers == "transformer_engine":
            raise ConfigError("model.layers = 'transformer_engine' needs CUDA; use model.layers=native on a CPU")
        from megatron_sao.models.cpu import adapt_megatron

        adapt_megatron(torch.device("cpu"))
    bind_adam()
    if layers == "native":
        from megatron_sao.models.spec import prepare_native_layers

        prepare_native_layers()
    if not cuda:
        return Backend(torch.device("cpu"), "gloo", layers)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    torch.cuda.set_device(local_rank)
    return Backend(torch.device("cuda", local_rank), "nccl", layers)
