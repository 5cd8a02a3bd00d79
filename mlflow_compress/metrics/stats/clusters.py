"""What items share: how much less a sample says whose items come in groups, such as the questions of one passage."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mlflow_compress.metrics.stats.arrays import Float, Int, finite, same_length

FEWEST_GROUPS = 20
"""Fewest groups from which an interval is given: the variance between fewer is not known well enough."""


class DesignEffect(NamedTuple):
    """How the mean of grouped values varies, against that of as many independent ones."""

    effect: float  # Variance of the mean over that of independent values, at least 1
    df: float  # Degrees of freedom of that variance, for Student's t
    n_groups: int


def group_sums(values: npt.ArrayLike, groups: npt.ArrayLike) -> tuple[Float, Float]:
    """Return the sum of the values in each group, and the groups' sizes, both of shape (n_groups,)."""
    x = finite("values", values)
    same_length(values=x, groups=np.asarray(groups))
    _, codes = np.unique(np.asarray(groups), return_inverse=True)
    return np.bincount(codes, weights=x).astype(np.float64), np.bincount(codes).astype(np.float64)


def are_grouped(groups: Int | None) -> bool:
    """Return whether any two of the items are in one group."""
    return groups is not None and len(np.unique(groups)) < len(groups)


def design_effect(values: npt.ArrayLike, groups: npt.ArrayLike) -> DesignEffect:
    """Return the design effect of a mean of n values in G groups, both arrays of shape (n,).

    With the mean m, group sums s_g and sizes n_g, ``e_g = s_g - m n_g`` and ``v = G/(G - 1) sum(e_g^2)/n^2`` is the
    variance of the mean between groups; the effect is ``v / (sum((x - m)^2)/n^2)``. Below 1 it is 1: groups that happen
    to be more alike than chance makes them do not add items. Values that are all equal show no correlation; the groups
    count in their place, ``sum(n_g^2)/n``, which is n/G for groups of one size.

    The variance of v is that of a sum dominated by its largest terms where few groups have events, so that t(G - 1) is
    too narrow (a share of 2 % in groups of 1 to 40 was covered in 81 % of the draws). The degrees of freedom are
    ``min(G - 1, 1.5 sum(e^2)^2/sum(e^4))``: the quotient alone, Satterthwaite's approximation with the terms' own
    fourth moments, covers up to 99 %, and twice the quotient 92 to 97 % (`benchmarks/cluster_coverage.py`).

    Source: Rao and Scott, "A simple method for the analysis of clustered binary data", Biometrics 1992; Satterthwaite,
    "An approximate distribution of estimates of variance components", 1946; the factor 1.5 is this project's.

    Examples
    --------
    >>> design_effect([1, 1, 0, 0], [0, 0, 1, 1]).effect
    4.0
    """
    x = finite("values", values)
    sums, sizes = group_sums(x, groups)
    n, count, mean = len(x), len(sums), float(x.mean())
    square = float(((x - mean) ** 2).sum())
    e = sums - mean * sizes
    between = float((e**2).sum())
    if square == 0.0 or between == 0.0 or count < 2:
        of_size = float((sizes**2).sum()) / n if square == 0.0 else 1.0
        return DesignEffect(of_size, max(count - 1.0, 1.0), count)
    df = max(1.0, min(count - 1.0, 1.5 * between**2 / float((e**4).sum())))
    return DesignEffect(max(1.0, count / (count - 1.0) * between / square), df, count)
