"""What several files of unit tests start from."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store_bench import Bench


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.store.close()
