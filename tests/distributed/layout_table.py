"""The table of layouts that pytest prints in the end."""

from __future__ import annotations

import pytest

# by ranks, layout and kind of step: the largest relative difference of a metric, a gradient or a weight's change
LAYOUT_TABLE = pytest.StashKey[dict[tuple[int, str, str], float]]()


def lines(differences: dict[tuple[int, str, str], float], kinds: list[str]) -> list[str]:
    """One row per layout, one column per kind of step; a dash for what has not run."""
    rows = sorted({(ranks, layout): None for ranks, layout, _ in differences}, key=lambda row: row[0])
    out = [f"| ranks | layout | {' | '.join(kinds)} |", "|---" * (len(kinds) + 2) + "|"]
    for ranks, layout in rows:
        found = (differences.get((ranks, layout, kind)) for kind in kinds)
        cells = ["–" if difference is None else f"{difference:.1e}" for difference in found]
        out.append(f"| {ranks} | {layout} | {' | '.join(cells)} |")
    return out
