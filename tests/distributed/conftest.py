"""Small models."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_models import write_glm4_moe, write_llama, write_qwen3


@pytest.fixture(scope="session")
def glm4_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_glm4_moe(tmp_path_factory.mktemp("models") / "glm4_moe")


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3(tmp_path_factory.mktemp("models") / "qwen3")
