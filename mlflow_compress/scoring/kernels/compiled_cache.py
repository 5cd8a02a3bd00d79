"""Compiled functions whose file in numba's cache may be damaged: then they are compiled again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from numba import njit
from numba.core.caching import FunctionCache

logger = logging.getLogger(__name__)


class _RepairedCache(FunctionCache):  # type: ignore[misc]
    """numba's cache of one function, which is emptied where it cannot be read. numba would raise whatever it found."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the compiled code; None where it is to be compiled."""
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:  # noqa: BLE001 - a damaged file can raise anything
            logger.warning("The compiled code in %s is damaged, and is made again: %s", self.cache_path, error)
            self.flush()
            return None


def cached(function: Callable[..., Any]) -> Any:
    """Return a function that is compiled at its first call, or taken from numba's cache."""
    compiled = njit(error_model="numpy", nogil=True, cache=True)(function)
    compiled._cache = _RepairedCache(function)
    return compiled
