"""Chooses the formats within a limit: solve, make the checkpoint, measure it, and refit the costs where they miss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from mlflow_compress.decide.allocation import Allocation
from mlflow_compress.decide.cost_table import CostTable, Limit, StoredSizes
from mlflow_compress.decide.scoreboard.paired_mean import paired_mean
from mlflow_compress.errors import ConfigError
from mlflow_compress.metrics.stats.arrays import Float
from mlflow_compress.metrics.stats.studentized import studentized_interval
from mlflow_compress.stages.searching.swap_costs import SwapCosts
from mlflow_compress.stages.sweep.combinations import Combination

Make = Callable[[Allocation, Limit], tuple[Combination, str]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Choice:
    """A choice of formats, made and measured on the search's text.

    Attributes
    ----------
    allocation : Allocation
        The format of each group.
    variant : Combination
        Name and parameters of the variant.
    folder : str
        Its checkpoint.
    predicted : float
        What the costs promised.
    kl : numpy.ndarray, shape (n_windows,)
        What was measured.
    round : int
        The round in which it was chosen: 0 by the costs of one group at a time, later ones by refitted costs.
    """

    allocation: Allocation
    variant: Combination
    folder: str
    predicted: float
    kl: Float
    round: int

    @property
    def measured(self) -> float:
        """Mean KL."""
        return float(self.kl.mean())

    @property
    def high(self) -> float:
        """Upper end of its interval; infinite where there are too few windows for one."""
        found = studentized_interval(self.kl)
        return np.inf if found is None else found.high

    def misses(self, limit: Limit, tolerance: float) -> bool:
        """Return whether the prediction is farther off than the tolerance, or the KL is not surely within its limit."""
        off = abs(self.predicted - self.measured) > tolerance * self.measured
        return off or not self.is_inside(limit)

    def is_inside(self, limit: Limit) -> bool:
        """Return whether the upper end of the KL keeps to a limit of KL; other limits are kept by construction."""
        return limit.kind != "max_kl" or self.high <= limit.value


def first_table(costs: SwapCosts, folders: Mapping[str, str | None], sizes: StoredSizes) -> CostTable:
    """Return the cost of every format in every group of the baseline; a layer that stays as it is costs nothing."""
    shape = (len(costs.groups), len(costs.text.windows.ids))
    added = [np.zeros(shape) if folder is None else costs.alone(folder) for folder in folders.values()]
    return CostTable(sizes=sizes, start=np.zeros(shape[1]), added=np.stack(added, axis=1))


def measured(
    allocation: Allocation,
    limit: Limit,
    table: CostTable,
    *,
    make: Make,
    measure: Callable[[str], Float],
    number: int = 0,
) -> Choice:
    """Return a choice of formats after making and measuring it; arguments as `choose`."""
    variant, folder = make(allocation, limit)
    return Choice(
        allocation=allocation,
        variant=variant,
        folder=folder,
        predicted=table.predicted(allocation.choice),
        kl=measure(folder),
        round=number,
    )


def choose(
    limit: Limit,
    table: CostTable,
    *,
    rounds: int,
    tolerance: float,
    make: Make,
    measure: Callable[[str], Float],
    refit: Callable[[Choice], CostTable],
    uniform: Callable[[str], Float],
) -> Choice:
    """Return the best choice of formats that was made and measured.

    The first costs are those of one group at a time in the baseline. Where the KL of the checkpoint differs from their
    sum by more than the tolerance, they are measured again within that checkpoint, where the other groups are as they
    were chosen. That includes what the groups do to each other, as far as one change at a time shows it. Then the
    programme is solved again.

    Parameters
    ----------
    limit : Limit
        What the variant must keep to.
    table : CostTable
        Costs in the baseline.
    rounds : int
        How often costs are refitted, at most.
    tolerance : float
        Relative error from which a prediction misses.
    make : callable (allocation, limit) -> (variant, folder)
        Makes the checkpoint.
    measure : callable (folder) -> ndarray
        Returns its KL, window by window.
    refit : callable (choice) -> CostTable
        Measures the costs within a choice.
    uniform : callable (format) -> ndarray
        Returns the KL of the uniform variant of a format, window by window. Where one format for all keeps to the
        budget too, it is chosen, unless the mixed one is surely closer: its difference, paired by window, has an
        interval below 0. The best of several measurements on one text looks better than it is.
    """
    first = table
    tried: dict[tuple[int, ...], Choice] = {}
    margin = 0.0
    for number in range(rounds + 1):
        try:
            allocation = table.solved(limit, margin=margin)
        except ConfigError:
            if not tried:
                raise
            break  # by the refitted costs nothing keeps to the limit
        if allocation.choice in tried:
            break
        found = measured(allocation, limit, table, make=make, measure=measure, number=number)
        tried[allocation.choice] = found
        if not found.misses(limit, tolerance) or number == rounds:
            break
        table = refit(found)
        margin = max(0.0, found.high - found.measured) if limit.kind == "max_kl" else 0.0
    inside = [one for one in tried.values() if one.is_inside(limit)]
    if limit.kind == "max_kl" and inside:
        return min(inside, key=lambda one: (one.allocation.n_bytes, one.measured))
    if limit.kind == "max_kl":
        return min(tried.values(), key=lambda one: one.high)
    best = min(tried.values(), key=lambda one: one.measured)
    plain = first.largest_uniform(limit.layer_bytes(first.sizes))
    if plain is None or plain.choice == best.allocation.choice:
        return best
    difference = paired_mean(best.kl - uniform(first.sizes.formats[plain.choice[0]]))
    if difference is None or difference.interval.high < 0:
        return best
    return tried.get(plain.choice) or measured(plain, limit, first, make=make, measure=measure)
