"""Transitions between two models' answers to the same items: right to wrong, wrong to right, wrong to wrong."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mlflow_compress.errors import DataError
from mlflow_compress.metrics.stats.arrays import same_length
from mlflow_compress.metrics.stats.significance import mcnemar_exact


@dataclass(frozen=True, kw_only=True)
class Flips:
    """Counts of changed answers.

    Attributes
    ----------
    n, n_correct : int
        Items compared, and those that the baseline has right.
    c2w, w2c : int
        Right to wrong, wrong to right.
    w2w : int or None
        Wrong to another wrong answer; None where answers are not chosen from options.
    """

    n: int
    n_correct: int
    c2w: int
    w2c: int
    w2w: int | None

    @property
    def flips(self) -> float:
        """``(c2w + w2c)/n``, a share."""
        return (self.c2w + self.w2c) / self.n

    @property
    def all_flips(self) -> float | None:
        """``(c2w + w2c + w2w)/n``, a share; None where `w2w` is."""
        return None if self.w2w is None else (self.c2w + self.w2c + self.w2w) / self.n

    @property
    def accuracy_delta(self) -> float:
        """``(w2c - c2w)/n``, a share; never larger in size than `flips`."""
        return (self.w2c - self.c2w) / self.n

    @property
    def mcnemar_p(self) -> float:
        """Exact McNemar p-value of `c2w` against `w2c`."""
        return mcnemar_exact(self.c2w, self.w2c)


def count_flips(
    correct_baseline: npt.ArrayLike,
    correct_variant: npt.ArrayLike,
    answer_baseline: npt.ArrayLike | None = None,
    answer_variant: npt.ArrayLike | None = None,
) -> Flips:
    """Count the transitions between two models' answers to the same items.

    ``c2w = #(c_b & !c_q)``, ``w2c = #(!c_b & c_q)``, ``w2w = #(!c_b & !c_q & a_b != a_q)``.

    Parameters
    ----------
    correct_baseline, correct_variant : array_like of bool, shape (n,)
        Whether each model is right.
    answer_baseline, answer_variant : array_like, shape (n,), optional
        Each model's answer; without them `w2w` and `all_flips` are None.

    References
    ----------
    Dutta et al., "Accuracy is Not All You Need", section 2 and table 2.

    Examples
    --------
    >>> count_flips([1, 1, 0, 0], [1, 0, 1, 0], list("AABC"), list("ABAD")).all_flips
    0.75
    """
    b, q = np.asarray(correct_baseline, dtype=bool), np.asarray(correct_variant, dtype=bool)
    n = same_length(correct_baseline=b, correct_variant=q)
    if n == 0:
        raise DataError("Flips of no items are undefined", fix="Compare at least one item")
    if (answer_baseline is None) != (answer_variant is None):
        raise DataError("Give the answers of both models or of neither")
    w2w = None
    if answer_baseline is not None and answer_variant is not None:
        a_b, a_q = np.asarray(answer_baseline), np.asarray(answer_variant)
        same_length(correct_baseline=b, answer_baseline=a_b, answer_variant=a_q)
        w2w = int((~b & ~q & (a_b != a_q)).sum())
    return Flips(n=n, n_correct=int(b.sum()), c2w=int((b & ~q).sum()), w2c=int((~b & q).sum()), w2w=w2w)
