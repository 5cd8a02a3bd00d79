"""An event loop in a thread of its own, so that callers of asynchronous work stay synchronous, in a notebook too."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class LoopInThread:
    """Runs asynchronous work in its own thread.

    Parameters
    ----------
    at_once : int
        Most things that `for_all` works on at the same time.
    """

    def __init__(self, at_once: int) -> None:
        self._places = asyncio.Semaphore(at_once)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="endpoint", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, last: Callable[[], Awaitable[None]]) -> None:
        """End what an interruption has left, await `last`, and end the thread."""

        async def end() -> None:
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            await last()

        try:
            self._wait_for(end())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def for_all(self, function: Callable[[T], Awaitable[R]], things: Iterable[T]) -> list[R]:
        """Return an asynchronous function's results for all things, at most `concurrency` at the same time.

        An error, or Ctrl-C, ends the calls under way; what other calls have returned before is the function's to keep.
        """

        async def one(thing: T) -> R:
            async with self._places:
                return await function(thing)

        async def everything() -> list[R]:
            tasks = [asyncio.ensure_future(one(thing)) for thing in things]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

        return self._wait_for(everything())

    def _wait_for(self, work: Coroutine[Any, Any, R]) -> R:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C; `__exit__` waits for the calls to end
            raise
