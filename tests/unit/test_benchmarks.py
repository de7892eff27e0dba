"""Nothing else runs the benchmarks, so what they import may be gone by the time somebody wants a figure."""

import importlib
from pathlib import Path

import pytest

BENCHMARKS = sorted(path.stem for path in (Path(__file__).parents[2] / "tools" / "bench").glob("*.py"))


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_finds_everything_that_it_imports_and_says_what_it_measures(name):
    assert importlib.import_module(f"tools.bench.{name}").__doc__
