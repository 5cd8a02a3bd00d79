"""When a failed call is tried again, and after how long."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime

FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0
LONGEST_RETRY_AFTER = 600.0
"""A server that asks for a longer pause than these seconds has said no."""
_PASSING = frozenset({408, 409, 425, 429})


def may_pass(status: int) -> bool:
    """Return whether a response's status stands for a failure that may pass: 408, 409, 425, 429 and 5xx."""
    return status in _PASSING or status >= 500


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that a server asks to wait (`retry-after-ms`, or `Retry-After` in seconds or as a date)."""
    for name, unit in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        try:
            seconds = float(headers.get(name, "")) / unit
        except ValueError:
            continue
        if 0 <= seconds < float("inf"):
            return seconds
    try:
        date = parsedate_to_datetime(headers.get("retry-after", ""))
    except ValueError:
        return None
    return max(0.0, (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp() - time.time())


def back_off(retry: int) -> float:
    """Return the seconds before retry 0, 1, ...: doubled each time, and drawn at random between half and all of it.

    Without the random part, calls that failed together would come back together.
    """
    longest = min(FIRST_WAIT * 2.0 ** min(retry, 30), LONGEST_WAIT)
    return longest * random.uniform(0.5, 1.0)  # no result depends on it, so it has no seed
