"""Measures the peak memory of a block of code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Peak:
    """Result of `peak_memory`; it has its values when the block ends.

    Parameters
    ----------
    n_bytes : int
        Peak memory in bytes.
    kind : str
        "cuda": allocated on the GPU by torch; "rss": resident memory of the process during the block; "rss_process":
        resident memory since the process began, where the system cannot reset the peak.
    """

    n_bytes: int = 0
    kind: str = "rss"


@contextmanager
def peak_memory(device: str) -> Iterator[Peak]:
    """Measure the peak memory until the block ends."""
    peak = Peak()
    if device.startswith("cuda"):
        import torch

        torch.cuda.reset_peak_memory_stats()
        yield peak
        peak.n_bytes, peak.kind = int(torch.cuda.max_memory_allocated()), "cuda"
        return
    peak.kind = "rss" if _reset_peak() else "rss_process"
    yield peak
    peak.n_bytes = _peak_rss()


def _reset_peak() -> bool:
    """Reset the kernel's peak to the present use (Linux); return False where that is not possible."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _peak_rss() -> int:
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024  # macOS counts bytes, Linux kibibytes
