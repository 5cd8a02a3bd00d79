"""What each format costs in each group of layers, and which formats a limit allows."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mlflow_compress.errors import ConfigError, DataError
from mlflow_compress.metrics.stats.arrays import Float

Sizes = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """One format per group."""

    choice: tuple[int, ...]  # The column of each group's format
    n_bytes: int  # Their bytes
    cost: float  # The sum of their costs
    # The relative distance between this solution and the solver's bound: 0 means that it is proven to be the best. None
    # where no solver has chosen.
    gap: float | None


def closest_within(costs: npt.ArrayLike, sizes: npt.ArrayLike, *, max_bytes: int) -> Allocation:
    """Return the formats of the smallest summed cost that take at most `max_bytes`; less is a `ConfigError`.

    `costs` and `sizes`, in bytes, have shape (n_groups, n_formats). A size of 0: the group cannot have this format.
    """
    c, n = _checked(costs, sizes)
    smallest = int(_least(n, n))
    if max_bytes < smallest:
        raise ConfigError(
            "No choice of formats is as small as this", allowed=f"at least {smallest} bytes", got=max_bytes
        )
    return _solved(c, n, max_bytes=max_bytes)


def smallest_within(costs: npt.ArrayLike, sizes: npt.ArrayLike, *, max_cost: float) -> Allocation:
    """Return the formats of the fewest bytes whose summed cost is at most `max_cost`; less is a `ConfigError`."""
    c, n = _checked(costs, sizes)
    closest = _least(c, n)
    if max_cost < closest:
        raise ConfigError("No choice of formats is as close as this", allowed=f"at least {closest:.3g}", got=max_cost)
    return _solved(c, n, max_cost=max_cost)


def _checked(costs: npt.ArrayLike, sizes: npt.ArrayLike) -> tuple[Float, Sizes]:
    c, n = np.asarray(costs, dtype=np.float64), np.asarray(sizes, dtype=np.int64)
    if c.ndim != 2 or c.shape != n.shape or not c.size:
        raise DataError("Costs and sizes need one row per group and one column per format", got=f"{c.shape}, {n.shape}")
    if not np.isfinite(c).all() or (n < 0).any() or not (n > 0).any(axis=1).all():
        raise DataError("A cost is not finite, or a size is not positive")
    return c, n


def _least(values: npt.NDArray[Any], sizes: Sizes) -> float:
    """Return the sum of each group's least value, over the formats that it can have."""
    return float(np.where(sizes > 0, values, np.inf).min(axis=1).sum())


