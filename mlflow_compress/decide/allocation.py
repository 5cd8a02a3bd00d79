"""Which format each group of layers gets: an integer programme, solved to a proven optimum."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mlflow_compress.errors import ConfigError, DataError
from mlflow_compress.metrics.stats.arrays import Float

Sizes = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """One format per group.

    Attributes
    ----------
    choice : tuple of int
        The column of each group's format.
    n_bytes : int
        Their bytes.
    cost : float
        The sum of their costs.
    gap : float or None
        The relative distance between this solution and the solver's bound: 0 means that it is proven to be the best.
        None where no solver has chosen.
    """

    choice: tuple[int, ...]
    n_bytes: int
    cost: float
    gap: float | None


def closest_within(costs: npt.ArrayLike, sizes: npt.ArrayLike, *, max_bytes: int) -> Allocation:
    """Return the formats of the smallest summed cost that take at most `max_bytes`.

    Parameters
    ----------
    costs : array_like, shape (n_groups, n_formats)
        Cost of each format in each group.
    sizes : array_like of int, shape (n_groups, n_formats)
        Bytes of the same.
    max_bytes : int
        The budget.

    Raises
    ------
    ConfigError
        The budget is below the smallest possible size.
    """
    c, n = _checked(costs, sizes)
    smallest = int(n.min(axis=1).sum())
    if max_bytes < smallest:
        raise ConfigError(
            "No choice of formats is as small as this", allowed=f"at least {smallest} bytes", got=max_bytes
        )
    return _solved(c, n, objective=c, limited=n.astype(np.float64), limit=max_bytes, unit=math.gcd(*n.ravel().tolist()))


def smallest_within(costs: npt.ArrayLike, sizes: npt.ArrayLike, *, max_cost: float) -> Allocation:
    """Return the formats of the fewest bytes whose summed cost is at most `max_cost`; arguments as `closest_within`.

    Raises
    ------
    ConfigError
        The limit is below the smallest possible cost.
    """
    c, n = _checked(costs, sizes)
    closest = float(c.min(axis=1).sum())
    if max_cost < closest:
        raise ConfigError("No choice of formats is as close as this", allowed=f"at least {closest:.3g}", got=max_cost)
    return _solved(c, n, objective=n.astype(np.float64), limited=c, limit=max_cost, unit=float(np.abs(c).max()) or 1.0)


def _checked(costs: npt.ArrayLike, sizes: npt.ArrayLike) -> tuple[Float, Sizes]:
    c, n = np.asarray(costs, dtype=np.float64), np.asarray(sizes, dtype=np.int64)
    if c.ndim != 2 or c.shape != n.shape or not c.size:
        raise DataError("Costs and sizes need one row per group and one column per format", got=f"{c.shape}, {n.shape}")
    if not np.isfinite(c).all() or (n <= 0).any():
        raise DataError("A cost is not finite, or a size is not positive")
    return c, n


def _solved(costs: Float, sizes: Sizes, *, objective: Float, limited: Float, limit: float, unit: float) -> Allocation:
    """Minimise a sum over the chosen cells, with the sum of others limited; scipy's solver is HiGHS.

    Both sums are scaled, because the solver's tolerances are absolute.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array, kron

    n_groups, n_formats = costs.shape
    one_each = csr_array(kron(np.eye(n_groups), np.ones((1, n_formats))))
    scale = float(np.abs(objective).max()) or 1.0
    found = milp(
        objective.ravel() / scale,
        integrality=np.ones(costs.size),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(one_each, 1, 1),
            LinearConstraint(limited.ravel()[None] / unit, -np.inf, limit / unit),
        ],
        options={"mip_rel_gap": 0.0},
    )
    if found.x is None:
        raise DataError(f"The solver of integer programmes found no solution: {found.message}")
    choice = np.argmax(found.x.reshape(costs.shape), axis=1)
    rows = np.arange(n_groups)
    if float(limited[rows, choice].sum()) > limit * (1 + 1e-9):
        raise DataError("The solver's solution breaks the limit", allowed=f"at most {limit}")
    return Allocation(
        choice=tuple(choice.tolist()),
        n_bytes=int(sizes[rows, choice].sum()),
        cost=float(costs[rows, choice].sum()),
        gap=float(found.mip_gap),
    )
