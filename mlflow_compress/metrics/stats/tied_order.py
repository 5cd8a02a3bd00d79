"""The order of equally probable options in the published conformal script.

LLM-Uncertainty-Bench sorts with `np.argsort(p)[::-1]`. Its logits are stored in 16 bits, so equal probabilities are
common, numpy's default sort is not stable, and its order of equal values depends on the processor. The oracle's
numbers come from numpy's AVX-512 sort, a bitonic network over eight lanes; it is written out here so that the
`reference` mode gives the same numbers on every machine.
"""

from __future__ import annotations

import numpy as np

from mlflow_compress.errors import UnsupportedError
from mlflow_compress.metrics.stats.arrays import Float, Int

LANES = 8

# Each stage compares a lane with a partner lane and keeps the larger key where the bit is set.
_STAGES = (
    ((1, 0, 3, 2, 5, 4, 7, 6), 0xAA),
    ((3, 2, 1, 0, 7, 6, 5, 4), 0xCC),
    ((1, 0, 3, 2, 5, 4, 7, 6), 0xAA),
    ((7, 6, 5, 4, 3, 2, 1, 0), 0xF0),
    ((2, 3, 0, 1, 6, 7, 4, 5), 0xCC),
    ((1, 0, 3, 2, 5, 4, 7, 6), 0xAA),
)


def network_argsort(values: Float) -> Int:
    """Return the ascending order of each row as numpy's AVX-512 `argsort` gives it, ties included.

    Parameters
    ----------
    values : numpy.ndarray, shape (n, k)
        Finite keys, k at most 8.

    Raises
    ------
    UnsupportedError
        For more than 8 keys a row.

    References
    ----------
    intel/x86-simd-sort, the 64-bit key-index network; equal keys stay where they are.
    """
    n, k = values.shape
    if k > LANES:
        raise UnsupportedError("The reference order of ties is defined for at most 8 options", got=k)
    keys: Float = np.full((n, LANES), np.inf)
    keys[:, :k] = values
    order: Int = np.tile(np.arange(LANES), (n, 1))
    for partner, mask in _STAGES:
        lanes = list(partner)
        upper = np.array([mask >> lane & 1 for lane in range(LANES)], dtype=bool)
        other = keys[:, lanes]
        kept: Float = np.where(upper, np.maximum(keys, other), np.minimum(keys, other))
        order = np.where(kept == keys, order, order[:, lanes])
        keys = kept
    return np.asarray(order[:, :k], dtype=np.int64)