def _solved(
    costs: Float,
    sizes: Sizes,
    *,
    max_bytes: int | None = None,
    max_cost: float | None = None,
) -> Allocation:
    """Minimise the summed cost within `max_bytes`, or the bytes within `max_cost`; scipy's solver is HiGHS.

    Both sums are scaled, because the solver's tolerances are absolute.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    n_groups, n_formats = costs.shape
    n_bytes, cost = sizes.ravel().astype(np.float64), costs.ravel()
    if max_bytes is not None:
        objective, limited, limit, unit = cost, n_bytes, float(max_bytes), float(math.gcd(*sizes.ravel().tolist()))
    else:
        assert max_cost is not None
        objective, limited, limit, unit = n_bytes, cost, max_cost, float(np.abs(cost).max()) or 1.0
    one_each = np.kron(np.eye(n_groups), np.ones((1, n_formats)))
    scale = float(np.abs(objective).max()) or 1.0
    solution = milp(
        objective / scale,
        integrality=np.ones(len(cost)),
        bounds=Bounds(0, (sizes.ravel() > 0).astype(np.float64)),
        constraints=[
            LinearConstraint(csr_array(one_each), 1, 1),
            LinearConstraint(limited[None] / unit, -np.inf, limit / unit),
        ],
        options={"mip_rel_gap": 0.0},
    )
    if solution.x is None:
        raise DataError(f"The solver of integer programmes found no solution: {solution.message}")
    choice = np.argmax(solution.x.reshape(costs.shape), axis=1)
    rows = np.arange(n_groups)
    if float(limited.reshape(costs.shape)[rows, choice].sum()) > limit + 1e-9 * max(abs(limit), np.abs(limited).max()):
        raise DataError("The solver's solution breaks the limit", allowed=f"at most {limit}")
    return Allocation(
        choice=tuple(choice.tolist()),
        n_bytes=int(sizes[rows, choice].sum()),
        cost=float(costs[rows, choice].sum()),
        gap=float(solution.mip_gap),
    )


@dataclass(frozen=True, kw_only=True)
class StoredSizes:
    """Bytes of the layers whose formats are chosen, and of everything else."""

    groups: tuple[str, ...]  # Rows and columns of `layers`
    formats: tuple[str, ...]
    # Bytes of each group in each format: values, scales, zero points, shapes; shape (n_groups, n_formats). 0 where it
    # cannot have the format: layers have those of weights, caches those of caches
    layers: Sizes
    base: int  # Bytes of the same groups in the baseline
    rest: int  # Bytes of all other tensors of a checkpoint
    weights: int  # Number of weights in the groups
    cache: int = 0  # Bytes of the caches in the baseline, where they are among the groups

    def bits(self, n_bytes: float) -> float:
        return 8 * n_bytes / self.weights

    def chosen(self, choice: Sequence[int]) -> dict[str, str]:
        """Return the format of each group in a choice of columns."""
        return {group: self.formats[column] for group, column in zip(self.groups, choice, strict=True)}

    def uniform(self, name: str) -> int:
        """Return the bytes of all layers in one format, and of their caches as in the baseline."""
        return int(self.layers[:, self.formats.index(name)].sum()) + self.cache

    @property
    def uniform_choices(self) -> Iterator[tuple[int, ...]]:
        """One format for all layers, and one for all caches, where they are among the groups."""
        kinds = [tuple(np.flatnonzero(row).tolist()) for row in self.layers > 0]
        for columns in itertools.product(*dict.fromkeys(kinds)):
            column = dict(zip(dict.fromkeys(kinds), columns, strict=True))
            yield tuple(column[kind] for kind in kinds)


@dataclass(frozen=True, kw_only=True)
class Limit:
    """What a searched variant must keep to."""

    # Of the first two the closest variant is wanted, of the third the smallest
    kind: Literal["bits_per_weight", "max_bytes", "max_kl"]
    value: float  # The limit

    @property
    def short(self) -> str:
        """The limit as part of a name: "4.5bit", "1500000B", "kl0.05"."""
        return {"bits_per_weight": "{:g}bit", "max_bytes": "{:.0f}B", "max_kl": "kl{:g}"}[self.kind].format(self.value)

    def layer_bytes(self, sizes: StoredSizes, *, scales: bool = True) -> int:
        """Return the bytes that the layers may take; a `ConfigError` names the range where the limit is outside.

        `scales` says whether the sizes have scales and zero points in them.
        """
        smallest = int(_least(sizes.layers, sizes.layers))
        smaller = "every group in its smallest format" + ("" if scales else ", and a little more for scales")
        if self.kind == "bits_per_weight":
            low, high, got = sizes.bits(smallest), sizes.bits(sizes.base), int(self.value * sizes.weights / 8)
            allowed = f"{np.ceil(low * 1e4) / 1e4:g} ({smaller}) to {high:g} (the baseline)"
        else:
            got = int(self.value) - sizes.rest
            allowed = f"{smallest + sizes.rest} ({smaller}) to {sizes.base + sizes.rest} (the baseline)"
        if not smallest <= got <= sizes.base:
            raise ConfigError(f"{self.kind} is out of range", allowed=allowed, got=f"{self.value:g}")
        return got


@dataclass(frozen=True, kw_only=True, eq=False)
class CostTable:
    """KL of the model with one group changed, measured window by window of a text."""

    sizes: StoredSizes  # Groups, formats and their bytes
    kl: Float  # Mean per token of the baseline with the group in the format; shape (n_groups, n_formats, n_windows)

    @property
    def costs(self) -> Float:
        """Mean over the windows, shape (n_groups, n_formats)."""
        return np.asarray(self.kl.mean(axis=2))

    def predicted(self, choice: Sequence[int]) -> float:
        """Return the KL of a choice of formats, if the changes add up."""
        rows = np.arange(len(choice))
        return float(self.costs[rows, list(choice)].sum())

    def largest_uniform(self, max_bytes: int) -> Allocation | None:
        """Return one format for all groups: that of the most bytes within a budget; None where none is as small."""
        rows = np.arange(len(self.sizes.groups))
        sized = {choice: int(self.sizes.layers[rows, choice].sum()) for choice in self.sizes.uniform_choices}
        inside = [choice for choice, n_bytes in sized.items() if n_bytes <= max_bytes]
        if not inside:
            return None
        return self.allocated(max(inside, key=sized.__getitem__))

    def allocated(self, choice: tuple[int, ...]) -> Allocation:
        """Return a choice of formats that no solver has made."""
        rows = np.arange(len(choice))
        n_bytes, cost = int(self.sizes.layers[rows, choice].sum()), float(self.costs[rows, choice].sum())
        return Allocation(choice=choice, n_bytes=n_bytes, cost=cost, gap=None)

    def solved(self, limit: Limit) -> Allocation:
        """Return the best choice of formats within a limit; a `ConfigError` names the range where there is none."""
        if limit.kind != "max_kl":
            max_bytes = limit.layer_bytes(self.sizes)
            return closest_within(self.costs, self.sizes.layers, max_bytes=max_bytes)
        lowest = _least(self.costs, self.sizes.layers)
        if limit.value < lowest:
            raise ConfigError(
                "max_kl is out of range",
                allowed=f"{lowest:.3g} or more: every group in the format that costs least",
                got=f"{limit.value:g}",
                fix="Add a format with more bits, or 'none'",
            )
        return smallest_within(self.costs, self.sizes.layers, max_cost=limit.value)


@dataclass(frozen=True, kw_only=True, eq=False)
class _LinearMix:
    """Two uniform variants, mixed so that they have a given size."""

    smaller: str  # Their names
    larger: str
    share: float  # Part of the weights that are as in the larger one
    kl: Float  # KL per unit (window or item), interpolated linearly; shape (n,)


def linear_mix(n_bytes: int, uniform: Mapping[str, tuple[int, Float]]) -> _LinearMix | None:
    """Return the linear mix of the uniform variants next to a size; None where there is none on both sides.

    `uniform` has the size of each variant, and its KL on the same units. Where costs add up and all weights are alike,
    giving a share of them the larger format costs this much. So what lies below it has found out which weights matter.
    """
    ordered = sorted(uniform.items(), key=lambda item: item[1][0])
    for (small, (low, kl_low)), (large, (high, kl_high)) in itertools.pairwise(ordered):
        if low <= n_bytes <= high and low < high:
            share = (n_bytes - low) / (high - low)
            return _LinearMix(smaller=small, larger=large, share=share, kl=(1 - share) * kl_low + share * kl_high)
    return None
