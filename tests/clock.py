"""A clock that only the test moves."""

import asyncio
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import Any

import pytest


class Clock:
    """Stands for the modules `time` and `asyncio` in what is tested: a pause ends at once, and the clock has moved.

    - `happens`: What the test does meanwhile: one of them is called during each pause.
    """

    def __init__(self, *happens: Callable[[], object]) -> None:
        self.now = 1_800_000_000.0
        self.pauses: list[float] = []  # that were asked for
        self.late = 0.0  # how much longer every pause takes: the machine is busy
        self.set_back = 0.0  # how far somebody has set the clock of the day back
        self.happens = iter(happens)

    def drive(self, patch: pytest.MonkeyPatch, module: ModuleType) -> None:
        """Give a module this clock."""
        patch.setattr(module, "time", self)
        if hasattr(module, "asyncio"):
            patch.setattr(module, "asyncio", _Asyncio(self))

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now - self.set_back

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds + self.late
        next(self.happens, lambda: None)()


class _Asyncio:
    """The module `asyncio`, whose pauses and time-outs are the clock's."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        self._clock.sleep(seconds)

    async def wait_for(self, awaitable: Awaitable[Any], seconds: float) -> Any:
        """Return what is there already. Otherwise the time is over."""
        waiting = asyncio.ensure_future(awaitable)
        await asyncio.sleep(0)  # one turn, in which it may see that it is there
        if waiting.done():
            return waiting.result()
        waiting.cancel()
        self._clock.sleep(seconds)
        raise TimeoutError

    async def wait(self, tasks: Any, *, timeout: float | None = None, **how: Any) -> Any:
        """Wait for tasks: while they work, nobody sleeps, and the clock stands still."""
        return await asyncio.wait(tasks, **how)
