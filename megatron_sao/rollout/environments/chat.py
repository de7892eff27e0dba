"""Chat templates, turn by turn: an environment appends observations to what was sampled and never renders it again."""

from __future__ import annotations

from typing import Any


class ChatMarkup:
    """What a model's chat template puts around a turn that is not the policy's.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template in which an assistant's turn ends with its
            end-of-sequence token.
        role: of observations, e.g. "tool".

    Raises:
        ValueError: the template does not show a turn of that role, or ends an assistant's turn otherwise.
    """

    def __init__(self, tokenizer: Any, role: str) -> None:
        self._tokenizer = tokenizer
        self.end = tokenizer.eos_token_id
        action, observation = "THE-ACTION", "THE-OBSERVATION"
        messages = [("user", "THE-QUESTION"), ("assistant", action), (role, observation)]
        text = self.render([{"role": name, "content": content} for name, content in messages])
        before, found, self._after = text.partition(action)[2].partition(observation)
        if not found or not before.startswith(tokenizer.eos_token):
            raise ValueError(
                f"the chat template renders a turn of {role!r} as {text!r}; use a model whose template shows its text "
                f"and ends an assistant's turn with the tokenizer's eos_token {tokenizer.eos_token!r}"
            )
        self._before = before.removeprefix(tokenizer.eos_token)

    def render(self, messages: list[dict[str, str]]) -> str:
        return self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def read(self, action: list[int]) -> str:
        """A sampled turn as text, without the token that ends it."""
        return self._tokenizer.decode(action[:-1] if action[-1] == self.end else action)

    def observation(self, action: list[int], text: str) -> list[int]:
        """The tokens to append after ``action``: the observation, up to where the policy goes on."""
        # A turn that ran into its length limit lacks the end token, so the template's own is put in.
        opening = "" if action[-1] == self.end else self._tokenizer.eos_token
        return self.encode(f"{opening}{self._before}{text}{self._after}")

    def defused(self, text: str) -> str:
        """``text`` from outside with the tokenizer's special tokens broken up, so that it cannot end or open turns."""
        for token in self._tokenizer.all_special_tokens:
            text = text.replace(token, f"{token[:1]} {token[1:]}")
        return text
