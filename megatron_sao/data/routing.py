"""Which experts a rollout engine sent each token to, for routing replay: its shape, and how SGLang reports it."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_sao.config import ConfigError, RunConfig


class RoutingShape(NamedTuple):
    """How a model routes tokens to experts.

    Attributes:
        num_layers: decoder layers, the dense ones included.
        moe_layers: indices of those with routed experts, ascending.
        top_k: experts of one token in one layer.
        num_experts: routed experts of one layer.
    """

    num_layers: int
    moe_layers: tuple[int, ...]
    top_k: int
    num_experts: int

    @classmethod
    def of(cls, model_path: Path) -> RoutingShape | None:
        """Read from ``config.json``; None for a model without routed experts.

        Raises:
            ConfigError: no such file, or not JSON.
        """
        path = Path(model_path) / "config.json"
        try:
            config = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.path = {str(model_path)!r}: cannot read {path} ({error})") from error
        return cls.of_config(config.get("text_config", config))

    @classmethod
    def of_config(cls, config: dict[str, Any]) -> RoutingShape | None:
        """As :meth:`of`, from what is in ``config.json``."""
        counts = (config.get(name) for name in ("n_routed_experts", "num_experts", "num_local_experts"))
        num_experts = next(filter(None, counts), 0)
        if not num_experts:
            return None
        layers = range(config["num_hidden_layers"])
        moe_layers = tuple(layer for layer in layers if _is_moe(config, layer))
        return cls(len(layers), moe_layers, config["num_experts_per_tok"], num_experts)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest that holds an expert id: routing is by far the largest part of a trajectory."""
        return np.dtype(np.uint8 if self.num_experts <= 256 else np.uint16)

    def decode(self, report: str, num_tokens: int) -> np.ndarray:
        """SGLang's ``routed_experts`` as :attr:`dtype` ``[num_tokens, moe layers, top_k]``.

        Args:
            report: base64 of int32 ``[num_tokens, num_layers, top_k]``; entries of dense layers mean nothing.

        Raises:
            ValueError: another size, or an expert that the model does not have.
        """
        raw = base64.b64decode(report)
        expected = num_tokens * self.num_layers * self.top_k * 4
        if len(raw) != expected:
            raise ValueError(
                f"{len(raw)} bytes of routed experts for {num_tokens} tokens, {self.num_layers} layers and top "
                f"{self.top_k}: {expected} are due"
            )
        experts = np.frombuffer(raw, "<i4").reshape(num_tokens, self.num_layers, self.top_k)[:, self.moe_layers]
        if experts.size and not 0 <= experts.min() <= experts.max() < self.num_experts:
            raise ValueError(f"routed experts {experts.min()} to {experts.max()} outside [0, {self.num_experts})")
        return experts.astype(self.dtype)


def _is_moe(config: dict[str, Any], layer: int) -> bool:
    if kinds := config.get("mlp_layer_types"):
        return kinds[layer] == "sparse"
    return (
        layer >= config.get("first_k_dense_replace", 0)
        and (layer + 1) % config.get("decoder_sparse_step", 1) == 0
        and layer not in (config.get("mlp_only_layers") or ())
    )


def replayed_routing(config: RunConfig) -> RoutingShape | None:
    """What engines must report and the trainer replays; None without ``algorithm.routing_replay``.

    Raises:
        ConfigError: there is nothing to replay in a model without experts.
    """
    if not config.algorithm.routing_replay:
        return None
    shape = RoutingShape.of(config.model.path)
    if shape is None:
        raise ConfigError(
            f"algorithm.routing_replay = true, but {config.model.path} has no routed experts; set it to false"
        )
    return shape


def continued(earlier: np.ndarray | None, later: np.ndarray | None) -> np.ndarray | None:
    """Routing of a sequence of which ``earlier`` covers a beginning and ``later`` covers more, from its first token on.

    Where both know a token the earlier report stands: it is the one under which the token after it was sampled, while
    the later request may have computed it anew, under newer weights.
    """
    if earlier is None or later is None:
        return earlier if later is None else later
    return np.concatenate([earlier, later[len(earlier) :]])
