"""The distances of many swaps on the same tokens, as one array, and their means with intervals over texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlflow_compress.errors import AlignmentError, DataError
from mlflow_compress.metrics.stats.arrays import Bool, Float, Int
from mlflow_compress.metrics.stats.bootstrap import bootstrap, cluster_sums, ratio
from mlflow_compress.metrics.stats.studentized import studentized_interval
from mlflow_compress.records import MetricResult, SwapDistances


@dataclass(frozen=True)
class SwapTable:
    """Distances of n swaps at the same m tokens.

    Attributes
    ----------
    swaps : tuple of str
    kl : ndarray, shape (n, m)
    top : ndarray of int, shape (n, m)
        Most probable token after each swap.
    same_top : ndarray of bool, shape (n, m)
        Whether it is the baseline's.
    text, position : ndarray of int, shape (m,)
        Index of the token's text in `texts`, and the token's index in it.
    texts : tuple of (str, str)
        Corpus and id of each text.
    """

    swaps: tuple[str, ...]
    kl: Float
    top: Int
    same_top: Bool
    text: Int
    position: Int
    texts: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, records: SwapDistances) -> SwapTable:
        """Return the table of records.

        Raises
        ------
        DataError
            There are no records.
        AlignmentError
            Two swaps were measured on other tokens.
        """
        if not len(records):
            raise DataError("There are no distances of swaps")
        names = records.column("swap")
        swaps = tuple(dict.fromkeys(names.tolist()))
        keys = [f"{task}\n{item}" for task, item in zip(records.column("task"), records.column("item_id"), strict=True)]
        found, codes = np.unique(np.asarray(keys, dtype=object), return_inverse=True)
        place = records.column("position").astype(np.int64)
        rows = [np.flatnonzero(names == swap) for swap in swaps]
        if any(
            len(r) != len(rows[0]) or (codes[r] != codes[rows[0]]).any() or (place[r] != place[rows[0]]).any()
            for r in rows
        ):
            raise AlignmentError("Two swaps were measured on other tokens", fix="Measure them together")
        index = np.stack(rows)
        texts = tuple((task, item) for task, _, item in (str(key).partition("\n") for key in found))
        kl, top, same = (records.column(name)[index] for name in ("kl", "top", "same_top"))
        return cls(
            swaps, kl.astype(float), top.astype(np.int64), same.astype(bool), codes[rows[0]], place[rows[0]], texts
        )

    def of_swap(self, swap: str) -> Float:
        """Return the KL of one swap at every token, shape (m,)."""
        return np.asarray(self.kl[self.swaps.index(swap)])

    def sums(self, values: Float, rows: Bool | None = None) -> Float:
        """Return the sum of values, shape (m,) or (m, k), of each text, and its number of tokens as the last column."""
        chosen = np.ones(len(self.text), dtype=bool) if rows is None else rows
        return cluster_sums(values[chosen], self.text[chosen])

    def mean(self, swap: str, name: str, *, rows: Bool | None = None, category: str | None = None) -> MetricResult:
        """Return the mean KL of a swap over tokens, with the studentised bootstrap's interval over whole texts."""
        kl = self.of_swap(swap)
        sums = self.sums(kl, rows)
        interval = studentized_interval(sums[:, 0], sums[:, 1])
        low, high = interval if interval is not None else (None, None)
        value = float(sums[:, 0].sum() / sums[:, 1].sum())
        return MetricResult(name, value, low, high, n=int(sums[:, -1].sum()), category=category)


def paired_ratio(table: SwapTable, name: str, above: Sequence[str], below: Sequence[str]) -> MetricResult | None:
    """Return the summed KL of some swaps over that of others, with the bootstrap's interval over whole texts.

    Both are on the same texts, which are drawn together.

    Returns
    -------
    MetricResult or None
        None where the KL below is 0: then the ratio does not exist.
    """
    columns = np.column_stack([sum(table.of_swap(swap) for swap in side) for side in (above, below)])
    sums = table.sums(columns)
    if sums[:, 1].sum() == 0:
        return None
    value = float(sums[:, 0].sum() / sums[:, 1].sum())
    interval = bootstrap(sums[:, :2], ratio)
    low, high = interval if interval is not None else (None, None)
    return MetricResult(name, value, low, high, n=len(table.text))
