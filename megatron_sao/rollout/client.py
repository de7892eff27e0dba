"""The client of SGLang's ``/generate``: token ids in, token ids with log-probabilities and versions out.

What would kill a server or come back silently wrong is refused before it is sent. A failing, aborting, hung or
vanished engine costs a retry: the turn is sent again, with the tokens already sampled as its prefix.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import math
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import aiohttp
import numpy as np

from megatron_sao.buffer.client import EngineInfo
from megatron_sao.config import ConfigError, SamplingConfig
from megatron_sao.data.routing import RoutingShape, continued

log = logging.getLogger(__name__)

# SGLang silently returns fewer tokens than asked for beyond context - 2, and refuses prompts beyond context - 7;
# any prefix of a sequence may have to be sent again as a prompt.
CONTEXT_MARGIN = 7
REGISTRY_SECONDS = 1.0  # how long a list of engines is believed
WAIT_SECONDS = 0.1  # between looks at the registry while no engine is clean (a push is under way)
COOL_OFF = 5.0  # seconds an engine that failed a request is passed over, where there are others
LOAD_FACTOR = 1.25  # no engine gets a new episode while it has more than this many times its even share of requests
ABORT_SECONDS = 5.0  # for telling an engine that nobody waits for a request any more


class RequestRefused(ValueError):
    """A request that no engine may see; it would be refused, cut short, or kill the server."""


class EngineError(RuntimeError):
    """The engines failed a turn more often than ``rollout.max_retries`` allows."""


class _AttemptFailed(Exception):
    """One engine failed one request; ``counts`` is false when it never received it."""

    def __init__(self, message: str, counts: bool = True) -> None:
        super().__init__(message)
        self.counts = counts


class ModelLimits(NamedTuple):
    """What a request must respect: token ids lie in [0, vocab_size), a sequence stays below context."""

    vocab_size: int
    context: int

    @classmethod
    def of(cls, model_path: Path, context_length: int | None = None) -> ModelLimits:
        """Read from ``config.json``; ``context_length`` is SGLang's flag, which overrides the model's own.

        Raises:
            ConfigError: no such file, or a size missing from it.
        """
        path = Path(model_path) / "config.json"
        try:
            config = json.loads(path.read_text())
        except OSError as error:
            raise ConfigError(f"model.path = {str(model_path)!r}: cannot read {path}: {error.strerror}") from error
        config = config.get("text_config", config)
        try:
            return cls(config["vocab_size"], context_length or config["max_position_embeddings"])
        except KeyError as error:
            raise ConfigError(f"{path} has no {error.args[0]!r}; this is not a causal language model") from error


@dataclass
class Generation:
    """One turn as sampled. ``versions`` are half-open spans over ``token_ids``; log-probs are at the
    sampling temperature, under the weights of each token's own version, over the full vocabulary or, where sampling is
    truncated, over ``support``: the ids that could have been sampled in place of each token.

    ``routed_experts`` uint8 or uint16 [tokens, MoE layers, top_k] covers the request's own tokens too, from the first
    one on, and all but the last sampled. Where a push interrupted the turn it is what the engine computed when it took
    the turn up again: the routing that the tokens sampled afterwards attend to."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[str, int, int]] = field(default_factory=list)
    finish_reason: str = ""  # "stop" or "length"
    engine: str = ""  # id of the engine that finished it
    retries: int = 0
    support: list[list[int]] = field(default_factory=list)  # empty over the full vocabulary
    routed_experts: np.ndarray | None = None  # for routing replay

    def append(self, part: Generation) -> None:
        offset = len(self.token_ids)
        self.token_ids += part.token_ids
        self.logprobs += part.logprobs
        self.support += part.support
        self.routed_experts = continued(self.routed_experts, part.routed_experts)
        self.versions += [(version, start + offset, end + offset) for version, start, end in part.versions]
        self.finish_reason, self.engine = part.finish_reason, part.engine


