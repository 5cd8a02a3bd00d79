"""Split-conformal prediction sets over a few options: scores, quantile, sets, as separate steps.

Shapes: ``probabilities (n, n_options)``, ``gold (n,)``, ``sets (n, n_options)`` of bool.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from mlflow_compress.errors import ConfigError, DataError, UnsupportedError
from mlflow_compress.metrics.stats.arrays import Bool, Float, Int, finite

_LANES = 8

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
    """Return the ascending order of each row, of at most 8 keys, as numpy's AVX-512 `argsort` gives it, ties included.

    Source: intel/x86-simd-sort, the 64-bit key-index network; equal keys stay where they are.
    """
    n, k = values.shape
    if k > _LANES:
        raise UnsupportedError("The reference order of ties is defined for at most 8 options", got=k)
    keys: Float = np.full((n, _LANES), np.inf)
    keys[:, :k] = values
    order: Int = np.tile(np.arange(_LANES), (n, 1))
    for partner, mask in _STAGES:
        lanes = list(partner)
        upper = np.array([mask >> lane & 1 for lane in range(_LANES)], dtype=bool)
        other = keys[:, lanes]
        kept: Float = np.where(upper, np.maximum(keys, other), np.minimum(keys, other))
        order = np.where(kept == keys, order, order[:, lanes])
        keys = kept
    return np.asarray(order[:, :k], dtype=np.int64)


ConformalScore = Literal["lac", "aps"]
Mode = Literal["textbook", "reference"]
SCORES: tuple[ConformalScore, ...] = ("lac", "aps")


def _checked(probabilities: npt.ArrayLike) -> Float:
    p = finite("probabilities", probabilities, ndim=2)
    if p.min() < 0.0 or not np.allclose(p.sum(axis=1), 1.0, atol=1e-4):
        raise DataError("Each row of probabilities must be non-negative and sum to 1")
    return p


def _cumulative(p: Float, mode: Mode) -> Float:
    """Cumulative probability up to and including each option, from the most probable down."""
    # "reference": ascending order reversed, with the ties as the published numbers have them.
    order = network_argsort(p)[:, ::-1] if mode == "reference" else np.argsort(-p, axis=1, kind="stable")
    cumulative = np.take_along_axis(p, order, axis=1).cumsum(axis=1)
    back = np.argsort(order, axis=1)
    return np.asarray(np.take_along_axis(cumulative, back, axis=1), dtype=np.float64)


def conformity_scores(
    probabilities: npt.ArrayLike, gold: npt.ArrayLike, score: ConformalScore, *, mode: Mode = "textbook"
) -> Float:
    """Return the non-conformity of the gold option, shape (n,).

    "lac": ``1 - p_y`` (Sadinle et al. 2019). "aps": sorted probability mass up to and including y, not randomised
    (Romano et al. 2020). Of equally probable options the lowest index comes first, as everywhere in this package; the
    published script ("reference") leaves it to an unstable sort, see `network_argsort`.
    """
    p = _checked(probabilities)
    y = np.asarray(gold, dtype=np.int64)
    if y.shape != (len(p),) or y.min() < 0 or y.max() >= p.shape[1]:
        raise DataError("gold must give one option index a row")
    values = 1.0 - p if score == "lac" else _cumulative(p, mode)
    return np.asarray(values[np.arange(len(p)), y], dtype=np.float64)


def _rank(n: int, alpha: float) -> int:
    if not 0.0 < alpha < 1.0:
        raise ConfigError("alpha must lie strictly between 0 and 1", got=alpha)
    # The float product (n + 1)(1 - alpha) may exceed an exact integer by rounding: 10 * 0.9 must give 9.
    return math.ceil(round((n + 1) * (1.0 - alpha), 9))


def conformal_quantile(scores: npt.ArrayLike, alpha: float = 0.1, *, mode: Mode = "textbook") -> float:
    """Return the threshold on n calibration scores, infinite where they are too few for `alpha`: sets hold all options.

    "textbook": the ``k = ceil((n + 1)(1 - alpha))``-th smallest score. "reference": what LLM-Uncertainty-Bench has,
    ``np.quantile(scores, ceil((n + 1)(1 - alpha))/n, method="higher")``, which is the score of rank k + 1 for many n
    (4,997 among them): slightly larger sets than asked for. The published script fails where the level exceeds 1.
    """
    s = finite("conformity scores", scores)
    n = len(s)
    k = _rank(n, alpha)
    if k > n:
        return math.inf
    if mode == "reference":
        return float(np.quantile(s, np.ceil((n + 1) * (1 - alpha)) / n, method="higher"))
    return float(np.partition(s, k - 1)[k - 1])


def resampled_quantiles(scores: npt.ArrayLike, counts: Float, alpha: float = 0.1) -> Float:
    """Return the textbook threshold of each resample, shape (n_resamples,); see `conformal_quantile`.

    - `scores` (n,): The calibration scores.
    - `counts` (n_resamples, n): How often each of them is drawn. The rows have several sums where whole groups are.
    """
    s = finite("conformity scores", scores)
    drawn, of_row = np.unique(counts.sum(axis=1).astype(np.int64), return_inverse=True)
    ranks, order = np.array([_rank(int(n), alpha) for n in drawn])[of_row], np.argsort(s)
    # The score of rank k is the first up to which at least k are drawn; where fewer are drawn there is none.
    places = (counts[:, order].cumsum(axis=1) < ranks[:, None]).sum(axis=1)
    return np.asarray(np.append(s[order], np.inf)[places], dtype=np.float64)


def sizes_and_coverage(
    probabilities: npt.ArrayLike, gold: npt.ArrayLike, thresholds: npt.ArrayLike, score: ConformalScore
) -> tuple[Float, Float]:
    """Return each textbook set's size, and whether it holds the gold option, by threshold; shapes (n_thresholds, n)."""
    p, y = _checked(probabilities), np.asarray(gold, dtype=np.int64)
    cumulative, rows = _cumulative(p, "textbook"), np.arange(len(p))
    every = [_sets(p, cumulative, q, score) for q in np.asarray(thresholds, dtype=np.float64)]
    return np.array([sets.sum(axis=1) for sets in every], dtype=np.float64), np.array(
        [sets[rows, y] for sets in every], dtype=np.float64
    )


