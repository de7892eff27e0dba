"""A Megatron world of one rank in the test process, and small models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_sao.config import ModelConfig, ParallelConfig
from megatron_sao.models.backend import Backend
from megatron_sao.trainer.runtime import start_runtime, stop_runtime
from tests.tiny_models import write_glm4_moe, write_llama, write_qwen3


@pytest.fixture(scope="session")
def world() -> Iterator[Backend]:
    backend = start_runtime(ModelConfig(path="unused"), ParallelConfig(), seed=0, deterministic=True)
    yield backend
    stop_runtime()


@pytest.fixture(scope="session")
def glm4_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_glm4_moe(tmp_path_factory.mktemp("models") / "glm4_moe")


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3(tmp_path_factory.mktemp("models") / "qwen3")