class EngineClient:
    """Generates on whichever engine is clean; an async context manager, one per process.

    Args:
        limits: vocabulary and context of the served model.
        token: bearer token of the servers.
        list_engines: the registry, e.g. ``AsyncBufferClient.engines``.
        max_retries: failed attempts one turn may cost. Waiting for a clean engine is not an attempt, and
            neither is one that could not even be reached: the episode's timeout bounds those.
        routing: of the model, to have the engines report the routed experts of every token.
        share_by_version: for engines that keep cached prefixes over a weight update (``weights.pause: in_place``): a
            request shares only what the weights that its engine serves have computed.
    """

    def __init__(
        self,
        limits: ModelLimits,
        token: str,
        list_engines: Callable[[], Awaitable[Sequence[EngineInfo]]],
        max_retries: int = 5,
        routing: RoutingShape | None = None,
        share_by_version: bool = False,
    ) -> None:
        self.limits = limits
        self._routing, self._share_by_version = routing, share_by_version
        self._headers = {"Authorization": f"Bearer {token}"}
        self._list_engines = list_engines
        self._max_retries = max_retries
        self._engines: list[EngineInfo] = []
        self._aborts: set[asyncio.Task[None]] = set()
        self._failed_at: dict[str, float] = {}
        self._listed_at = -math.inf
        self._listing = asyncio.Lock()
        self._in_flight: Counter[str] = Counter()
        self._warned_at: dict[str, float] = {}

    async def __aenter__(self) -> EngineClient:
        # No timeout for an answer: a long turn takes as long as it takes, and a paused engine holds a request for as
        # long as a push takes. A request ends early when the registry says that its engine is sick or gone.
        self._http = aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*self._aborts)
        await self._http.close()

    @property
    def available(self) -> bool:
        """Whether an engine was clean when last looked."""
        return any(engine.state == "clean" for engine in self._engines)

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: SamplingConfig,
        max_new_tokens: int,
        stop_token_ids: Sequence[int] = (),
        prefer: str | None = None,
    ) -> Generation:
        """Sample up to ``max_new_tokens`` after ``input_ids``; a stop token ends the turn and is part of it.

        There is no time limit here: cancel the call, and the engine is told to stop.

        Args:
            prefer: id of the engine that has this episode's prefix in its cache.

        Raises:
            RequestRefused: by the guards here, before sending, or by the engine (HTTP 400).
            EngineError: more than ``max_retries`` attempts failed.
        """
        self._guard(input_ids, max_new_tokens, stop_token_ids)
        done = Generation()
        while True:
            engine = await self._pick(prefer, input_ids)
            parameters = _sampling_params(sampling, max_new_tokens - len(done.token_ids), stop_token_ids)
            try:
                done.append(await self._request(engine, [*input_ids, *done.token_ids], parameters, sampling.truncated))
                if done.finish_reason != "abort":
                    self._failed_at.pop(engine.id, None)
                    return done
                if len(done.token_ids) == max_new_tokens:
                    done.finish_reason = "length"
                    return done
                raise _AttemptFailed(f"aborted the request after {len(done.token_ids)} tokens")
            except _AttemptFailed as error:
                self._warn(engine, error)
                done.retries += error.counts
                if done.retries > self._max_retries:
                    raise EngineError(
                        f"a turn failed {done.retries} times (rollout.max_retries = {self._max_retries}); "
                        f"last: engine {engine.id} at {engine.url} {error}"
                    ) from error
            self._failed_at[engine.id] = time.monotonic()
            self._listed_at = -math.inf
            await asyncio.sleep(min(0.25 * 2**done.retries, 8.0))

    def _warn(self, engine: EngineInfo, error: _AttemptFailed) -> None:
        """At most one line per engine in five seconds: every episode in flight meets the same outage."""
        now = time.monotonic()
        if now - self._warned_at.get(engine.id, -math.inf) > 5.0:
            self._warned_at[engine.id] = now
            log.warning("engine %s at %s %s; its turns are sent again", engine.id, engine.url, error)

    def _guard(self, input_ids: Sequence[int], max_new_tokens: int, stop_token_ids: Sequence[int]) -> None:
        vocab_size, context = self.limits
        if not input_ids:
            raise RequestRefused("input_ids is empty: the prompt encodes to nothing, which kills the server")
        for name, ids in (("input_ids", input_ids), ("stop_token_ids", stop_token_ids)):
            if min(ids, default=0) < 0 or max(ids, default=0) >= vocab_size:
                index = next(i for i, token in enumerate(ids) if not 0 <= token < vocab_size)
                raise RequestRefused(
                    f"{name}[{index}] = {ids[index]} is outside the vocabulary [0, {vocab_size}), which kills the "
                    "server; encode with the tokenizer of model.path"
                )
        if max_new_tokens < 1:
            raise RequestRefused(f"max_new_tokens = {max_new_tokens}: at least one token must be asked for")
        if len(input_ids) + max_new_tokens > context - CONTEXT_MARGIN:
            raise RequestRefused(
                f"{len(input_ids)} prompt tokens + max_new_tokens = {max_new_tokens} exceed the context of {context} "
                f"less {CONTEXT_MARGIN}; lower rollout.max_tokens"
            )

    async def _pick(self, prefer: str | None, input_ids: Sequence[int]) -> EngineInfo:
        """The preferred engine, else the one that the prompt belongs to; waits while none is clean."""
        while not (clean := [engine for engine in await self._listed() if engine.state == "clean"]):
            await asyncio.sleep(WAIT_SECONDS)
        recently = time.monotonic() - COOL_OFF
        sound = [engine for engine in clean if self._failed_at.get(engine.id, -math.inf) < recently] or clean
        return next((engine for engine in sound if engine.id == prefer), None) or self._place(sound, input_ids)

    def _place(self, engines: list[EngineInfo], input_ids: Sequence[int]) -> EngineInfo:
        """Rendezvous hashing with bounded load. Every worker sends the same prompt to the same engine, which then has
        it cached; an engine that leaves or joins moves only the prompts that were or become its own; and an engine
        that has more than its share passes new episodes on to the next in the prompt's order."""
        prompt = np.asarray(input_ids, "<i4").tobytes()

        def rank(engine: EngineInfo) -> bytes:
            return hashlib.blake2b(prompt, digest_size=8, key=engine.id.encode()[:64]).digest()

        busy = sum(self._in_flight[engine.id] for engine in engines)
        most = math.ceil(LOAD_FACTOR * (busy + 1) / len(engines))
        return next(e for e in sorted(engines, key=rank) if self._in_flight[e.id] < most)

    async def _listed(self) -> list[EngineInfo]:
        async with self._listing:
            now = time.monotonic()
            if now - self._listed_at > (REGISTRY_SECONDS if self.available else WAIT_SECONDS / 2):
                self._engines = list(await self._list_engines())
                self._listed_at = now
            return self._engines

    async def _lost(self, engine: EngineInfo) -> str:
        """Returns, with the reason, once the registry says that ``engine`` will not answer what it was sent. One that
        is dirty will: a push is under way."""
        while True:
            await asyncio.sleep(REGISTRY_SECONDS)
            now = next((e for e in await self._listed() if e.id == engine.id), None)
            if now is None or now.url != engine.url:
                return "has been replaced"
            if now.state in ("sick", "down"):
                return f"is {now.state}"

    async def _request(
        self, engine: EngineInfo, input_ids: list[int], parameters: dict[str, Any], truncated: bool
    ) -> Generation:
        """Raises _AttemptFailed when the engine fails the request or is lost meanwhile."""
        rid = uuid.uuid4().hex
        answer = asyncio.create_task(self._post(engine, rid, input_ids, parameters, truncated))
        lost = asyncio.create_task(self._lost(engine))
        self._in_flight[engine.id] += 1
        try:
            await asyncio.wait((answer, lost), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise _AttemptFailed(lost.result())
            return answer.result()
        finally:
            self._in_flight[engine.id] -= 1
            lost.cancel()
            if not answer.done():
                answer.cancel()
                abort = asyncio.create_task(self._abort(engine, rid))
                self._aborts.add(abort)
                abort.add_done_callback(self._aborts.discard)

    async def _abort(self, engine: EngineInfo, rid: str) -> None:
        """Best effort: the engine would notice by itself that the connection is closed, but only after seconds."""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with asyncio.timeout(ABORT_SECONDS):
                (await self._http.post(f"{engine.url}/abort_request", json={"rid": rid})).release()

    async def _post(
        self, engine: EngineInfo, rid: str, input_ids: list[int], parameters: dict[str, Any], truncated: bool
    ) -> Generation:
        body = {
            "rid": rid,
            "input_ids": input_ids,
            "sampling_params": parameters,
            "return_logprob": True,
            "logprob_start_len": -1,
        }
        if truncated:
            body["return_sampling_mask"] = True
        if self._routing is not None:
            body["return_routed_experts"] = True
        if self._share_by_version:
            body["extra_key"] = engine.version
        try:
            async with self._http.post(f"{engine.url}/generate", json=body) as response:
                if response.status == 400:
                    raise RequestRefused(f"engine {engine.id} refused a request: {await _beginning(response)}")
                if response.status != 200:
                    raise _AttemptFailed(f"answered HTTP {response.status}: {await _beginning(response)}")
                answer = await response.json()
                try:
                    generation = _parse(answer, engine.id, truncated)
                except (LookupError, TypeError, AttributeError) as error:
                    raise _AttemptFailed(f"answered in another form ({error!r}): {answer!r:.200}") from error
                if len(generation.token_ids) > parameters["max_new_tokens"]:
                    raise _AttemptFailed(f"answered {len(generation.token_ids)} tokens, more than it was asked for")
                if self._share_by_version and generation.versions and generation.versions[0][0] != engine.version:
                    raise _AttemptFailed(
                        f"began with weights {generation.versions[0][0]} and not {engine.version}, whose prefixes it "
                        "may have shared",
                        counts=False,
                    )
                if self._routing is not None:
                    generation = _routed(generation, answer, len(input_ids), self._routing)
                return generation
        except aiohttp.ClientConnectorError as error:
            raise _AttemptFailed(f"cannot be reached: {error}", counts=False) from error
        except (aiohttp.ClientError, TimeoutError, json.JSONDecodeError, UnicodeDecodeError) as error:
            raise _AttemptFailed(f"broke off: {type(error).__name__}: {error}") from error


async def _beginning(response: aiohttp.ClientResponse) -> str:
    return (await response.text(errors="replace"))[:500]


def _sampling_params(sampling: SamplingConfig, max_new_tokens: int, stop_token_ids: Sequence[int]) -> dict[str, Any]:
    """Every field that shapes the distribution is stated, so that no generation_config.json can change it."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "max_new_tokens": max_new_tokens,
        "stop_token_ids": list(stop_token_ids),
    }


def _parse(answer: dict[str, Any], engine: str, truncated: bool) -> Generation:
    """An answer of ``/generate`` whose parts agree with each other, or _AttemptFailed."""
    meta = answer["meta_info"]
    token_ids = answer["output_ids"]
    logprobs = meta.get("output_token_logprobs") or []
    spans = [(span["version"], span["start"], span["end"]) for span in meta.get("weight_versions") or []]
    reason = meta["finish_reason"]["type"]
    if [entry[1] for entry in logprobs] != token_ids:
        raise _AttemptFailed(f"answered {len(token_ids)} tokens but {len(logprobs)} log-probabilities of others")
    if not token_ids:
        if reason != "abort":
            raise _AttemptFailed(f"answered no tokens (finish_reason {reason!r})")
        return Generation(finish_reason=reason, engine=engine)
    edges = [0, *(end for _, _, end in spans)]
    if [start for _, start, _ in spans] != edges[:-1] or edges[-1] != len(token_ids):
        raise _AttemptFailed(f"answered weight_versions {spans} that do not cover {len(token_ids)} tokens")
    values = [entry[0] for entry in logprobs]
    support: list[list[int]] = []
    if truncated:
        support, values = (meta.get(f"output_token_sampling_{name}") or [] for name in ("mask", "logprobs"))
        if not len(support) == len(values) == len(token_ids):
            raise _AttemptFailed(
                f"answered {len(support)} sampling supports and {len(values)} log-probabilities over them for "
                f"{len(token_ids)} tokens"
            )
        if any(token not in (ids or []) for token, ids in zip(token_ids, support, strict=True)):
            raise _AttemptFailed(f"answered a sampling support that does not hold its {len(token_ids)} tokens")
    # JSON has no infinity: SGLang writes a log-probability of -inf as null.
    values = [-math.inf if value is None else float(value) for value in values]
    return Generation(token_ids, values, spans, reason, engine, support=support)


def _routed(generation: Generation, answer: dict[str, Any], prompt_tokens: int, routing: RoutingShape) -> Generation:
    """``generation`` with the routing of its tokens, or _AttemptFailed."""
    report = answer["meta_info"].get("routed_experts")
    if report is None:
        if generation.finish_reason == "abort":  # while it waited to be computed anew: its tokens cannot be replayed
            return Generation(finish_reason="abort", engine=generation.engine)
        raise _AttemptFailed(
            "reported no routed experts: algorithm.routing_replay needs SGLang's enable_return_routed_experts"
        )
    try:
        experts = routing.decode(report, prompt_tokens + len(generation.token_ids) - 1)
    except ValueError as error:
        raise _AttemptFailed(f"answered {error}") from error
    return replace(generation, routed_experts=experts)
