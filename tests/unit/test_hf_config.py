"""What a Hugging Face config says, what it must not say, and which pipelines it allows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_sao.config import ConfigError, ModelConfig, ParallelConfig, parse_config
from megatron_sao.models.hf import HFModel, read_hf_model, transformer_config
from megatron_sao.models.pipeline import stage_sizes

pytestmark = pytest.mark.unit

MODEL = {
    "num_hidden_layers": 8, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 4, "rms_norm_eps": 1e-5,
    "vocab_size": 9, "max_position_embeddings": 64, "rope_theta": 1e4,
}  # fmt: skip
MOE = {"n_routed_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 8, "first_k_dense_replace": 1}
LATENT = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4,
    "num_key_value_heads": 4,
}  # fmt: skip
YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}
BASES = {
    "llama": MODEL,
    "qwen3": MODEL,
    "qwen3_moe": MODEL | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    "glm4_moe": MODEL | MOE,
    "deepseek_v3": MODEL | MOE | LATENT | {"rope_scaling": YARN, "n_group": 4, "topk_group": 2},
    "glm_moe_dsa": MODEL | MOE | LATENT | {"index_topk": 4, "index_n_heads": 2, "index_head_dim": 8},
}


def write(directory: Path, model_type: str, **changes: Any) -> Path:
    (directory / "config.json").write_text(json.dumps(BASES[model_type] | {"model_type": model_type} | changes))
    return directory


def megatron(directory: Path, model_type: str, parallel: ParallelConfig | None = None, **changes: Any) -> Any:
    model = read_hf_model(write(directory, model_type, **changes))
    return transformer_config(model, ModelConfig(path=directory), parallel or ParallelConfig())


@pytest.mark.parametrize("model_type", BASES)
def test_the_plain_config_of_every_architecture_is_accepted(model_type: str, tmp_path: Path) -> None:
    assert megatron(tmp_path, model_type).num_layers == 8


def test_the_published_fields_of_glm_5_are_accepted(tmp_path: Path) -> None:
    published = {
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "rope_interleave": True,
        "indexer_rope_interleave": True, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 1, "head_dim": 4,
        "layer_types": ["deepseek_sparse_attention"] * 8, "mlp_layer_types": [*["dense"] * 3, *["sparse"] * 5],
        "index_topk_freq": 1, "indexer_types": [*["full"] * 3, *["shared"] * 3, "full", "shared"],
    }  # fmt: skip
    config = megatron(tmp_path, "glm_moe_dsa", **published)
    assert config.moe_layer_freq == [0, 0, 0, 1, 1, 1, 1, 1]
    assert (config.dsa_indexer_topk_freq, config.dsa_indexer_skip_topk_offset) == (4, 3)


@pytest.mark.parametrize(
    ("model_type", "changes", "sentence"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("llama", {"mlp_bias": True}, "mlp_bias = true"),
        ("llama", {"attention_bias": True}, "attention_bias = true for llama"),
        ("qwen3", {"attention_bias": True}, "attention_bias = true for qwen3"),
        ("qwen3_moe", {"attention_bias": True}, "attention_bias = true for qwen3_moe"),
        ("glm_moe_dsa", {"attention_bias": True}, "attention_bias = true for glm_moe_dsa"),
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window = true"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types with 'sliding_attention'"),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "rope_type = 'dynamic' for llama"),
        ("qwen3", {"rope_scaling": YARN}, "rope_type = 'yarn' for qwen3"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "low_freq_factor": 1, "high_freq_factor": 4,
                                    "original_max_position_embeddings": 4096}},
         "original_max_position_embeddings = 4096 of rope_type 'llama3'"),
        ("deepseek_v3", {"rope_scaling": YARN | {"attention_factor": 1.2}}, "attention_factor = 1.2"),
        ("deepseek_v3", {"rope_scaling": YARN | {"truncate": False}}, "truncate = false"),
        ("deepseek_v3", {"rope_scaling": YARN | {"factor": None}}, "rope_type 'yarn' without factor"),
        ("deepseek_v3", {"rope_scaling": YARN | {"mscale": None}}, "one of mscale and mscale_all_dim"),
        ("deepseek_v3", {"q_lora_rank": None}, "q_lora_rank = null"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads = 2"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave = false"),
        ("deepseek_v3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias = true for deepseek_v3"),
        ("deepseek_v3", {"topk_group": 3}, "topk_group = 3 with num_experts_per_tok = 4"),
        ("deepseek_v3", {"topk_group": 1}, "topk_group = 1 with num_experts_per_tok = 4"),
        ("glm4_moe", {"n_group": 8, "topk_group": 4}, "topk_group = 4 with num_experts_per_tok = 4"),
        ("glm_moe_dsa", {"n_group": 2, "topk_group": 1}, "topk_group = 1 with num_experts_per_tok = 4"),
        ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob = false for deepseek_v3"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func = 'softmax' for deepseek_v3"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method = 'greedy'"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ("glm_moe_dsa", {"indexer_rope_interleave": False}, "indexer_rope_interleave = false"),
        ("glm_moe_dsa", {"index_topk_pattern": "FSFFFSFS"}, r"indexer_types = \['full', 'shared', 'full', 'full'"),
        ("glm_moe_dsa", {"indexer_types": ["shared"] * 8}, r"indexer_types = \['shared', "),
        ("glm_moe_dsa", {"layer_types": ["linear_attention"] * 8}, "with 'linear_attention' for glm_moe_dsa"),
        ("qwen3", {"layer_types": ["indexed_attention"]}, "layer_types with 'indexed_attention' for qwen3"),
        ("qwen3_moe", {"num_experts_per_tok": 1}, "num_experts_per_tok = 1"),
    ],
)  # fmt: skip
def test_what_is_not_implemented_is_refused_by_field_and_value(
    model_type: str, changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"{sentence}.* in {tmp_path}/config.json is not implemented"):
        read_hf_model(write(tmp_path, model_type, **changes))


@pytest.mark.parametrize(("n_group", "topk_group", "experts_per_token"), [(4, 2, 4), (4, 2, 5), (8, 4, 8)])
def test_groups_of_which_the_best_two_experts_count_here_as_in_the_model_are_accepted(
    n_group: int, topk_group: int, experts_per_token: int, tmp_path: Path
) -> None:
    groups = {"n_group": n_group, "topk_group": topk_group, "num_experts_per_tok": experts_per_token}
    config = megatron(tmp_path, "deepseek_v3", **groups)
    assert config.moe_router_num_groups == n_group
    assert config.moe_router_topk // config.moe_router_group_topk == 2


def test_an_unknown_architecture_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL | {"model_type": "mamba"}))
    with pytest.raises(ConfigError, match=r"model_type 'mamba'.*deepseek_v3, glm4_moe, glm_moe_dsa, llama, qwen3"):
        read_hf_model(tmp_path)


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 8e6}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 8e6}, "rope_theta": 1e4},
        {"rope_theta": 8e6},
        {"rope_theta": 8e6, "rope_scaling": None},
    ],
)
def test_the_rope_base_is_found_where_either_generation_of_configs_keeps_it(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    assert megatron(tmp_path, "glm_moe_dsa", **fields).rotary_base == 8e6
    assert read_hf_model(write(tmp_path, "qwen3", **fields)).rope["rope_theta"] == 8e6


FULL_OF_GLM_5_2 = [1, 2, 3, *range(7, 79, 4)]  # counted from 1
SCHEDULE = {"num_hidden_layers": 78, "index_topk_freq": 4, "index_skip_topk_offset": 3}


@pytest.mark.parametrize(
    "fields",
    [
        SCHEDULE,
        {"num_hidden_layers": 78, "index_topk_pattern": "FF" + "FSSS" * 19},
        {"num_hidden_layers": 78, "indexer_types": ["full", "full", *["full", "shared", "shared", "shared"] * 19]},
    ],
)
def test_the_layers_with_an_indexer_are_the_configs_however_it_names_them(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    model = read_hf_model(write(tmp_path, "glm_moe_dsa", **fields))
    assert [layer + 1 for layer, kind in enumerate(model.indexer_types) if kind == "full"] == FULL_OF_GLM_5_2
    config = transformer_config(model, ModelConfig(path=tmp_path), ParallelConfig())
    assert (config.dsa_indexer_topk_freq, config.dsa_indexer_skip_topk_offset) == (4, 3)


def test_without_a_schedule_every_layer_has_an_indexer(tmp_path: Path) -> None:
    model = read_hf_model(write(tmp_path, "glm_moe_dsa"))
    assert model.indexer_types == ["full"] * 8
    assert megatron(tmp_path, "glm_moe_dsa").dsa_indexer_topk_freq == 1
    assert HFModel(tmp_path, BASES["deepseek_v3"], "deepseek_v3").indexer_types == []


def test_pipeline_stages_must_start_on_layers_with_an_indexer(tmp_path: Path) -> None:
    eight = {"pp": 8, "world_size": 8}
    parallel = ParallelConfig(**eight, pp_first_layers=14, pp_last_layers=16)
    config = megatron(tmp_path, "glm_moe_dsa", parallel, **SCHEDULE)
    assert (config.num_layers_in_first_pipeline_stage, config.num_layers_in_last_pipeline_stage) == (14, 16)
    wrong = ParallelConfig(**eight, pp_first_layers=16, pp_last_layers=14)
    with pytest.raises(
        ConfigError, match=r"parallel.pp = 8: .* start on layers \[17, 25.* may start on layers \[1, 2, 3"
    ):
        megatron(tmp_path, "glm_moe_dsa", wrong, **SCHEDULE)
    with pytest.raises(ConfigError, match=r"start on layers \[2, 3, 4, 6, 7, 8\]"):
        interleaved = ParallelConfig(pp=2, vpp=4, world_size=2)
        megatron(tmp_path, "glm_moe_dsa", interleaved, index_topk_freq=4, index_skip_topk_offset=1)


@pytest.mark.parametrize(
    ("layers", "parallel", "sizes"),
    [
        (8, {"pp": 4}, [2, 2, 2, 2]),
        (8, {"pp": 2, "vpp": 2}, [2, 2, 2, 2]),
        (78, {"pp": 8, "pp_first_layers": 14, "pp_last_layers": 16}, [14, *[8] * 6, 16]),
        (7, {"pp": 2, "pp_first_layers": 2}, [2, 5]),
        (8, {"pp": 3, "pp_last_layers": 4, "vpp": 2}, [1, 1, 2] * 2),
    ],
)
def test_layers_are_divided_over_stages_in_the_order_of_the_model(layers: int, parallel: dict, sizes: list) -> None:
    assert stage_sizes(layers, ParallelConfig(world_size=parallel["pp"], **parallel)) == sizes


@pytest.mark.parametrize(
    "parallel",
    [
        {"pp": 4},
        {"pp": 2, "pp_first_layers": 2, "pp_last_layers": 4},
        {"pp": 2, "pp_first_layers": 7},
        {"pp": 4, "pp_first_layers": 2, "pp_last_layers": 2},
        {"pp": 2, "pp_first_layers": 3, "vpp": 2},
    ],
)
def test_layers_that_cannot_be_divided_are_refused(parallel: dict) -> None:
    with pytest.raises(ConfigError, match=rf"7 layers cannot be divided over parallel.pp = {parallel['pp']} ranks"):
        stage_sizes(7, ParallelConfig(world_size=parallel["pp"], **parallel))


def test_numbers_for_stages_need_a_pipeline() -> None:
    with pytest.raises(ConfigError, match=r"pp_last_layers=3 with pp=1"):
        parse_config({
            "name": "n", "model": {"path": "m"}, "data": {"train": "t"}, "rollout": {"environment": "a:B"},
            "parallel": {"pp_last_layers": 3},
        })  # fmt: skip


@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm_moe_dsa"])
def test_latent_attention_under_tensor_parallelism_needs_sequence_parallelism(model_type: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"parallel.tp = 2 with parallel.sequence_parallel = false"):
        megatron(tmp_path, model_type, ParallelConfig(world_size=2, tp=2))
