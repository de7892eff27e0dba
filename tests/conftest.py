"""Every test is marked by its layer, and the layers run from the quick to the slow."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

# A machine that stalls is no failure of a property, and the same commit gets the same examples; `make test-full` draws
# others.
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("steady", settings.get_profile("search"), derandomize=True)
settings.load_profile("steady")

# Ranks and servers share the cores; and threads divide a sum by its length, so that packs of different lengths would
# round differently. Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

if TYPE_CHECKING:
    from megatron_sao.models.backend import Backend

LAYERS = ("unit", "distributed", "slurm", "system")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def layer(item: pytest.Item) -> str:
        return next((name for name in LAYERS if f"/tests/{name}/" in str(item.path)), "unit")

    for item in items:
        item.add_marker(layer(item))
    items.sort(key=lambda item: LAYERS.index(layer(item)))  # stable: the order within a layer stays


@pytest.fixture(scope="session")
def world() -> Iterator[Backend]:
    """A Megatron world of one rank in the test process."""
    from megatron_sao.config import ModelConfig, ParallelConfig  # slow to import
    from megatron_sao.trainer.runtime import start_runtime, stop_runtime

    backend = start_runtime(ModelConfig(path="unused"), ParallelConfig(), seed=0, deterministic=True)
    yield backend
    stop_runtime()
