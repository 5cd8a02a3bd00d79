"""Agreement of two models' most probable tokens: top-k overlap and rank-biased overlap."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mlflow_compress.errors import ConfigError, DataError
from mlflow_compress.metrics.arrays import Float, Int


def _rankings(a: npt.ArrayLike, b: npt.ArrayLike) -> tuple[Int, Int]:
    x, y = np.asarray(a, dtype=np.int64), np.asarray(b, dtype=np.int64)
    if x.ndim != 2 or x.shape != y.shape or x.size == 0:
        raise DataError("Give both rankings with one shape (n, k)", got=f"{x.shape} and {y.shape}")
    for ranking in (x, y):
        ordered = np.sort(ranking, axis=1)
        if (ordered[:, 1:] == ordered[:, :-1]).any():
            raise DataError("A ranking holds a token twice")
    return x, y


def _overlaps(a: Int, b: Int) -> Float:
    """Number of common tokens in the first d of both rankings, shape (n, k) for d = 1..k."""
    same = a[:, :, None] == b[:, None, :]
    # A pair (i, j) counts from depth max(i, j) on.
    k = a.shape[1]
    depth = np.maximum.outer(np.arange(k), np.arange(k))
    new = np.stack([(same & (depth == d)).sum(axis=(1, 2)) for d in range(k)], axis=1)
    return np.asarray(new.cumsum(axis=1), dtype=np.float64)


def top_k_agreement(a: npt.ArrayLike, b: npt.ArrayLike) -> Float:
    """Share of tokens common to both top-k sets, at each position.

    Parameters
    ----------
    a, b : array_like of int, shape (n, k)
        Token ids from the most probable down.

    Returns
    -------
    numpy.ndarray, shape (n,)
        ``|A_k & B_k| / k`` in [0, 1]; for k = 1 whether the argmax is the same.
    """
    x, y = _rankings(a, b)
    return _overlaps(x, y)[:, -1] / x.shape[1]


def rank_biased_overlap(a: npt.ArrayLike, b: npt.ArrayLike, *, p: float = 0.9) -> Float:
    """Extrapolated rank-biased overlap of two rankings of equal depth, at each position.

    ``RBO = (X_k/k) p^k + (1 - p)/p sum_{d=1..k} (X_d/d) p^d`` with `X_d` the overlap at depth d: 1 for equal rankings,
    0 for disjoint ones; the first ranks weigh most.

    Parameters
    ----------
    a, b : array_like of int, shape (n, k)
        Token ids from the most probable down; k = 10 is usual.
    p : float
        Persistence in (0, 1); at 0.9 the first ten ranks carry 86 % of the weight.

    References
    ----------
    Webber, Moffat and Zobel, "A similarity measure for indefinite rankings", TOIS 2010, equation 30.
    """
    if not 0.0 < p < 1.0:
        raise ConfigError("The persistence p must lie strictly between 0 and 1", got=p)
    x, y = _rankings(a, b)
    k = x.shape[1]
    shares = _overlaps(x, y) / np.arange(1, k + 1)
    weights = p ** np.arange(1, k + 1)
    return np.asarray(shares[:, -1] * p**k + (1 - p) / p * (shares @ weights), dtype=np.float64)
