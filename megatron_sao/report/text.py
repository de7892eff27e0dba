"""Token ids as text, without loading a model library."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer


class TokenText:
    """The text of token ids; ids in brackets where ``model_path`` is not here or has no ``tokenizer.json``."""

    def __init__(self, model_path: Path | None) -> None:
        file = model_path / "tokenizer.json" if model_path else None
        self._tokenizer = Tokenizer.from_file(str(file)) if file and file.is_file() else None

    def pieces(self, ids: list[int]) -> list[str]:
        """The text that each token adds to the one before it: some tokenizers drop a leading space otherwise."""
        if self._tokenizer is None:
            return [f"[{id}]" for id in ids]
        texts = []
        for before, id in zip([[], *([i] for i in ids)], ids, strict=False):
            alone, both = self._decode(before), self._decode([*before, id])
            texts.append(both.removeprefix(alone) if both.startswith(alone) else self._decode([id]))
        return texts

    def text(self, ids: list[int]) -> str:
        return "".join(self.pieces(ids)) if self._tokenizer is None else self._decode(ids)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""
