"""How visits are shared among workers when there are fewer than are asked for."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping

FORGET_AFTER = 3.0  # seconds; a waiting worker asks again at least once a second


def fair_share(worker: str, available: int, wanted: Mapping[str, int], held: Mapping[str, int]) -> int:
    """How many of ``available`` visits go to ``worker`` if each next one goes to whoever holds the fewest.

    Args:
        wanted: visits asked for, by worker, ``worker`` among them; of two that hold as many the one named first wins.
        held: leases out, by worker.
    """
    if len(wanted) == 1:
        return min(available, wanted[worker])
    queue = [(held.get(name, 0), order, name) for order, name in enumerate(wanted)]
    heapq.heapify(queue)
    given = dict.fromkeys(wanted, 0)
    while available and queue:
        holds, order, name = heapq.heappop(queue)
        given[name] += 1
        available -= 1
        if given[name] < wanted[name]:
            heapq.heappush(queue, (holds + 1, order, name))
    return given[worker]


class Demand:
    """Who is waiting for visits now, in memory: after a restart everyone asks again within a second."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._wanted: dict[str, tuple[int, float]] = {}  # by worker: visits, time of the last call; the oldest first

    def ask(self, worker: str, wanted: int) -> dict[str, int]:
        """``worker`` asks for ``wanted`` visits. Returns what everyone waiting wants, by worker."""
        now = self._clock()
        for name, (_, asked) in list(self._wanted.items()):
            if now - asked > FORGET_AFTER:
                del self._wanted[name]
        self._wanted[worker] = (wanted, now)  # a worker that has been waiting keeps its place
        return {name: visits for name, (visits, _) in self._wanted.items()}

    def served(self, worker: str) -> None:
        """``worker`` got something and is not waiting any more."""
        self._wanted.pop(worker, None)
