"""Mathematics with a Python tool: the policy may run programs before it answers in ``\\boxed{…}``.

    <python>print(sum(range(1, 101)))</python>   →   observation: 5050   →   … \\boxed{5050}

Programs run in :mod:`megatron_sao.rollout.sandbox`; what they print, their error, or the limit they hit is the
observation. Answers are compared with ``task.label`` by ``math-verify``: as values, so 1/2 equals 0.5. The reward is 1
for a right answer, else 0; no answer at all is a wrong one.
"""

from __future__ import annotations

import asyncio
import importlib.util
import multiprocessing
import re
import resource
import signal
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING, Any

from megatron_sao.config import ConfigError
from megatron_sao.data.tasks import Task
from megatron_sao.rollout.environment import EnvironmentFailure
from megatron_sao.rollout.environments.chat import ChatMarkup
from megatron_sao.rollout.sandbox import Limits, SandboxUnavailable, run_python

if TYPE_CHECKING:
    from megatron_sao.rollout.session import Session

SYSTEM = (
    "Solve the problem. You may run Python by writing <python>code</python>: what it prints comes back to you. Each "
    "program starts afresh. Put the final answer in \\boxed{}."
)
CALL_END = "</python>"
_CALL = re.compile(r"<python>(.*?)</python>", re.DOTALL)
_FENCE = re.compile(r"\A\s*```(?:python)?\n|\n?```\s*\Z")
CHECK_SECONDS = 5  # for parsing or comparing; longer counts as wrong
CHECK_MEMORY = 1 << 32


def program(turn: str) -> str | None:
    """The code of a turn's last call, without the fence that models put around it; None if nothing is called."""
    calls = _CALL.findall(turn)
    return _FENCE.sub("", calls[-1]) if calls else None


def equal(label: str, answer: str) -> bool:
    """Whether ``answer``, text with the result in ``\\boxed{}``, has the value of ``label``. Only in a checker process:
    math-verify's own time limits need a main thread, and what they cannot interrupt kills the process."""
    from math_verify import parse, verify

    signal.setitimer(signal.ITIMER_PROF, 4 * CHECK_SECONDS)
    try:
        plain = "$" not in label and "\\boxed" not in label
        expected = parse(f"${label}$" if plain else label, parsing_timeout=CHECK_SECONDS)
        return bool(verify(expected, parse(answer, parsing_timeout=CHECK_SECONDS), timeout_seconds=CHECK_SECONDS))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _bound_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (CHECK_MEMORY, CHECK_MEMORY))


def _checkers(count: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("forkserver"), initializer=_bound_memory)


class MathWithPython:
    """The environment: ``task.prompt`` is the problem as text, ``task.label`` its answer, plain or in LaTeX.

    Args:
        tokenizer: see :class:`ChatMarkup`.
        seconds, memory_bytes, output_bytes: of one program; see :class:`megatron_sao.rollout.sandbox.Limits`.
        checkers: processes that compare answers.

    Raises:
        ConfigError: math-verify is not installed.
    """

    def __init__(
        self,
        tokenizer: Any,
        seconds: float = 10.0,
        memory_bytes: int = 1 << 30,
        output_bytes: int = 8192,
        checkers: int = 1,
    ) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError(
                f"rollout.environment = {__name__}:MathWithPython compares answers with the package math-verify, which "
                "is not installed; install what requirements.txt names"
            )
        self._chat = ChatMarkup(tokenizer, "user")
        self._limits = Limits(seconds=seconds, memory_bytes=memory_bytes, output_bytes=output_bytes)
        self._num_checkers = checkers
        self._pool = _checkers(checkers)

    async def run(self, session: Session, task: Task) -> None:
        """Play one episode. Session metrics: ``programs``, ``program_errors`` and ``answered``."""
        session.metrics |= {"programs": 0.0, "program_errors": 0.0, "answered": 0.0}
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task.prompt}]
        session.prompt(self._chat.encode(self._chat.render(messages)))
        while True:
            action = await session.generate(stop_token_ids=[self._chat.end])
            turn = self._chat.read(action)
            code = program(turn)
            if code is None or "\\boxed" in turn.rpartition(CALL_END)[2]:
                session.metrics["answered"] = float("\\boxed" in turn)
                session.finish(float(await self._is_right(str(task.label), turn)))
                return
            session.observe(self._chat.observation(action, await self._run(session, code)))

    async def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _run(self, session: Session, code: str) -> str:
        try:
            result = await run_python(code, self._limits)
        except SandboxUnavailable as error:
            raise EnvironmentFailure(str(error)) from error
        session.metrics["programs"] += 1
        session.metrics["program_errors"] += result.outcome != "ok"
        return self._chat.defused(result.output.rstrip()) or "(no output)"

    async def _is_right(self, label: str, turn: str) -> bool:
        if "\\boxed" not in turn:
            return False
        loop = asyncio.get_running_loop()
        pool = self._pool
        try:
            return await loop.run_in_executor(pool, equal, label, turn)
        except BrokenProcessPool:  # this answer or one beside it was too much for its checker
            if self._pool is pool:
                self._pool = _checkers(self._num_checkers)
        with _checkers(1) as alone:
            try:
                return await loop.run_in_executor(alone, equal, label, turn)
            except BrokenProcessPool:
                return False
