"""A stand-in for SGLang that samples in this process: many episodes in lockstep on the transformers model.

Sessions, environments and the player are the product's own; only :class:`EngineClient` is replaced. Every episode is a
row of one batch. All rows stand at the same position, so nothing is padded: a step feeds every row as many tokens as
all of them know, and rows whose known tokens end there sample their next one. The KV cache lives as long as the play.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from megatron_sao.config import SamplingConfig
from megatron_sao.rollout.client import CONTEXT_MARGIN, Generation, ModelLimits, RequestRefused

ENGINE_ID = "in-process"
COMPACT_AT = 0.125  # share of rows that have ended; compacting copies the cache, about what one step reads

_row: ContextVar[int] = ContextVar("row")  # of the episode whose code is running


@dataclass
class _Turn:
    """A row's turn in progress: ``tokens`` are all that are known, sampled ones included."""

    tokens: list[int]
    start: int  # where the action begins
    end: int  # where the limit ends it
    stops: frozenset[int]
    temperature: float
    answer: asyncio.Future[Generation]
    logprobs: list[float] = field(default_factory=list)


class InProcessEngine:
    """Stands in for :class:`EngineClient` behind a session. Sampling is float32, over the full vocabulary.

    Args:
        path: Hugging Face model directory.
        version: weight version recorded with every turn, "incarnation.n".
    """

    def __init__(self, path: Path, version: str = "0.0") -> None:
        # With grouped_mm, the default where there are experts, the fastest at 32 and 64 rows on one CPU core.
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
        self.model = model.eval()
        self.limits = ModelLimits.of(path)
        self.version = version
        self._eos = _eos_token_ids(self.model)
        self._playing = False

    def load_weights(self, state: Mapping[str, Tensor], version: str) -> None:
        """Take over weights named as in the model's safetensors files. Call between plays.

        Raises:
            ValueError: a weight is missing, unknown or of another shape; nothing has been changed then.
        """
        left = dict(state)
        copies = []
        for name, target in self.model.state_dict().items():
            if name == "lm_head.weight" and name not in left and self.model.config.tie_word_embeddings:
                continue
            value = _take(left, name)
            if value.shape != target.shape:
                raise ValueError(f"{name} has shape {tuple(value.shape)}; the model's is {tuple(target.shape)}")
            copies.append((target, value))
        if left:
            raise ValueError(f"the model has no weight {min(left)!r} ({len(left)} unknown in all)")
        with torch.no_grad():
            for target, value in copies:
                target.copy_(value)
        self.version = version

    def play[T](self, episodes: Sequence[Callable[[], Coroutine[Any, Any, T]]], seed: int) -> list[T]:
        """Run all episodes concurrently, e.g. ``lambda: player.play(task, "train", 0, 0)``; results in order.

        The outcome is a function of the weights, the episodes and the seed: row i uses the i-th row of one table of
        uniforms, by position, so neither scheduling nor what other rows do decides what it draws.

        Raises:
            Whatever the first failing episode raises; the others are cancelled.
        """
        return asyncio.run(self._play(episodes, seed))

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: SamplingConfig,
        max_new_tokens: int,
        stop_token_ids: Sequence[int] = (),
        prefer: str | None = None,
    ) -> Generation:
        """As :meth:`EngineClient.generate`, from inside an episode of :meth:`play`.

        Raises:
            RequestRefused: outside a play, beyond the context, or not a continuation of the episode's last turn.
        """
        if sampling.truncated:
            raise RequestRefused(f"top_k = {sampling.top_k}: the in-process engine samples the full vocabulary only")
        row = _row.get(None)
        if row is None or not self._playing:
            raise RequestRefused("generate was called outside InProcessEngine.play")
        if row in self._turns:
            raise RequestRefused("an episode asked for two turns at once")
        self._guard(row, input_ids, max_new_tokens)
        turn = _Turn(
            tokens=list(input_ids),
            start=len(input_ids),
            end=len(input_ids) + max_new_tokens,
            stops=self._eos.union(stop_token_ids),
            temperature=sampling.temperature,
            answer=asyncio.get_running_loop().create_future(),
        )
        self._turns[row] = turn
        self._rests()
        try:
            return await turn.answer
        finally:
            if self._turns.get(row) is turn:  # cancelled, e.g. by the episode's timeout
                del self._turns[row]
                self._wakes()

    def _guard(self, row: int, input_ids: Sequence[int], max_new_tokens: int) -> None:
        if not input_ids or max_new_tokens < 1:
            raise RequestRefused(f"{len(input_ids)} prompt tokens, max_new_tokens = {max_new_tokens}: both must be > 0")
        if len(input_ids) + max_new_tokens > self.limits.context - CONTEXT_MARGIN:
            raise RequestRefused(
                f"{len(input_ids)} prompt tokens + max_new_tokens = {max_new_tokens} exceed the context of "
                f"{self.limits.context} less {CONTEXT_MARGIN}; lower rollout.max_tokens"
            )
        fed = self._histories[row]
        if list(input_ids[: len(fed)]) != fed:
            raise RequestRefused("the tokens do not continue the episode's last turn; an episode is one sequence here")

    async def _play[T](self, episodes: Sequence[Callable[[], Coroutine[Any, Any, T]]], seed: int) -> list[T]:
        generator = torch.Generator().manual_seed(seed)
        self._uniforms = torch.rand(len(episodes), self.limits.context, dtype=torch.float64, generator=generator)
        self._turns: dict[int, _Turn] = {}
        self._histories: list[list[int]] = [[] for _ in episodes]  # of each row, to the end of its last turn
        self._busy = len(episodes)  # episodes whose own code runs: neither waiting for tokens nor ended
        self._idle = asyncio.Event()
        self._playing = True
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._episode(row, episode)) for row, episode in enumerate(episodes)]
                group.create_task(self._decode(len(episodes)))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            self._playing = False
        return [task.result() for task in tasks]

    async def _episode[T](self, row: int, episode: Callable[[], Coroutine[Any, Any, T]]) -> T:
        _row.set(row)  # a task has a context of its own
        try:
            return await episode()
        finally:
            self._rests()

    def _rests(self) -> None:
        self._busy -= 1
        if not self._busy:
            self._idle.set()

    def _wakes(self) -> None:
        self._busy += 1
        self._idle.clear()

    async def _decode(self, count: int) -> None:
        """Step by step, until no episode waits for tokens any more."""
        cache = DynamicCache()
        batch = list(range(count))  # rows of the cache, those that ended since the last compaction included
        fed = 0  # tokens of every row that the cache holds
        while True:
            while self._busy:
                await self._idle.wait()
            live = [row for row in batch if row in self._turns]
            if not live:
                return
            if fed and len(live) <= len(batch) * (1 - COMPACT_AT):
                cache.batch_select_indices(torch.tensor([batch.index(row) for row in live]))
                batch = live
            elif not fed:
                batch = live  # an episode may end without a token
            known = min(len(self._turns[row].tokens) for row in live)
            logits = self._forward(batch, fed, known, cache)
            fed = known
            self._sample(batch, fed, logits)

    @torch.inference_mode()
    def _forward(self, batch: list[int], start: int, end: int, cache: DynamicCache) -> Tensor:
        """Feed positions [start, end) of every row. Returns the last one's logits, float32 [rows, vocabulary]."""
        ended = [0] * (end - start)
        ids = [self._turns[row].tokens[start:end] if row in self._turns else ended for row in batch]
        output = self.model(input_ids=torch.tensor(ids), past_key_values=cache, use_cache=True, logits_to_keep=1)
        return output.logits[:, -1]

    def _sample(self, batch: list[int], fed: int, logits: Tensor) -> None:
        """Give the rows that know no more than ``fed`` tokens one more, and answer the turns that this ends."""
        places = [i for i, row in enumerate(batch) if row in self._turns and len(self._turns[row].tokens) == fed]
        rows = [batch[i] for i in places]
        temperatures = torch.tensor([self._turns[row].temperature for row in rows])
        logprobs = (logits[places] / temperatures[:, None]).log_softmax(-1)
        # By inversion: the first token at which the distribution function exceeds the uniform. In float64 and divided
        # by its own end, so that rounding cannot pick a token of probability 0.
        cumulative = logprobs.double().exp().cumsum(-1)
        cumulative /= cumulative[:, -1:].clone()
        tokens = (cumulative <= self._uniforms[rows, fed, None]).sum(-1)
        chosen = logprobs.gather(-1, tokens[:, None])[:, 0]
        for row, token, logprob in zip(rows, tokens.tolist(), chosen.tolist(), strict=True):
            turn = self._turns[row]
            turn.tokens.append(token)
            turn.logprobs.append(logprob)
            if token in turn.stops or len(turn.tokens) == turn.end:
                self._answer(row, "stop" if token in turn.stops else "length")

    def _answer(self, row: int, finish_reason: str) -> None:
        turn = self._turns[row]
        if turn.answer.cancelled():
            return  # the episode has yet to notice; it withdraws its turn itself
        del self._turns[row]
        self._histories[row] = turn.tokens
        versions = [(self.version, 0, len(turn.logprobs))]
        turn.answer.set_result(
            Generation(turn.tokens[turn.start :], turn.logprobs, versions, finish_reason, engine=ENGINE_ID)
        )
        self._wakes()


def _eos_token_ids(model: Any) -> frozenset[int]:
    """The end-of-sequence tokens of both configs, as SGLang reads them."""
    found: set[int] = set()
    for config in (model.config, model.generation_config):
        ids = config.eos_token_id
        found.update([ids] if isinstance(ids, int) else ids or [])
    return frozenset(found)


def _take(left: dict[str, Tensor], name: str) -> Tensor:
    """Remove the weight from ``left``. transformers stacks what the files hold expert by expert."""
    if name in left:
        return left.pop(name)
    stem, _, kind = name.rpartition(".experts.")
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(kind)
    experts = []
    while parts and all(f"{stem}.experts.{len(experts)}.{part}.weight" in left for part in parts):
        prefix = f"{stem}.experts.{len(experts)}"
        experts.append(torch.cat([left.pop(f"{prefix}.{part}.weight") for part in parts]))
    if not experts:
        raise ValueError(f"the weight {name} is missing")
    return torch.stack(experts)
