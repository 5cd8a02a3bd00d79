"""Limits per minute: calls wait until what was sent in the last minute leaves room for them."""

from __future__ import annotations

import asyncio
import time
from collections import deque

MINUTE = 60.0


class PerMinute:
    """At most `limit` units in any minute, for calls of one event loop.

    Parameters
    ----------
    limit : int
        Units (requests or tokens) in a minute; 0 is no limit. A call that alone is larger waits for an empty minute.
    minute : float
        Length of the minute in seconds.
    """

    def __init__(self, limit: int, *, minute: float = MINUTE) -> None:
        self._limit = limit
        self._minute = minute
        self._taken: deque[tuple[float, int]] = deque()
        self._sum = 0
        self._turn = asyncio.Lock()  # first come, first served

    async def take(self, units: int) -> None:
        """Wait until there is room for `units`, and take it."""
        if self._limit == 0:
            return
        async with self._turn:
            while (wait := self._wait(units)) > 0:
                await asyncio.sleep(wait)
            self._taken.append((time.monotonic(), units))
            self._sum += units

    def _wait(self, units: int) -> float:
        now = time.monotonic()
        while self._taken and now - self._taken[0][0] >= self._minute:
            self._sum -= self._taken.popleft()[1]
        if not self._taken or self._sum + units <= self._limit:
            return 0.0
        return max(self._minute - (now - self._taken[0][0]), 0.001)
