"""Peak of the memory that a process itself holds, apart from the pages of files that it has mapped (Linux).

Pages of a mapped checkpoint count as resident too, but the system takes them back whenever it needs memory. What a
process holds is its anonymous memory: `RssAnon` of ``/proc/self/status``. The kernel keeps no peak of it, so a thread
reads it every two milliseconds.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_EVERY = 0.002  # seconds


def held() -> int:
    """Return the bytes of anonymous memory that this process holds now."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


@dataclass
class AnonymousPeak:
    """Result of `anonymous_peak`; it has its values when the block ends."""

    before: int  # bytes, at the beginning of the block
    most: int  # bytes, during the block

    @property
    def added(self) -> int:
        """Bytes that the block needed at its peak, on top of what was there before."""
        return self.most - self.before


@contextmanager
def anonymous_peak() -> Iterator[AnonymousPeak]:
    """Watch the process's anonymous memory until the block ends."""
    began, ended = held(), threading.Event()
    peak = AnonymousPeak(before=began, most=began)

    def watch() -> None:
        while not ended.wait(_EVERY):
            peak.most = max(peak.most, held())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield peak
    finally:
        ended.set()
        watcher.join()
        peak.most = max(peak.most, held())
