"""Demonstrations: what the file of ``data.sft`` may hold."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from megatron_sao.config import ConfigError
from megatron_sao.trainer.source import Demonstrations

pytestmark = pytest.mark.unit

GOOD = b'{"prompt": "ab", "segments": [["a", true], ["b", false]]}'


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, and none for any but "a" and "b"."""
    model = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="none"))
    model.pre_tokenizer = Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=model)


def test_only_the_segments_that_say_so_are_trained_on(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    (tmp_path / "sft.jsonl").write_bytes(GOOD + b"\n")
    (example,) = Demonstrations(tmp_path / "sft.jsonl", tokenizer, seed=0).batch(step=0, size=1)
    assert example.token_ids.tolist() == [0, 1, 0, 1] and example.loss_mask.tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize(
    "line",
    [
        b'{"prompt": "\xff", "segments": [["a", true]]}',
        b'{"prompt": "a", "segments": [["a", ' + b"[" * 100_000 + b"]" * 100_000 + b"]]}",
        b'{"prompt": ["a", "b"], "segments": [["a", true]]}',
        b'{"prompt": "a", "segments": [[["a"], true]]}',
        b'{"prompt": "a", "segments": [["\\ud83d", true]]}',
        b'{"prompt": "a", "segments": [["c", true]]}',
    ],
    ids=["bytes", "depth", "list", "list in a segment", "half a character", "no token"],
)
def test_a_line_that_cannot_be_tokenised_is_named_by_file_and_number(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, line: bytes
) -> None:
    (tmp_path / "sft.jsonl").write_bytes(GOOD + b"\n" + line)
    with pytest.raises(ConfigError, match=r"sft.jsonl:2 is no demonstration .*see data.sft"):
        Demonstrations(tmp_path / "sft.jsonl", tokenizer, seed=0)
