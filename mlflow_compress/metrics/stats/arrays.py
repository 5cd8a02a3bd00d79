"""Array types of the package, and checks that refuse NaN and numbers too large to calculate with."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mlflow_compress.errors import DataError

Float = npt.NDArray[np.float64]
Int = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]
Objects = npt.NDArray[Any]


def finite(name: str, values: npt.ArrayLike, *, ndim: int = 1) -> Float:
    """Return `values` as float64; no values, another number of dimensions, NaN or infinity are a `DataError`."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != ndim or array.size == 0:
        raise DataError(f"{name} must be a non-empty array with {ndim} dimension(s)", got=f"shape {array.shape}")
    # The sum of values with a NaN or an infinity is not finite: one pass without a mask in the good case.
    with np.errstate(over="ignore", invalid="ignore"):
        total = array.sum()
    if not np.isfinite(total) and not np.isfinite(array).all():
        bad = np.argwhere(~np.isfinite(array))
        raise DataError(f"{name} holds {len(bad)} NaN or infinite value(s), the first at {bad[0].tolist()}")
    return array


_LARGEST = 1e70
"""Largest magnitude of what has a variance: a sum of fourth powers, as that of a variance needs it, is then finite."""


def moderate(name: str, values: npt.ArrayLike, *, ndim: int = 1) -> Float:
    """Return `values` as `finite` does; a magnitude above `_LARGEST` is a `DataError` too."""
    array = finite(name, values, ndim=ndim)
    largest = max(float(array.max()), -float(array.min()))
    if largest > _LARGEST:
        allowed = f"numbers from {-_LARGEST:g} to {_LARGEST:g}"
        raise DataError(f"{name} holds values that are too large for an interval", allowed=allowed, got=largest)
    return array


def same_length(**arrays: Sequence[Any] | npt.NDArray[Any]) -> int:
    """Return the common length of the named arrays; a `DataError` names the lengths where they differ."""
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) != 1:
        raise DataError("Paired arrays must have one length", got=str(lengths))
    return next(iter(lengths.values()))
