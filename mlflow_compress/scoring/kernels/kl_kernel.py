"""KL and most probable token alone, on a CPU: for many swaps against one baseline.

It is the loop of `numba_kernel` without the other divergences, which takes about half of the time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from mlflow_compress.scoring.kernels.compiled_cache import cached
from mlflow_compress.scoring.kernels.numba_kernel import (
    _FAR,
    _ONE,
    _RUN,
    _columns,
    _empty_outputs,
    _exp,
    _expm1,
    _inlined,
    _kl_terms,
    _normalise_row,
    _prefer_512_bit,
    _run_in_threads,
    _sums,
    f32,
)
from mlflow_compress.scoring.kernels.row_stats import KlRows
from mlflow_compress.scoring.kernels.top_tokens import BLOCK, n_blocks


class BaselineRows(NamedTuple):
    """A baseline's rows, with what is the same for every model that is compared with them.

    Attributes
    ----------
    logits : numpy.ndarray of float32, shape (n, vocab_size)
    normal : numpy.ndarray of float64, shape (n, 3)
        ``ln sum e^x``, the highest logit, and ``sum e^(x - highest)``.
    """

    logits: npt.NDArray[np.float32]
    normal: npt.NDArray[np.float64]


def baseline_rows(logits: torch.Tensor) -> BaselineRows:
    """Return float32 rows with their normalisers."""
    rows = logits.contiguous().numpy()
    maxima, normal = np.empty((len(rows), n_blocks(rows.shape[1])), dtype=f32), np.empty((len(rows), 3))
    _run_in_threads(len(rows), lambda part: _normalise_baseline(rows[part], maxima[part], normal[part]))
    return BaselineRows(rows, normal)


def compute_kl_rows(logits: torch.Tensor, baseline: BaselineRows) -> KlRows:
    """Return KL(baseline || model) and the most probable token of float32 rows, without the other statistics."""
    variant = logits.contiguous().numpy()
    n = len(variant)
    _, normal = _empty_outputs(variant)
    kl, top = np.empty(n, dtype=f32), np.empty(n, dtype=np.int64)

    def compare(part: slice) -> None:
        _kl_of_rows(baseline.logits[part], variant[part], baseline.normal[part], normal[part], kl[part], top[part])

    _run_in_threads(n, compare)
    base_normal = torch.from_numpy(baseline.normal[:, 0].copy())
    return KlRows(torch.from_numpy(kl), torch.from_numpy(top), _columns(normal)[0], base_normal)


@_sums
def _kl_row(base, variant, highest, total, shift):  # type: ignore[no-untyped-def]
    """Return the first sum of `_compare_row`, and the number of tokens for which it is not exact."""
    _prefer_512_bit()
    share = f32(_ONE / total)
    kl = n_far = np.float64(0)
    for start in range(0, len(variant), _RUN):
        run_p, run_q = base[start : start + _RUN], variant[start : start + _RUN]
        a = far = f32(0)
        for j in range(len(run_p)):
            d = (run_q[j] - run_p[j]) + shift
            forward, _ = _kl_terms(d, _expm1(d))
            a += _exp(run_p[j] - highest) * share * forward
            far += _ONE if d > _FAR else f32(0)
        kl += a
        n_far += far
    return kl, n_far


@_inlined
def _first_highest(logits, maxima):  # type: ignore[no-untyped-def]
    """Return the lowest token with the highest logit, from the highest logits of all blocks."""
    best = 0
    for b in range(1, len(maxima)):
        if maxima[b] > maxima[best]:
            best = b
    for j in range(best * BLOCK, min((best + 1) * BLOCK, len(logits))):
        if logits[j] == maxima[best]:
            return j
    return best * BLOCK  # a NaN equals nothing; its normaliser is refused


@cached
def _normalise_baseline(logits, maxima, normal):  # type: ignore[no-untyped-def]
    for i in range(len(logits)):
        highest, total = _normalise_row(logits[i], maxima[i], normal[i])
        normal[i, 1] = highest
        normal[i, 2] = total


@cached
def _kl_of_rows(base, variant, base_normal, normal, kl, top):  # type: ignore[no-untyped-def]
    """Write the variant's ln sum e^x, the KL of every row (NaN where it is not exact), and its best token."""
    maxima = np.empty(-(-variant.shape[1] // BLOCK), dtype=f32)
    for i in range(len(variant)):
        _normalise_row(variant[i], maxima, normal[i])
        top[i] = _first_highest(variant[i], maxima)
        shift = f32(base_normal[i, 0] - normal[i, 0])
        total_kl, n_far = _kl_row(base[i], variant[i], f32(base_normal[i, 1]), base_normal[i, 2], shift)
        kl[i] = max(f32(total_kl), f32(0)) if n_far == 0 and np.isfinite(total_kl) else f32(np.nan)
