"""Small models, recorded batches, and the table of layouts that the tests have compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.layout_table import LAYOUT_TABLE
from tests.distributed.offline import write_batches
from tests.distributed.parity_table import write_parity_table
from tests.tiny_models import write_glm4_moe, write_llama, write_qwen3


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    write_parity_table(terminalreporter, config)
    if not (rows := config.stash.get(LAYOUT_TABLE, [])):
        return
    terminalreporter.section("largest relative difference from a single rank")
    terminalreporter.write_line("| ranks | layout | step | metrics | gradients |\n|---|---|---|---|---|")
    for ranks, layout, kind, metric, gradient in rows:
        compared = f"{gradient:.1e}" if gradient else "–"
        terminalreporter.write_line(f"| {ranks} | {layout} | {kind} | {metric:.1e} | {compared} |")


@pytest.fixture(scope="session")
def glm4_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_glm4_moe(tmp_path_factory.mktemp("models") / "glm4_moe")


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3(tmp_path_factory.mktemp("models") / "qwen3")


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_batches(tmp_path_factory.mktemp("batches"))
