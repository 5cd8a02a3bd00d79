"""Row statistics on a CPU, in compiled loops: each row stays in the cache, and only its sums are written.

exp and log are the polynomials of Cephes' single-precision library (expf, logf), with an error below two units in the
last place. With them the compiler turns loops over the vocabulary into vector instructions. Sums are float32 over 1024
tokens, and float64 over these partial sums. Formulas and limits are those of `row_stats`, for other devices.
"""

import logging
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from numba import njit, types
from numba.core.caching import FunctionCache
from numba.extending import intrinsic

from mlflow_compress.scoring.kernels.row_stats import (
    BLOCK,
    MAX_LOG_RATIO,
    RowStats,
    distances_from_sums,
    n_blocks,
)

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


def _cached(function: Callable[..., Any]) -> Any:
    """Return a function that is compiled at its first call, or taken from numba's cache."""
    compiled = njit(error_model="numpy", nogil=True, cache=True)(function)
    compiled._cache = _RepairedCache(function)
    return compiled


f32, i32 = np.float32, np.int32
_RUN = 1024  # tokens per float32 sum
_ONE, _HALF = f32(1.0), f32(0.5)
_LOWEST, _HIGHEST = f32(-87.0), f32(87.0)  # e to the power of these is a normal float32
_LOG2_E, _LN2_HIGH, _LN2_LOW = f32(1.44269504088896341), f32(0.693359375), f32(-2.12194440e-4)
_ROUNDER = f32(1.5 * 2**23)  # adding it to a float32 leaves the nearest integer in the lowest bits
_ABOVE_SIGN, _SQRT_HALF, _EXPONENT = i32(0x7FFFFFFF), i32(0x3F3504F3), i32(-(1 << 23))
_PER_EXPONENT = f32(2.0**-23)
_FAR = f32(MAX_LOG_RATIO)

# In functions with this decorator no operation may be reordered: it would change how their results are rounded.
_exactly = njit(error_model="numpy", fastmath={"contract"}, forceinline=True)
_sums = njit(error_model="numpy", fastmath={"contract", "reassoc", "nsz"}, nogil=True)
# Inlined into both entry points. As a function of its own it would be compiled twice, with sums in another order, and
# whether the compiled code comes from numba's cache would decide which of the two runs.
_inlined = njit(error_model="numpy", forceinline=True)


def compute_row_stats(logits: torch.Tensor, baseline: torch.Tensor | None) -> RowStats:
    """Return the statistics of float32 rows, shape (n, vocab_size), computed by as many threads as torch uses."""
    variant = logits.contiguous().numpy()
    maxima, normal = _empty_outputs(variant)
    if baseline is None:
        _run_in_threads(_normalise, variant, maxima, normal)
        return RowStats(torch.from_numpy(maxima), *_columns(normal))
    base = baseline.contiguous().numpy()
    base_maxima, base_normal = _empty_outputs(base)
    sums = np.empty((len(variant), 5), dtype=f32)
    _run_in_threads(_compare, base, variant, base_maxima, maxima, base_normal, normal, sums)
    return RowStats(
        torch.from_numpy(maxima),
        *_columns(normal),
        base_maxima=torch.from_numpy(base_maxima),
        base_log_normaliser=_columns(base_normal)[0],
        distances=distances_from_sums(*torch.from_numpy(sums).unbind(1)),
    )


def _empty_outputs(rows: Any, width: int = 2) -> tuple[Any, Any]:
    return np.empty((len(rows), n_blocks(rows.shape[1])), dtype=f32), np.empty((len(rows), width))


