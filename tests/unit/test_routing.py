"""Routed experts from the engine's report to the packed batch."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_sao.config import ConfigError, ModelConfig, ParallelConfig
from megatron_sao.data.routing import RoutingShape, continued, replayed_routing
from megatron_sao.data.trajectory import TrajectoryError
from megatron_sao.models.hf import read_hf_model, transformer_config
from megatron_sao.trainer.microbatch import build_microbatches
from megatron_sao.trainer.source import check_routing
from tests.trajectories import make_config, make_trajectory

SHAPE = RoutingShape(num_layers=3, moe_layers=(1, 2), top_k=2, num_experts=8)


def experts(tokens: int, first: int = 0) -> np.ndarray:
    """uint8 [tokens, 2, 2]; token t of layer l has experts t and t + 1 + l, modulo 8, counted from ``first``."""
    token, layer = np.arange(first, first + tokens)[:, None], np.arange(2)
    return (np.stack(np.broadcast_arrays(token, token + 1 + layer), axis=-1) % 8).astype(np.uint8)


def spoilt(token: int, expert: int) -> np.ndarray:
    good = experts(5)
    good[token] = expert
    return good


def config_json(directory: Path, **changes: Any) -> Path:
    config = {"num_hidden_layers": 6, "n_routed_experts": 8, "num_experts_per_tok": 2} | changes
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    ("changes", "moe_layers"),
    [
        ({"first_k_dense_replace": 1}, (1, 2, 3, 4, 5)),
        ({"first_k_dense_replace": 1, "mlp_layer_types": [*["dense"] * 3, *["sparse"] * 3]}, (3, 4, 5)),
        ({"n_routed_experts": None, "num_experts": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}, (1, 5)),
        ({"n_routed_experts": None, "num_local_experts": 4}, (0, 1, 2, 3, 4, 5)),
    ],
)
def test_the_moe_layers_are_those_of_the_models_config(tmp_path, changes, moe_layers):
    assert RoutingShape.of(config_json(tmp_path, **changes)).moe_layers == moe_layers


def test_trainer_and_engine_side_agree_on_the_moe_layers_and_no_auxiliary_loss_is_added(tmp_path):
    raw = {
        "model_type": "glm4_moe", "num_hidden_layers": 6, "first_k_dense_replace": 2, "hidden_size": 8,
        "intermediate_size": 8, "moe_intermediate_size": 8, "num_attention_heads": 2, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "rms_norm_eps": 1e-5, "vocab_size": 9, "router_aux_loss_coef": 0.01,
    }  # fmt: skip
    config = transformer_config(
        read_hf_model(config_json(tmp_path, **raw)), ModelConfig(path=tmp_path), ParallelConfig()
    )
    assert RoutingShape.of(tmp_path).moe_layers == tuple(np.flatnonzero(config.moe_layer_freq))
    assert config.moe_aux_loss_coeff == 0 and config.moe_router_load_balancing_type == "none"
    assert config.moe_z_loss_coeff is None and config.moe_router_bias_update_rate == 0


def test_a_dense_model_has_no_routing_to_replay(tmp_path):
    config_json(tmp_path, n_routed_experts=0)
    assert RoutingShape.of(tmp_path) is None
    assert replayed_routing(make_config(tmp_path)) is None
    with pytest.raises(ConfigError, match=r"algorithm.routing_replay = true, but .* has no routed experts"):
        replayed_routing(make_config(tmp_path, algorithm={"routing_replay": True}))


def test_the_engines_report_loses_its_dense_layers_and_fits_a_byte():
    report = np.zeros((5, 3, 2), "<i4")
    report[:, 1:] = experts(5)
    decoded = SHAPE.decode(base64.b64encode(report.tobytes()).decode(), 5)
    assert decoded.dtype == np.uint8
    np.testing.assert_array_equal(decoded, experts(5))
    with pytest.raises(ValueError, match="120 bytes of routed experts for 4 tokens, 3 layers and top 2: 96 are due"):
        SHAPE.decode(base64.b64encode(report.tobytes()).decode(), 4)
    report[3, 2, 1] = 256  # must not wrap around to a valid id
    with pytest.raises(ValueError, match=r"routed experts 0 to 256 outside \[0, 8\)"):
        SHAPE.decode(base64.b64encode(report.tobytes()).decode(), 5)
    assert SHAPE._replace(num_experts=257).dtype == np.uint16


def test_the_report_of_the_turn_that_sampled_a_token_stands():
    later = experts(9, first=3)
    merged = continued(experts(5), later)
    np.testing.assert_array_equal(merged[:5], experts(5))
    np.testing.assert_array_equal(merged[5:], later[5:])
    assert continued(None, later) is later and continued(later, None) is later


@pytest.mark.parametrize(
    ("routed", "message"),
    [
        (experts(7), r"routed_experts: has shape \(7, 2, 2\); expected at most 6 tokens, 2 MoE layers and top 2"),
        (experts(5)[:, :1], r"routed_experts: has shape \(5, 1, 2\)"),
        (experts(5)[..., :1], r"routed_experts: has shape \(5, 2, 1\)"),
        (np.uint8(0), r"routed_experts: has shape \(\)"),
        (experts(4), r"routed_experts\[4\]: is missing, but token 5 was sampled after it"),
        (spoilt(3, expert=8), r"routed_experts\[3, 0\]: \[8, 8\] is outside \[0, 8\)"),
        (spoilt(2, expert=7), r"routed_experts\[2, 0\]: \[7, 7\] has an expert twice"),
    ],
)
def test_routing_that_cannot_be_is_refused_with_field_and_index(routed, message):
    with pytest.raises(TrajectoryError, match="^" + message):
        make_trajectory(routed_experts=routed).validate(vocab_size=7, max_tokens=6, routing=SHAPE)


def test_good_routing_passes_the_door_of_a_model_with_experts_only():
    for tokens in (5, 6):
        trajectory = make_trajectory(routed_experts=experts(tokens))
        assert trajectory.validate(7, 6, SHAPE) is trajectory
    with pytest.raises(TrajectoryError, match="routed_experts: are recorded, but the model has none"):
        trajectory.validate(7, 6)


def test_a_trajectory_without_routing_cannot_be_replayed():
    check_routing([make_trajectory(routed_experts=experts(5))])
    with pytest.raises(ConfigError, match=r"trajectory 't' has no routed_experts, but algorithm.routing_replay = true"):
        check_routing([make_trajectory()])


def test_a_packed_batch_has_each_tokens_experts_and_none_where_the_engine_did_not_route():
    batch = [make_trajectory(), make_trajectory(routed_experts=experts(5))]
    (micro,) = build_microbatches(batch, 0, 1, 100, 8, torch.device("cpu"), routing_replay=True)
    packed = micro.packed_seq_params.routed_experts
    assert packed.shape == (16, 2, 2)
    assert packed[6:11].tolist() == experts(5).tolist()
    assert (packed[:6] == -1).all() and (packed[11:] == -1).all()
    assert micro.packed_seq_params.real_tokens.tolist() == [True] * 12 + [False] * 4
    (micro,) = build_microbatches(batch, 0, 1, 100, 8, torch.device("cpu"))
    assert micro.routed_experts is None
