"""The items as arrays, and the subsets (pooled, by task, by category) that every metric reports."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mlflow_compress.errors import AlignmentError, DataError
from mlflow_compress.item_families import ITEM_FAMILIES, ItemFamily
from mlflow_compress.metrics.stats.arrays import Bool, Int, Objects
from mlflow_compress.records import Items, MetricResult, Records, align

_JOIN = "\x1f"


def row_keys(records: Records) -> pa.Array:
    """Return one string per row that identifies its (task, item_id)."""
    table = records.table
    keys = pc.binary_join_element_wise(table.column("task"), table.column("item_id"), _JOIN)
    return keys.combine_chunks() if isinstance(keys, pa.ChunkedArray) else keys


@dataclass(frozen=True)
class ItemSubset:
    """Rows of the items that one result is about; None means pooled."""

    task: str | None
    category: str | None
    rows: Int

    def result(
        self,
        name: str,
        value: float,
        interval: tuple[float, float] | None = None,
        *,
        n: int,
        level: float,
        n_unscored: int = 0,
    ) -> MetricResult:
        """Return a `MetricResult` about this subset."""
        low, high = (None, None) if interval is None else (float(interval[0]), float(interval[1]))
        return MetricResult(
            name=name,
            value=float(value),
            low=low,
            high=high,
            level=level,
            n=int(n),
            n_unscored=int(n_unscored),
            task=self.task,
            category=self.category,
        )


@dataclass(frozen=True)
class ItemTable:
    """The items of a run, column by column; row `i` of every array is item `i`."""

    items: Items  # Unique by (task, item_id)

    def __post_init__(self) -> None:
        if len(self.items) == 0:
            raise DataError("The items records are empty", fix="Evaluate at least one item")
        if len(pc.unique(self.keys)) != len(self.items):
            raise AlignmentError("Duplicate keys in the items records", fix="Every item id must be unique in its task")
        bad = self.chooses & ~((self.gold >= 0) & (self.gold < self.n_options))
        if bad.any():
            raise DataError("A multiple-choice item has no valid gold option", got=self.name(int(np.argmax(bad))))

    @cached_property
    def keys(self) -> pa.Array:
        """One string per item, unique."""
        return row_keys(self.items)

    @cached_property
    def task(self) -> Objects:
        """Task names, shape (n_items,)."""
        return self.items.column("task")

    @cached_property
    def item_id(self) -> Objects:
        """Item ids, shape (n_items,)."""
        return self.items.column("item_id")

    @cached_property
    def family(self) -> Objects:
        """Families, shape (n_items,)."""
        return self.items.column("family")

    @cached_property
    def category(self) -> Objects:
        """Categories, None where an item has none, shape (n_items,)."""
        return self.items.column("category")

    @cached_property
    def rule(self) -> Objects:
        """Prediction rules, shape (n_items,)."""
        return self.items.column("rule")

    @cached_property
    def gold(self) -> Int:
        """Index of the right option in the original order; -1 only where an item has no options, shape (n_items,)."""
        return np.asarray(pc.fill_null(self.items.table.column("gold"), -1).to_numpy(), dtype=np.int64)

    @cached_property
    def n_options(self) -> Int:
        """Number of options that scoring scores: those of the item, 1 for a greedy answer, 0 for a generated one."""
        lengths = pc.fill_null(pc.list_value_length(self.items.table.column("options")), 0).to_numpy()
        counts = np.asarray(lengths, dtype=np.int64).copy()
        counts[self.rule == "greedy"] = 1
        counts[self.rule == "exact_match"] = 0
        return counts

    @cached_property
    def chooses(self) -> Bool:
        """Whether an item offers options to choose from, shape (n_items,)."""
        return np.isin(self.family, self.families(lambda family: family.chooses))

    def families(self, wanted: Callable[[ItemFamily], bool]) -> tuple[str, ...]:
        """Return the families of the items whose declared properties are as wanted, sorted.

        Raises `ConfigError`: when a family of the items is not registered: the plug-in that made it is not installed.
        """
        return tuple(name for name in sorted(set(self.family)) if wanted(ITEM_FAMILIES.get(name)))

    @cached_property
    def graded(self) -> tuple[str, ...]:
        """Families that have an accuracy."""
        return self.families(lambda family: family.graded)

    @cached_property
    def choice(self) -> tuple[str, ...]:
        """Families whose items at permutation 0 are pooled into the headline values."""
        return self.families(lambda family: family.headline)

    @cached_property
    def scored(self) -> tuple[str, ...]:
        """Graded families whose options are scored, so that they have option distances."""
        return tuple(name for name in self.graded if (self.n_options[self.family == name] > 0).any())

    def __len__(self) -> int:
        return len(self.items)

    def name(self, row: int) -> str:
        """Return "task/item_id" of one row, for messages."""
        table = self.items.table
        return f"{table.column('task')[row].as_py()}/{table.column('item_id')[row].as_py()}"

    def locate(self, records: Records) -> Int:
        """Return the item's row for each row of `records`; rows of unknown items are an `AlignmentError`."""
        found = pc.index_in(row_keys(records), value_set=self.keys)
        if found.null_count:
            first = int(np.argmax(np.asarray(found.is_null())))
            row = records.table.slice(first, 1).to_pylist()[0]
            raise AlignmentError(
                f"{found.null_count} rows of the {records.NAME} records belong to no item",
                got=f"{row['task']}/{row['item_id']}",
                fix="Evaluate baseline and variant on the same tasks, limit and seed",
            )
        return np.asarray(found.to_numpy(zero_copy_only=False), dtype=np.int64)

    def subsets(
        self, families: Collection[str], *, pooled: Collection[str] = (), categories: Collection[str] | None = None
    ) -> Iterator[ItemSubset]:
        """Iterate over the pooled subset, every task of the families, and every category of the families that have any.

        - `pooled`: Families that the pooled value is taken over; empty for none.
        - `categories`: Families whose tasks are split by category too; by default those that declare it.
        """
        if categories is None:
            categories = self.families(lambda family: family.by_category)
        chosen = np.flatnonzero(np.isin(self.family, list(pooled)))
        if len(chosen):
            yield ItemSubset(None, None, chosen)
        for task in sorted(set(self.task[np.isin(self.family, list(families))])):
            rows = np.flatnonzero((self.task == task) & np.isin(self.family, list(families)))
            yield ItemSubset(task, None, rows)
            split = rows[np.isin(self.family[rows], list(categories))]
            named = np.array([c is not None and c != "" for c in self.category[split]], dtype=bool)
            split = split[named]
            if len(split):
                names, codes = np.unique(self.category[split].astype(str), return_inverse=True)
                for code, category in enumerate(names):
                    yield ItemSubset(task, str(category), split[codes == code])


def check_same_items(baseline: Items, variant: Items) -> None:
    """Refuse two runs whose items differ in anything that a model saw or is judged by.

    Raises `AlignmentError`: naming the missing items, or the first item and the column (prompt, options, gold, rule
    ...) that differ.
    """
    order = align(baseline, variant)
    other = variant.table.take(pa.array(order))
    for column in Items.SCHEMA.names:
        if baseline.table.column(column).combine_chunks().equals(other.column(column).combine_chunks()):
            continue
        left, right = baseline.table.column(column).to_pylist(), other.column(column).to_pylist()
        differing = [row for row, pair in enumerate(zip(left, right, strict=True)) if pair[0] != pair[1]]
        if differing:
            row = differing[0]
            raise AlignmentError(
                f"Baseline and variant differ in the {column} of {len(differing)} item(s), the first being "
                f"{ItemTable(baseline).name(row)}",
                fix="Evaluate both with the same tasks, shots, prompt format and seed",
            )