def _columns(normal: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(normal[:, 0].copy()), torch.from_numpy(normal[:, 1].copy())


def _run_in_threads(compiled: Callable[..., None], *arrays: npt.NDArray[Any]) -> None:
    """Run a compiled loop on one slice of the arrays' rows per thread; it releases the interpreter lock."""
    n = len(arrays[0])
    n_threads = max(1, min(torch.get_num_threads(), n))
    cuts = [n * i // n_threads for i in range(n_threads + 1)]
    with ThreadPoolExecutor(n_threads) as pool:
        list(pool.map(lambda part: compiled(*(array[part] for array in arrays)), map(slice, cuts, cuts[1:])))


@intrinsic
def _prefer_512_bit(typing_context):  # type: ignore[no-untyped-def]
    """Let the calling function use 512-bit registers, where the CPU has them.

    By default the compiler uses half of their width, which suits programs that use them rarely.
    """

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')  # llvmlite's own `add` refuses values
        return context.get_dummy_value()

    return types.none(), generate


@_cached
def _normalise(logits, maxima, normal):  # type: ignore[no-untyped-def]
    """Write the block maxima of every row, its ln sum e^x, and its entropy in nats."""
    for i in range(len(logits)):
        _normalise_row(logits[i], maxima[i], normal[i])


@_cached
def _compare(base, variant, base_maxima, maxima, base_normal, normal, found):  # type: ignore[no-untyped-def]
    """Do the same for two models, and write the sums that `distances_from_sums` takes."""
    for i in range(len(variant)):
        highest, total = _normalise_row(base[i], base_maxima[i], base_normal[i])
        _normalise_row(variant[i], maxima[i], normal[i])
        _compare_row(base[i], variant[i], highest, total, f32(base_normal[i, 0] - normal[i, 0]), found[i])


@_inlined
def _normalise_row(logits, maxima, normal):  # type: ignore[no-untyped-def]
    _block_maxima(logits, maxima)
    highest = maxima[0]
    for value in maxima:
        if not value <= highest:  # a NaN too
            highest = value
    total, mean = _exp_sums(logits, highest)
    normal[0] = math.log(total) + highest
    normal[1] = math.log(total) - mean / total
    return highest, total


@_sums
def _block_maxima(logits, maxima):  # type: ignore[no-untyped-def]
    """Write the highest logit of every block.

    Logits are compared as integers of the same order, because their maximum is a vector instruction.
    """
    _prefer_512_bit()
    for b in range(len(maxima)):
        block = logits[b * BLOCK : (b + 1) * BLOCK].view(i32)
        highest = i32(-(1 << 31))
        for j in range(len(block)):
            highest = max(highest, _flipped(block[j]))
        maxima[b] = i32(_flipped(highest)).view(f32)


@_exactly
def _flipped(bits):  # type: ignore[no-untyped-def]
    """Convert the bits of a float32 to an integer of the same order, or back."""
    return i32(bits ^ i32(i32(bits >> i32(31)) & _ABOVE_SIGN))


@_sums
def _exp_sums(logits, highest):  # type: ignore[no-untyped-def]
    """Return sum z and sum z ln z, with z = e^(x - highest)."""
    _prefer_512_bit()
    total = mean = np.float64(0)
    for start in range(0, len(logits), _RUN):
        run = logits[start : start + _RUN]
        a = b = f32(0)
        for j in range(len(run)):
            ln_z = run[j] - highest
            z = _exp(ln_z)
            a += z
            b += z * ln_z
        total += a
        mean += b
    return total, mean


@_sums
def _compare_row(base, variant, highest, total, shift, found):  # type: ignore[no-untyped-def]
    """Sum over the vocabulary as `divergence_sums` does, with d = ln q - ln p = variant - base + shift."""
    _prefer_512_bit()
    share = f32(_ONE / total)
    kl = kl_reverse = js = abs_difference = n_far = np.float64(0)
    for start in range(0, len(variant), _RUN):
        run_p, run_q = base[start : start + _RUN], variant[start : start + _RUN]
        a = b = c = e_sum = far = f32(0)
        for j in range(len(run_p)):
            p = _exp(run_p[j] - highest) * share
            d = _log_ratio(run_p[j], run_q[j], shift)
            e = _expm1(d)
            forward, reverse = _kl_terms(d, e)
            a += p * forward
            b += p * reverse
            c += p * _js_term(d, e)
            e_sum += abs(p * e)
            far += _ONE if d > _FAR else f32(0)
        kl += a
        kl_reverse += b
        js += c
        abs_difference += e_sum
        n_far += far
    found[0], found[1], found[2], found[3] = kl, kl_reverse, js, abs_difference
    found[4] = n_far


@_exactly
def _log_ratio(base, variant, shift):  # type: ignore[no-untyped-def]
    """Return ln q - ln p. Logits are subtracted first: their difference is small, and is rounded by as little."""
    return (variant - base) + shift


@_exactly
def _kl_terms(d, e):  # type: ignore[no-untyped-def]
    """Return e - d and e d - (e - d)."""
    forward = e - d
    return forward, e * d - forward


@_exactly
def _js_term(d, e):  # type: ignore[no-untyped-def]
    """Return (1 + e) (d - l) - l, with l = ln(1 + e/2)."""
    ln_m = _log1p(_HALF * e)
    rest = d - ln_m
    return (rest * e + rest) - ln_m


@_exactly
def _exp(x):  # type: ignore[no-untyped-def]
    power, r = _split(_LOWEST if x < _LOWEST else x)
    return (_ONE + (r + r * r * _tail(r))) * power


@_exactly
def _expm1(x):  # type: ignore[no-untyped-def]
    x = _LOWEST if x < _LOWEST else x
    power, r = _split(_HIGHEST if x > _HIGHEST else x)
    return power * (r + r * r * _tail(r)) + (power - _ONE)


@_exactly
def _split(x):  # type: ignore[no-untyped-def]
    """Return 2^n and r, with x = n ln 2 + r and |r| at most half of ln 2."""
    shifted = x * _LOG2_E + _ROUNDER
    n = shifted - _ROUNDER
    power = i32(i32(f32(shifted).view(i32) + i32(127)) << i32(23)).view(f32)
    return power, (x - n * _LN2_HIGH) - n * _LN2_LOW


@_exactly
def _tail(r):  # type: ignore[no-untyped-def]
    """Return (e^r - 1 - r) / r^2 near 0."""
    y = f32(1.9875691500e-4) * r + f32(1.3981999507e-3)
    y = y * r + f32(8.3334519073e-3)
    y = y * r + f32(4.1665795894e-2)
    y = y * r + f32(1.6666665459e-1)
    return y * r + f32(5.0000001201e-1)


@_exactly
def _log1p(x):  # type: ignore[no-untyped-def]
    """Return ln(1 + x) for x >= -1/2; the last term restores what rounding removed from 1 + x."""
    y = _ONE + x
    bits = f32(y).view(i32)
    exponent = i32(i32(bits - _SQRT_HALF) & _EXPONENT)
    t = i32(bits - exponent).view(f32) - _ONE
    tail = f32(7.0376836292e-2) * t + f32(-1.1514610310e-1)
    tail = tail * t + f32(1.1676998740e-1)
    tail = tail * t + f32(-1.2420140846e-1)
    tail = tail * t + f32(1.4249322787e-1)
    tail = tail * t + f32(-1.6668057665e-1)
    tail = tail * t + f32(2.0000714765e-1)
    tail = tail * t + f32(-2.4999993993e-1)
    tail = tail * t + f32(3.3333331174e-1)
    n = f32(exponent) * _PER_EXPONENT
    ln_y = (t + ((t * t * t * tail + n * _LN2_LOW) - _HALF * (t * t))) + n * _LN2_HIGH
    return ln_y + (x - (y - _ONE)) / y


class BaselineRows(NamedTuple):
    """A baseline's rows, with what is the same for every model that is compared with them."""

    logits: npt.NDArray[np.float32]  # shape (n, vocab_size)
    normal: npt.NDArray[np.float64]  # ``ln sum e^x``, the highest logit, and ``sum e^(x - highest)``; shape (n, 3)


def baseline_rows(logits: torch.Tensor) -> BaselineRows:
    """Return float32 rows with their normalisers."""
    rows = logits.contiguous().numpy()
    maxima, normal = _empty_outputs(rows, width=3)
    _run_in_threads(_normalise_baseline, rows, maxima, normal)
    return BaselineRows(rows, normal)


def compute_kl_rows(
    logits: torch.Tensor, baseline: BaselineRows
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return KL(baseline || model) of float32 rows, the model's most probable tokens, and both ``ln sum e^x``.

    All have shape (n,). The KL is NaN where the sum is not exact; the token is the lowest id at a tie.
    """
    variant = logits.contiguous().numpy()
    n = len(variant)
    normal, kl, top = np.empty((n, 2)), np.empty(n, dtype=f32), np.empty(n, dtype=np.int64)
    _run_in_threads(_kl_of_rows, baseline.logits, variant, baseline.normal, normal, kl, top)
    base_normal = torch.from_numpy(baseline.normal[:, 0].copy())
    return torch.from_numpy(kl), torch.from_numpy(top), _columns(normal)[0], base_normal


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
            d = _log_ratio(run_p[j], run_q[j], shift)
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


@_cached
def _normalise_baseline(logits, maxima, normal):  # type: ignore[no-untyped-def]
    for i in range(len(logits)):
        highest, total = _normalise_row(logits[i], maxima[i], normal[i])
        normal[i, 1] = highest
        normal[i, 2] = total


@_cached
def _kl_of_rows(base, variant, base_normal, normal, kl, top):  # type: ignore[no-untyped-def]
    """Write the variant's ln sum e^x, the KL of every row (NaN where it is not exact), and its best token."""
    maxima = np.empty(-(-variant.shape[1] // BLOCK), dtype=f32)
    for i in range(len(variant)):
        _normalise_row(variant[i], maxima, normal[i])
        top[i] = _first_highest(variant[i], maxima)
        shift = f32(base_normal[i, 0] - normal[i, 0])
        total_kl, n_far = _kl_row(base[i], variant[i], f32(base_normal[i, 1]), base_normal[i, 2], shift)
        kl[i] = max(f32(total_kl), f32(0)) if n_far == 0 and np.isfinite(total_kl) else f32(np.nan)
