"""Description of one stored tensor, for every file format."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class StoredTensor:
    """Type, shape and size of one tensor in a checkpoint's file.

    Parameters
    ----------
    dtype : str
        Element type as its format names it ("BF16", "I32", "Q4_0", ...).
    shape : tuple of int
        Shape as stored; a packed weight has another shape than the weight itself.
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
