"""Where the tests of layouts leave the rows of the table that pytest prints in the end."""

import pytest

# ranks, layout, kind of step, largest relative difference of a metric, and of a gradient
LAYOUT_TABLE = pytest.StashKey[list[tuple[int, str, str, float, float]]]()
