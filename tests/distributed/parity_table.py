"""The table of models that pytest prints in the end."""

from __future__ import annotations

import pytest

COLUMNS = ("one rank", "tp2", "pp2", "ep2")
# by model, by layout: the largest difference of a logit from that of transformers, relative to the largest logit
PARITY_TABLE = pytest.StashKey[dict[str, dict[str, float]]]()


def write_parity_table(reporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    models = config.stash.get(PARITY_TABLE, {})
    if not models:
        return
    reporter.section("largest difference of a logit from transformers, relative to the largest logit")
    reporter.write_line(f"| model | {' | '.join(COLUMNS)} |")
    reporter.write_line("|---" * (len(COLUMNS) + 1) + "|")
    for model, found in models.items():
        cells = (f"{found[layout]:.1e}" if layout in found else "–" for layout in COLUMNS)
        reporter.write_line(f"| {model} | {' | '.join(cells)} |")
