"""What each format costs in each group of layers, and which choice of formats a limit allows."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mlflow_compress.decide.allocation import Allocation, Sizes, closest_within, smallest_within
from mlflow_compress.errors import ConfigError
from mlflow_compress.metrics.stats.arrays import Float

LimitKind = Literal["bits_per_weight", "max_bytes", "max_kl"]


@dataclass(frozen=True, kw_only=True)
class StoredSizes:
    """Bytes of the layers whose formats are chosen, and of everything else.

    Attributes
    ----------
    groups, formats : tuple of str
        Rows and columns of `layers`.
    layers : numpy.ndarray of int64, shape (n_groups, n_formats)
        Stored bytes of each group in each format: values, scales, zero points, shapes.
    base : int
        Bytes of the same layers in the baseline.
    rest : int
        Bytes of all other tensors of a checkpoint.
    weights : int
        Number of weights in the groups.
    """

    groups: tuple[str, ...]
    formats: tuple[str, ...]
    layers: Sizes
    base: int
    rest: int
    weights: int

    def bits(self, n_bytes: float) -> float:
        """Return stored bits per weight of the layers."""
        return 8 * n_bytes / self.weights

    def uniform(self, name: str) -> int:
        """Return the bytes of all groups in one format."""
        return int(self.layers[:, self.formats.index(name)].sum())


@dataclass(frozen=True, kw_only=True)
class Limit:
    """What a searched variant must keep to.

    Attributes
    ----------
    kind : {"bits_per_weight", "max_bytes", "max_kl"}
        Of the first two the closest variant is wanted, of the third the smallest.
    value : float
        The limit.
    """

    kind: LimitKind
    value: float

    @property
    def short(self) -> str:
        """The limit as part of a name: "4.5bit", "1500000B", "kl0.05"."""
        return {"bits_per_weight": "{:g}bit", "max_bytes": "{:.0f}B", "max_kl": "kl{:g}"}[self.kind].format(self.value)

    def layer_bytes(self, sizes: StoredSizes, *, scales: bool = True) -> int:
        """Return the bytes that the layers may take.

        Parameters
        ----------
        sizes : StoredSizes
            Of the layers in every format, and in the baseline.
        scales : bool
            Whether the sizes have scales and zero points in them; the message says so where they do not.

        Raises
        ------
        ConfigError
            The budget is below the smallest possible size, or above the baseline's; the message names the range.
        """
        smallest = int(sizes.layers.min(axis=1).sum())
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
    """KL of the model with one group changed, measured window by window of a text.

    Attributes
    ----------
    sizes : StoredSizes
        Groups, formats and their bytes.
    start : numpy.ndarray, shape (n_windows,)
        Mean KL per token of the model that the groups were changed in: 0 for the baseline.
    added : numpy.ndarray, shape (n_groups, n_formats, n_windows)
        What each change adds to it. In the baseline this is the KL itself.
    """

    sizes: StoredSizes
    start: Float
    added: Float

    @property
    def costs(self) -> Float:
        """Mean over the windows, shape (n_groups, n_formats)."""
        return np.asarray(self.added.mean(axis=2))

    def predicted(self, choice: Sequence[int]) -> float:
        """Return the KL of a choice of formats, if the changes add up."""
        rows = np.arange(len(choice))
        return float(self.start.mean() + self.costs[rows, list(choice)].sum())

    def largest_uniform(self, max_bytes: int) -> Allocation | None:
        """Return one format for all groups: that of the most bytes within a budget; None where none is as small."""
        n_bytes = self.sizes.layers.sum(axis=0)
        inside = np.flatnonzero(n_bytes <= max_bytes)
        if not len(inside):
            return None
        column = int(inside[n_bytes[inside].argmax()])
        cost = float(self.costs[:, column].sum())
        choice = (column,) * len(self.sizes.groups)
        return Allocation(choice=choice, n_bytes=int(n_bytes[column]), cost=cost, gap=None)

    def solved(self, limit: Limit, *, margin: float = 0.0) -> Allocation:
        """Return the best choice of formats within a limit.

        Parameters
        ----------
        limit : Limit
            What it must keep to.
        margin : float
            By how much the KL must stay below a limit of KL, because the upper end of its interval must keep to it.

        Raises
        ------
        ConfigError
            No choice keeps to the limit; the message names the range.
        """
        if limit.kind != "max_kl":
            return closest_within(self.costs, self.sizes.layers, max_bytes=limit.layer_bytes(self.sizes))
        lowest = float(self.start.mean() + self.costs.min(axis=1).sum()) + margin
        if limit.value < lowest:
            raise ConfigError(
                "max_kl is out of range",
                allowed=f"{lowest:.3g} or more: every group in the format that costs least",
                got=f"{limit.value:g}",
                fix="Add a format with more bits, or 'none'",
            )
        return smallest_within(self.costs, self.sizes.layers, max_cost=limit.value - margin - float(self.start.mean()))


@dataclass(frozen=True, kw_only=True, eq=False)
class LinearMix:
    """Two uniform variants, mixed so that they have a given size.

    Attributes
    ----------
    smaller, larger : str
        Their names.
    share : float
        Part of the weights that are as in the larger one.
    kl : numpy.ndarray, shape (n,)
        KL per unit (window or item), interpolated linearly.
    """

    smaller: str
    larger: str
    share: float
    kl: Float


def linear_mix(n_bytes: int, uniform: Mapping[str, tuple[int, Float]]) -> LinearMix | None:
    """Return the linear mix of the uniform variants next to a size; None where there is none on both sides.

    Where costs add up and all weights are alike, giving a share of them the larger format costs this much. So what lies
    below it has found out which weights matter.

    Parameters
    ----------
    n_bytes : int
        The size to reach.
    uniform : mapping of str to (int, numpy.ndarray)
        Size of each variant, and its KL on the same units.
    """
    ordered = sorted(uniform.items(), key=lambda item: item[1][0])
    for (small, (low, kl_low)), (large, (high, kl_high)) in itertools.pairwise(ordered):
        if low <= n_bytes <= high and low < high:
            share = (n_bytes - low) / (high - low)
            return LinearMix(smaller=small, larger=large, share=share, kl=(1 - share) * kl_low + share * kl_high)
    return None