def _sets(p: Float, cumulative: Float, threshold: float, score: ConformalScore) -> Bool:
    """Return the options in each set, shape (n, n_options); an empty set becomes the most probable option.

    "lac": ``p >= 1 - q``. "aps": the options while the cumulative sorted probability is ``<= q``.
    """
    sets = p >= 1.0 - threshold if score == "lac" else cumulative <= threshold
    empty = ~sets.any(axis=1)
    sets[empty, p[empty].argmax(axis=1)] = True
    return np.asarray(sets, dtype=bool)


def split(n: int, *, seed: int = 42, calibration_share: float = 0.5, groups: Int | None = None) -> tuple[Int, Int]:
    """Return (calibration rows, test rows), both sorted: a seeded permutation cut at ``floor(n share)``.

    With `groups`, codes from 0 of shape (n,), whole groups are on a side.
    """
    codes = np.arange(n) if groups is None else groups
    n_groups = int(codes.max()) + 1 if n else 0
    cut = int(n_groups * calibration_share)
    if cut < 1 or n_groups - cut < 1:
        raise DataError("A conformal split needs at least one item on each side", got=f"{n} items")
    is_first = np.zeros(n_groups, dtype=bool)
    is_first[np.random.default_rng(seed).permutation(n_groups)[:cut]] = True
    return np.flatnonzero(is_first[codes]), np.flatnonzero(~is_first[codes])


