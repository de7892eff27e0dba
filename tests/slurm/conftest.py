"""One Slurm cluster for all the tests of this directory; it is installed where it is absent and can be."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, missing_programs

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    if missing_programs():
        done = subprocess.run([ROOT / "tools" / "setup" / "slurm.sh"], text=True, capture_output=True, check=False)
        if missing_programs():
            pytest.skip(f"Slurm is not installed and cannot be: {(done.stderr or done.stdout).strip()[-300:]}")
    with Cluster() as running:
        yield running
