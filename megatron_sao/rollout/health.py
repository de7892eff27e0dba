"""Whether a running SGLang server still generates."""

from __future__ import annotations

import asyncio
import time

import httpx

PROBE_SECONDS = 5.0
ANSWER_SECONDS = 5.0  # beyond the server's own limit, for its answer


class HealthProbe:
    """Asks a server for a token again and again, but for while an update of its weights keeps it from generating.

    SGLang's ``/health_generate`` costs a server with requests in flight nothing: any token of theirs is its answer.

    Args:
        timeout: seconds without a token after which the server counts as sick.

    Attributes:
        sick: why the server cannot serve, or None.
    """

    def __init__(self, url: str, token: str, timeout: float) -> None:
        self._url, self._token, self._timeout = url, token, timeout
        self._updating = True
        self._updating_at = 0.0
        self.sick: str | None = None

    def heed(self, state: str) -> None:
        """What the registry says of the engine. A dirty one is being updated or waits for it."""
        self._updating = state == "dirty"
        if self._updating:
            self._updating_at = time.monotonic()

    async def run(self) -> None:
        """Probe until cancelled."""
        headers = {"Authorization": f"Bearer {self._token}"}
        limit = self._timeout + ANSWER_SECONDS
        async with httpx.AsyncClient(headers=headers, timeout=limit, trust_env=False) as http:
            while True:
                await asyncio.sleep(PROBE_SECONDS)
                if self._updating:
                    continue
                began = time.monotonic()
                problem = await self._ask(http)
                if self._updating_at < began:  # an update has not got in between
                    self.sick = problem

    async def _ask(self, http: httpx.AsyncClient) -> str | None:
        try:
            response = await http.get(f"{self._url}/health_generate")
        except httpx.HTTPError as error:
            return f"{self._url}/health_generate: {type(error).__name__} {error}"
        if response.status_code == 200:
            return None
        return f"it gave no token within engine.health_timeout = {self._timeout:g} s (HTTP {response.status_code})"
