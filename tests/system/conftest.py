"""Real parts for system tests: tiny models on disk and one SGLang server per model for the whole session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, PreTrainedTokenizerFast

from tests.serving import CHARACTERS, CONTEXT, Server, run_config, serving
from tests.system.buffer_process import Buffer


@pytest.fixture(scope="session")
def glm4_moe_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random GLM-4.5-architecture MoE in HF format: first layer dense, 8 experts top-2, one shared; fp32."""
    path = tmp_path_factory.mktemp("models") / "glm4_moe"
    config = Glm4MoeConfig(
        vocab_size=len(CHARACTERS), hidden_size=64, intermediate_size=128, moe_intermediate_size=64,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16, n_routed_experts=8,
        num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1,
        use_qk_norm=True, partial_rotary_factor=0.5, max_position_embeddings=CONTEXT, tie_word_embeddings=False,
        pad_token_id=0, bos_token_id=None, eos_token_id=None, initializer_range=0.2, dtype="float32",
    )  # fmt: skip
    torch.manual_seed(0)
    model = Glm4MoeForCausalLM(config).float()
    for layer in model.model.layers[1:]:
        torch.nn.init.uniform_(layer.mlp.gate.e_score_correction_bias, -0.2, 0.2)
    model.save_pretrained(path)
    tokenizer = Tokenizer(models.WordLevel({character: index for index, character in enumerate(CHARACTERS)}, "_"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="_").save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def glm4_moe_server(glm4_moe_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = run_config(glm4_moe_path, algorithm={"routing_replay": True})
    with serving("e0", config, tmp_path_factory.mktemp("logs")) as server:
        yield server


@pytest.fixture
def buffers(request: pytest.FixtureRequest) -> list[Buffer]:
    """Those of the test's module, the patient and the impatient one, that the test is about."""
    return [request.getfixturevalue(name) for name in ("buffer", "impatient") if name in request.fixturenames]
