"""Cheap estimates of what a format costs, which need no swap, and the table of costs that begins with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from mlflow_compress.decide.cost_table import CostTable, Limit, StoredSizes
from mlflow_compress.errors import ConfigError, DataError
from mlflow_compress.metrics.stats.arrays import Float

EstimateKind = Literal["fisher", "linearity"]
Cells = npt.NDArray[np.bool_]
Measure = Callable[[int, Sequence[int]], Float]


def fisher_cost(gradients: npt.ArrayLike, errors: npt.ArrayLike, n_scored: int) -> float:
    """Return the KL per scored token that a layer's output errors cost, by the diagonal of the Fisher information.

    It is ``1/2 sum_kj g_kj^2 e_kj^2 / n_scored``: the KL to second order, without the products of different outputs.

    - `gradients` (n_tokens, n_outputs): Of the summed log-probabilities of tokens drawn from the baseline at the scored
      positions, by the layer's outputs. Their squares are a sample of the diagonal.
    - `errors` (n_tokens, n_outputs): Outputs of the compressed layer minus those of the baseline's, on the same inputs.
    """
    g, e = np.asarray(gradients, dtype=np.float64), np.asarray(errors, dtype=np.float64)
    return float((g * g * e * e).sum() / (2 * n_scored))


def relative_l2_error(pairs: Sequence[tuple[npt.ArrayLike, npt.ArrayLike]]) -> float:
    """Return ``sum |W' - W|^2 / sum |W|^2`` over the matrices of a group, given as pairs of W and W'.

    By the linearity theorem (arXiv 2411.17525) the cost of a group is this times a constant of the group, as long as
    the error is small.
    """
    arrays = [(np.asarray(old, dtype=np.float64), np.asarray(new, dtype=np.float64)) for old, new in pairs]
    size = sum(float(np.square(old).sum()) for old, _ in arrays)
    if size == 0:
        raise DataError("A group of layers has weights of 0 only, so its relative error is not defined")
    return sum(float(np.square(new - old).sum()) for old, new in arrays) / size


@dataclass(frozen=True, kw_only=True, eq=False)
class Estimation:
    """What was estimated, and which of it was measured."""

    kind: EstimateKind  # Where the estimate comes from
    estimates: Float  # As they were before any measurement: nats, or relative errors; shape (n_groups, n_formats)
    measured: Cells  # The swaps that were measured; shape (n_groups, n_formats)
    possible: int  # Swaps that a search without estimates measures
    # Spearman's, of estimate and measured cost, over the measured swaps; None for fewer than three of them
    rank_correlation: float | None


def estimated_table(
    kind: EstimateKind,
    estimates: Float,
    limits: Sequence[Limit],
    sizes: StoredSizes,
    measure: Measure,
    *,
    n_windows: int,
    known: Sequence[int] = (),
    most: int = 0,
) -> tuple[CostTable, Estimation]:
    """Return a table of costs in which the cells that the limits choose are measured, and the others estimated.

    The programme is solved with the estimates, what it has chosen is measured, and it is solved again, until it chooses
    measured cells only. The estimates of a group are multiplied by what its measured cells cost over what was estimated
    for them. A relative error says nothing of nats before that, so every group's smallest format is measured first.

    - `estimates` (n_groups, n_formats)
    - `measure`: (format, groups) -> KL by window of that format in each group, shape (len(groups), n_windows)
    - `known`: Columns that cost nothing and need no swap: layers that stay as they are.
    - `most`: Measure at most so many swaps, but those that come first; 0: as many as are chosen.
    """
    rows = np.arange(len(sizes.groups))
    measured = np.zeros(estimates.shape, dtype=np.bool_)
    costs = np.zeros((*estimates.shape, n_windows))
    fixed = np.isin(np.arange(estimates.shape[1]), known)[None].repeat(len(rows), axis=0)

    def take(cells: Cells) -> None:
        for column in range(cells.shape[1]):
            groups = np.flatnonzero(cells[:, column]).tolist()
            if groups:
                costs[groups, column] = measure(column, groups)
                measured[groups, column] = True

    if kind == "linearity":
        first = np.zeros_like(measured)
        first[rows, np.where(fixed, np.iinfo(np.int64).max, sizes.layers).argmin(axis=1)] = True
        take(first)
    while True:
        table = CostTable(sizes=sizes, start=np.zeros(n_windows), added=_filled(estimates, costs, measured, fixed))
        wanted = _chosen(table, limits) & ~measured & ~fixed
        left = most - int(measured.sum()) if most else wanted.size
        if not wanted.any() or left <= 0:
            break
        dearest = np.argsort(np.where(wanted, -table.costs, np.inf), axis=None, kind="stable")[:left]
        take(wanted & np.isin(np.arange(wanted.size), dearest).reshape(wanted.shape))
    found = Estimation(
        kind=kind,
        estimates=estimates,
        measured=measured,
        possible=int((~fixed).sum()),
        rank_correlation=rank_correlation(estimates[measured], costs.mean(axis=2)[measured]),
    )
    return table, found


def rank_correlation(estimates: npt.ArrayLike, measured: npt.ArrayLike) -> float | None:
    """Return Spearman's rank correlation; None for fewer than three pairs, or where one side has one value only."""
    from scipy.stats import spearmanr

    a, b = np.asarray(estimates, dtype=np.float64), np.asarray(measured, dtype=np.float64)
    if len(a) < 3 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    return float(spearmanr(a, b).statistic)


def _filled(estimates: Float, costs: Float, measured: Cells, fixed: Cells) -> Float:
    """Return the costs by window, with estimates times their group's factor where nothing was measured."""
    mean = costs.mean(axis=2)
    known, guessed = (np.where(measured, values, 0.0).sum(axis=1) for values in (mean, estimates))
    factor = np.divide(known, guessed, out=np.ones_like(known), where=(guessed > 0) & (known > 0))
    scaled = np.where(fixed, 0.0, estimates * factor[:, None])
    return np.where(measured[:, :, None], costs, scaled[:, :, None])


def _chosen(table: CostTable, limits: Sequence[Limit]) -> Cells:
    """Return the cells that the limits choose; for a limit that no choice keeps to, the cheapest of every group."""
    rows = np.arange(len(table.sizes.groups))
    found = np.zeros(table.costs.shape, dtype=np.bool_)
    for limit in limits:
        try:
            choice = np.asarray(table.solved(limit).choice)
        except ConfigError:
            choice = table.costs.argmin(axis=1)
        found[rows, choice] = True
    return found
