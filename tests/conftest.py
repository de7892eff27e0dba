"""Every test is marked by its layer, and the layers run from the quick to the slow."""

import pytest

LAYERS = ("unit", "distributed", "system")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def layer(item: pytest.Item) -> str:
        return next((name for name in LAYERS if f"/tests/{name}/" in str(item.path)), "unit")

    for item in items:
        item.add_marker(layer(item))
    items.sort(key=lambda item: LAYERS.index(layer(item)))  # stable: the order within a layer stays
