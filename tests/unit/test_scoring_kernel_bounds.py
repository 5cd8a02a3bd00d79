"""The rounding errors of the compiled loops: bounds that follow from the number of terms and the unit roundoff.

They hold for any order of summation and with or without fused multiply-add, so on any processor. Every operation in
float32 has a relative error of at most U; terms in U² are left out, and float64's unit roundoff, 2⁻⁵³, is too.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numba import njit

from mlflow_compress.scoring.kernels import numba_kernel
from mlflow_compress.scoring.kernels.numba_kernel import baseline_rows, compute_kl_rows
from mlflow_compress.scoring.kernels.row_stats import DIVERGENCES

U = 2.0**-24  # unit roundoff of float32
RUN = 1024  # terms of one sum in float32; these sums are added in float64
POLYNOMIAL = 4 * U  # exp, expm1 and log1p: below two units in the last place, each at most 2 U of the value
VOCABS = (2, 40, 300, 1500, 50_000)
Array = np.ndarray[Any, Any]


def logits(vocab: int, distance: float) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    base, change = 3.0 * torch.randn(20, vocab, generator=generator), torch.randn(20, vocab, generator=generator)
    return base, base + distance * change


def terms_of_one_sum(vocab: int) -> int:
    return min(vocab, RUN)


def normalised(x: Array, n: float | None = None) -> tuple[Array, Array, Array, Array]:
    """Return z = x - max and p = softmax of float64 rows, ln sum e^z, and a bound of its error in the loops.

    z is rounded, which changes e^z by |z| U. exp adds its own error. A sum of n positive terms, in any order, has a
    relative error of at most (n - 1) U; `n` is the loops' where none is given. The relative error of the sum is the
    absolute error of its logarithm.
    """
    z = x - x.max(axis=1, keepdims=True)
    total = np.exp(z).sum(axis=1, keepdims=True)
    p, z = np.exp(z) / total, np.where(np.isneginf(z), 0.0, z)  # a token of probability 0 has no error
    error = (p * np.abs(z)).sum(axis=1) * U + POLYNOMIAL + ((n or terms_of_one_sum(x.shape[1])) - 1) * U
    return z, p, np.log(total), error


def normaliser_and_entropy(rows: torch.Tensor, n: int | None = None) -> tuple[tuple[Array, Array], ...]:
    """Return the logarithm of the normaliser and the entropy in float64, each with the bound of its error."""
    z, p, ln_total, error = normalised(rows.double().numpy(), n)
    # Entropy is ln total - sum e^z z / total. A term has the errors of z in e^z and in z, of exp and of the product.
    mean, n = (p * np.abs(z)).sum(axis=1), n or terms_of_one_sum(rows.shape[1])
    terms = (p * z**2).sum(axis=1) * U + mean * (2 * U + POLYNOMIAL + (n - 1) * U)
    normaliser = ln_total[:, 0] + rows.amax(dim=1).double().numpy()
    return (normaliser, error), (ln_total[:, 0] + mean, error * (1 + mean) + terms)


def distances_with_bounds(
    base: torch.Tensor, variant: torch.Tensor, *, by_torch: bool = False, nats: float = 0.0
) -> dict[str, tuple[Array, Array]]:
    """Return the distances in float64, and bounds of their errors in the loops, or in torch's operations.

    A distance is sum p f(d, e, l) with d = ln q - ln p, e = e^d - 1 and l = ln(1 + e/2); see `divergence_sums`. Torch
    adds a row in one sum, for which the bound is sqrt(n) U (Higham and Mary 2019, theorem 2.4: roundings are independent),
    and takes d as the difference of ln q and ln p, which are rounded before. `nats` is a bound of the errors that ln p
    and ln q come with, from a model in float32.
    """
    n = base.shape[1] ** 0.5 if by_torch else terms_of_one_sum(base.shape[1])
    x, y = base.double().numpy(), variant.double().numpy()
    z, p, ln_total, p_error = normalised(x, n)
    y_z, _, y_ln_total, q_error = normalised(y, n)
    d = (y_z - y_ln_total) - (z - ln_total)
    shift = np.abs(d - (y - x)).max(axis=1)
    e = np.expm1(d)
    ln_m = np.log1p(e / 2)
    rest = d - ln_m
    forward, reverse, js = e - d, e * d - (e - d), (1 + e) * rest - ln_m

    # d = (y - x) + shift: two roundings, and one error `s` that all tokens of a row share, from both normalisers.
    # p = e^z share: the rounding of z, exp, share, the product, and the error of the normaliser.
    s = p_error + q_error + shift * U
    d_error = (np.abs(y - x) + np.abs(d)) * U
    if by_torch:  # the maximum is subtracted from both logits, then the normaliser, then one from the other
        d_error = sum(np.abs(part) for part in (z, z - ln_total, y_z, y_z - y_ln_total, d)) * U
    d_error = d_error + 2 * nats
    p_relative = (np.abs(z) + 2) * U + POLYNOMIAL + nats
    e_error, ln_m_error = POLYNOMIAL * np.abs(e), POLYNOMIAL * np.abs(ln_m)

    # Per distance: f, its derivative by d, and what computing f from d adds. An error of e reaches f with the factor
    # df/de (1, d - 1 and rest - 1), an error of l with df/dl (2 + e); every difference and product adds U of its value.
    cases = {
        "kl": (forward, e, e_error + U * forward),
        "kl_reverse": (reverse, (1 + e) * d, np.abs(d - 1) * e_error + U * (np.abs(e * d) + forward + reverse)),
        "js": (
            js,
            (1 + e) * rest,
            np.abs(rest - 1) * e_error
            + (2 + e) * ln_m_error
            + U * ((1 + e) * np.abs(rest) + np.abs(rest * e) + np.abs((1 + e) * rest) + js),
        ),
        "tv": (np.abs(e), (1 + e) * np.sign(d), e_error),
    }
    results = {}
    for name, (f, slope, f_error) in cases.items():
        value = (p * f).sum(axis=1)
        # Relative errors of a term: p's, and the product p f. Of the sum: p's normaliser, n - 1 additions, the result.
        bound = (p * f * (p_relative + U)).sum(axis=1) + value * (p_error + n * U)
        bound += (p * (f_error + np.abs(slope) * d_error)).sum(axis=1)
        # The shared error s moves the distance by s sum p df/d(d). That is 0 for kl, whose next term is s²/2 sum q.
        bound += s * np.abs((p * slope).sum(axis=1)) + (s + 2 * nats) ** 2 / 2
        if not by_torch:  # the loops' exp gives no less than e^-87, which is what a rarer token gets
            bound += (np.where(z < -87.0, np.exp(-87.0), 0.0) * np.abs(f)).sum(axis=1)
        half = 0.5 if name in ("js", "tv") else 1.0
        results[name] = (half * value, half * bound)
    return results


@pytest.mark.parametrize(
    ("ours", "true", "low", "high"),
    [
        (numba_kernel._exp, np.exp, -87.0, 0.0),
        (numba_kernel._expm1, np.expm1, -60.0, 60.0),
        (numba_kernel._log1p, np.log1p, -0.5, 3.0),
        (numba_kernel._log1p, np.log1p, 3.0, 1e26),
    ],
)
def test_polynomials_are_off_by_less_than_two_units_in_the_last_place(
    ours: Any, true: Callable[[Array], Array], low: float, high: float
) -> None:
    random = np.random.default_rng(0)
    wide = np.concatenate([random.uniform(low, high, 100_000), np.geomspace(1e-12, 1, 100_000) * low])
    x = np.concatenate([wide, np.geomspace(1e-12, 1, 100_000) * high]).clip(low, high).astype(np.float32)
    computed = np.empty_like(x)

    @njit  # type: ignore[untyped-decorator]
    def fill(x: Array, out: Array) -> None:
        for i in range(len(x)):
            out[i] = ours(x[i])

    fill(x, computed)
    expected = true(x.astype(np.float64))
    assert (np.abs(computed - expected) <= POLYNOMIAL * np.abs(expected)).all()


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("distance", [1e-3, 0.05, 2.0])
def test_distances_are_within_their_bounds(vocab: int, distance: float) -> None:
    base, variant = logits(vocab, distance)
    loops = numba_kernel.compute_row_stats(variant, base).distances
    results = dict(zip(DIVERGENCES, loops.double().numpy(), strict=True))
    expected = distances_with_bounds(base, variant)
    alone = compute_kl_rows(variant, baseline_rows(base))[0].double().numpy()
    for name, values in [*results.items(), ("kl", alone)]:
        value, bound = expected[name]
        assert (np.abs(values - value) <= bound).all(), (name, (np.abs(values - value) / bound).max())


@pytest.mark.parametrize("vocab", VOCABS)
def test_normaliser_and_entropy_are_within_their_bounds(vocab: int) -> None:
    rows = logits(vocab, 0.0)[0]
    results = numba_kernel.compute_row_stats(rows, None)
    (normaliser, error), (entropy, entropy_error) = normaliser_and_entropy(rows)
    assert (np.abs(results.log_normaliser.numpy() - normaliser) <= error).all()
    assert (np.abs(results.entropy.numpy() - entropy) <= entropy_error).all()


@pytest.mark.parametrize("distance", [0.05, 2.0])
def test_bounds_refuse_a_missing_token_and_a_sum_in_float16(distance: float) -> None:
    base, variant = logits(300, distance)
    expected = distances_with_bounds(base, variant)
    shorter = distances_with_bounds(base[:, :-1], variant[:, :-1])
    for name, (value, bound) in expected.items():
        assert (np.abs(shorter[name][0] - value) > bound).any(), name
        assert (np.abs(value.astype(np.float16) - value) > bound).any(), name  # the last rounding of such a sum alone
