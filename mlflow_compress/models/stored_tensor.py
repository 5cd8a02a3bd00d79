"""One tensor as a checkpoint stores it, whatever the format of the file."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint's file.

    Parameters
    ----------
    dtype : str
        Element type as its format names it ("BF16", "I32", "Q4_0", ...).
    shape : tuple of int
        Shape as stored, which for a packed weight is not the weight's own.
    n_bytes : int
        Bytes of its data.
    """

    dtype: str
    shape: tuple[int, ...]
    n_bytes: int

    @property
    def elements(self) -> int:
        """Number of stored elements."""
        return math.prod(self.shape)