@dataclass(frozen=True, kw_only=True)
class ConformalResult:
    """What the sets of one score say on the test items."""

    threshold: float  # The quantile used; infinite where the calibration set was too small
    correct: Float  # Top-1 is right; number of options in the set; the set holds the gold option; shape (n_test,)
    size: Float
    covered: Float
    n_options: int  # Size of the option alphabet

    @property
    def accuracy(self) -> float:
        """Share of test items whose most probable option is right."""
        return float(self.correct.mean())

    @property
    def set_size(self) -> float:
        """Mean set size, SS."""
        return float(self.size.mean())

    @property
    def coverage(self) -> float:
        """Share of sets that hold the gold option."""
        return float(self.covered.mean())

    @property
    def uacc(self) -> float:
        """``Acc / SS * sqrt(n_options)`` [LUB]."""
        return self.accuracy / self.set_size * math.sqrt(self.n_options)


def conformal(
    probabilities: npt.ArrayLike,
    gold: npt.ArrayLike,
    *,
    calibration: npt.ArrayLike,
    test: npt.ArrayLike,
    score: ConformalScore,
    alpha: float = 0.1,
    mode: Mode = "textbook",
    threshold: float | None = None,
) -> ConformalResult:
    """Calibrate on some rows and judge the sets on others.

    The mode "reference" reproduces the published script: rank (`conformal_quantile`) and ties (`network_argsort`). A
    given `threshold` is kept instead of calibrating: the baseline's, to see what it does to a variant.

    Source: Ye et al., "Benchmarking LLMs via Uncertainty Quantification" (LLM-Uncertainty-Bench).
    """
    p, y = _checked(probabilities), np.asarray(gold, dtype=np.int64)
    cal, held = np.asarray(calibration, dtype=np.int64), np.asarray(test, dtype=np.int64)
    q = threshold
    if q is None:
        q = conformal_quantile(conformity_scores(p[cal], y[cal], score, mode=mode), alpha, mode=mode)
    return _judged(p[held], _cumulative(p[held], mode), y[held], q, score)


def _judged(p: Float, cumulative: Float, gold: Int, threshold: float, score: ConformalScore) -> ConformalResult:
    """Judge the sets that a threshold makes of test items."""
    sets = _sets(p, cumulative, threshold, score)
    return ConformalResult(
        threshold=threshold,
        correct=(p.argmax(axis=1) == gold).astype(np.float64),
        size=sets.sum(axis=1).astype(np.float64),
        covered=sets[np.arange(len(p)), gold].astype(np.float64),
        n_options=p.shape[1],
    )


def coverage_by_class(result: ConformalResult, gold: npt.ArrayLike) -> dict[int, float]:
    """Return the coverage of the test items of each gold option; `gold` has shape (n_test,)."""
    y = np.asarray(gold, dtype=np.int64)
    if y.shape != result.covered.shape:
        raise DataError("gold must give one option index a test item", got=f"{y.shape} and {result.covered.shape}")
    return {int(c): float(result.covered[y == c].mean()) for c in np.unique(y)}


def repeated_splits(
    probabilities: npt.ArrayLike,
    gold: npt.ArrayLike,
    score: ConformalScore,
    *,
    n_splits: int = 100,
    seed: int = 42,
    alpha: float = 0.1,
    calibration_share: float = 0.5,
    groups: Int | None = None,
) -> dict[str, Float]:
    """Return "uacc", "set_size" and "coverage" over many seeded splits, each of shape (n_splits,).

    Split `i` uses seed ``seed + i``; the spread says how much of a difference is the split's luck.
    """
    if n_splits < 1:
        raise ConfigError("n_splits must be at least 1", got=n_splits)
    p, y = _checked(probabilities), np.asarray(gold, dtype=np.int64)
    cumulative, scores = _cumulative(p, "textbook"), conformity_scores(p, y, score)  # a row's depend on no other row
    runs = []
    for i in range(n_splits):
        cal, test = split(len(y), seed=seed + i, calibration_share=calibration_share, groups=groups)
        threshold = conformal_quantile(scores[cal], alpha)
        runs.append(_judged(p[test], cumulative[test], y[test], threshold, score))
    return {name: np.array([getattr(r, name) for r in runs]) for name in ("uacc", "set_size", "coverage")}
