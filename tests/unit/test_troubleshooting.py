"""docs/troubleshooting.md quotes what the product says, and only that."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUOTED = re.compile(r"`([^`]+)`")


def quoted_messages() -> list[str]:
    """The code spans of several words in the first columns of the tables."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    firsts = [line.split("|")[1] for line in text.splitlines() if line.startswith("| ")]
    return [quote for first in firsts for quote in QUOTED.findall(first) if " " in quote]


@pytest.fixture(scope="module")
def literals() -> list[str]:
    """Every string in the sources, f-strings in the parts between what is filled in."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / "megatron_sao").rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


@pytest.mark.parametrize("message", quoted_messages())
def test_each_quoted_message_is_one_that_the_product_can_print(message: str, literals: list[str]) -> None:
    for part in re.split(r"\s*…\s*", message):
        assert any(part in literal for literal in literals), part


def test_there_are_messages_to_check() -> None:
    assert len(quoted_messages()) > 20
