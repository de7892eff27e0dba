"""The CPU backend, all of it: what lets unmodified Megatron-Core 0.19.2 run where there is no CUDA.

Megatron-Core assumes a CUDA device in a few dozen places. :func:`adapt_megatron` replaces those at the narrowest
seam each place offers: stubs for ``torch.cuda`` functions, a proxy for the name ``torch`` inside the few modules
that write ``device='cuda'`` literally, and rebindings in named modules. It changes no arithmetic. It runs once,
before any Megatron object is built, and only when CUDA is unavailable.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import queue
import types
from collections.abc import Callable
from typing import Any

import torch

# Modules that pass device='cuda' or pin_memory=True literally to tensor factories.
_MODULES_WITH_CUDA_LITERALS = (
    "pipeline_parallel.schedules",
    "optimizer.clip_grads",
    "optimizer.optimizer",
    "utils",
    "transformer.utils",
    "models.common.embeddings.rope_utils",
)
_FACTORIES = ("zeros", "ones", "empty", "full", "tensor", "arange", "empty_like", "zeros_like", "as_tensor")


class _Stream:
    """Work on a CPU is ordered by itself, so every stream operation is complete at once."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_stream(self, *_: Any) -> None: ...
    def wait_event(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, _other: _Event) -> float:
        return 0.0


class _TypeName(str):
    """``Tensor.type()``, e.g. ``torch.FloatTensor`` or ``torch.meta.FloatTensor``, that also equals the CUDA spelling
    Megatron compares it with."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) or "torch.cuda." + self.rpartition(".")[2] == other

    def __ne__(self, other: object) -> bool:
        return not self == other


def adapt_megatron(device: torch.device) -> None:
    """Install every adaptation. Raises RuntimeError where CUDA is available: there nothing may be stubbed.

    Args:
        device: what Megatron is to take for its CUDA device: ``cpu``, or ``meta`` to build models without memory.
    """
    if torch.cuda.is_available():
        raise RuntimeError("the CPU adaptations must not be installed on a machine with CUDA; set model.device=cuda")
    torch.compiler.set_stance("force_eager")  # compiling the jit-fused helpers costs 20 s and gains nothing here
    _stub_torch_cuda(device)
    _map_cuda_literals(device)
    _accept_cpu_tensor_types()
    _bind_rng_state()
    _keep_token_counts_as_numpy()
    _write_checkpoints_in_process()


def _stub_torch_cuda(device: torch.device) -> None:
    stream = _Stream()
    stubs: dict[str, Any] = {
        "current_device": lambda: device,
        "set_device": lambda _device: None,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
        "stream": lambda _stream: contextlib.nullcontext(),
        "Stream": _Stream,
        "Event": _Event,
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "manual_seed": torch.manual_seed,
        "is_current_stream_capturing": lambda: False,
    }
    for name, stub in stubs.items():
        setattr(torch.cuda, name, stub)
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.nn.Module.cuda = lambda self, *_, **__: self


def _map_cuda_literals(device: torch.device) -> None:
    proxy = types.ModuleType("torch")
    proxy.__getattr__ = lambda name: getattr(torch, name)
    for name in _FACTORIES:
        setattr(proxy, name, _on(device, getattr(torch, name)))
    for name in _MODULES_WITH_CUDA_LITERALS:
        importlib.import_module(f"megatron.core.{name}").torch = proxy


def _on(device: torch.device, factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = device
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return create


def _accept_cpu_tensor_types() -> None:
    original = torch.Tensor.type

    def tensor_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        return _TypeName(result) if isinstance(result, str) else result

    torch.Tensor.type = tensor_type


def _bind_rng_state() -> None:
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def _keep_token_counts_as_numpy() -> None:
    """The all-to-all dispatcher wants split sizes as numpy; upstream converts only what lives on a GPU."""
    from megatron.core.transformer.moe import token_dispatcher

    original = token_dispatcher.maybe_move_tensor_to_cpu

    def to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and torch.is_tensor(tensor):
            return tensor.numpy()
        return original(tensor, as_numpy, record_stream)

    token_dispatcher.maybe_move_tensor_to_cpu = to_cpu


def _write_checkpoints_in_process() -> None:
    """Upstream starts a multiprocessing manager per rank for its writers' results: seconds for a tiny model."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    results: queue.Queue[Any] = queue.Queue()
    filesystem_async.get_write_results_queue = lambda *_, **__: results
