"""The items as arrays, the subsets that every metric reports, and what a model answered to them."""

import re
import string
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from scipy.special import softmax

from mlflow_compress.errors import AlignmentError, DataError
from mlflow_compress.item_families import ITEM_FAMILIES, ItemFamily
from mlflow_compress.metrics.stats.arrays import Bool, Float, Int, Objects
from mlflow_compress.reasoning import COMPARISONS
from mlflow_compress.records import (
    Generations,
    Items,
    MetricResult,
    OptionBounds,
    OptionDistances,
    OptionScores,
    Records,
    RunRecords,
    align,
)

_JOIN = "\x1f"
_FIXED_NATS = 3.0  # Of an option without tokens: an error that does not grow with its length
_OF_LETTERS = 5.5  # Of two options of one token each, the fixed ones with them; the median of the demo's letters is 5.8
WRITTEN_RULES = ("exact_match", "calls", *COMPARISONS)
"""Rules that grade a generated answer."""


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
        low, high = (None, None) if interval is None else map(float, interval)
        return MetricResult(
            name, float(value), low, high, level, int(n), int(n_unscored), task=self.task, category=self.category
        )


EVERYTHING = ItemSubset(None, None, np.empty(0, dtype=np.int64))
"""What is about no items, or about all at once."""


def _column(name: str) -> "cached_property[Objects]":
    return cached_property(lambda table: table.items.column(name))


@dataclass(frozen=True)
class ItemTable:
    """The items of a run, column by column; row `i` of every array is item `i`."""

    items: Items  # Unique by (task, item_id)

    task, item_id, family, rule = _column("task"), _column("item_id"), _column("family"), _column("rule")
    category = _column("category")  # None where an item has none

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
    def group(self) -> Int:
        """Code of each item's group: those of one task with one `group_id`, else the item alone; shape (n_items,)."""
        table = self.items.table
        named = table.column("group_id").is_valid().to_numpy()
        # The separator stands in no task's name, so that no group is taken for a single item.
        names = np.where(named, self.items.column("group_id"), self.item_id)
        keys = [f"{task}{_JOIN}{own:d}{_JOIN}{name}" for task, own, name in zip(self.task, named, names, strict=True)]
        return np.asarray(np.unique(keys, return_inverse=True)[1], dtype=np.int64)

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
        """Return the families of the items whose declared properties are as wanted, sorted."""
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
        """Families that have option distances: graded ones whose options are scored, and logged answers."""
        known = (*self.graded, *self.families(lambda family: family.logged))
        return tuple(name for name in sorted(known) if (self.n_options[self.family == name] > 0).any())

    def __len__(self) -> int:
        return len(self.items)

    def name(self, row: int) -> str:
        """Return "task/item_id" of one row, for messages."""
        return f"{self.task[row]}/{self.item_id[row]}"

    def locate(self, records: Records) -> Int:
        """Return the item's row for each row of `records`; rows of unknown items are an `AlignmentError`."""
        rows = pc.index_in(row_keys(records), value_set=self.keys)
        if rows.null_count:
            first = int(np.argmax(np.asarray(rows.is_null())))
            row = records.table.slice(first, 1).to_pylist()[0]
            raise AlignmentError(
                f"{rows.null_count} rows of the {records.NAME} records belong to no item",
                got=f"{row['task']}/{row['item_id']}",
                fix="Evaluate baseline and variant on the same tasks, limit and seed",
            )
        return np.asarray(rows.to_numpy(zero_copy_only=False), dtype=np.int64)

    def subsets(
        self, families: Collection[str], *, pooled: Collection[str] = (), categories: Collection[str] | None = None
    ) -> Iterator[ItemSubset]:
        """Iterate over the pooled subset, every task of the families, and every category of the families that have any.

        The pooled value is taken over the families `pooled`. Tasks of the families `categories`, by default of those
        that declare it, are split by category too.
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
    """Refuse two runs whose items differ in anything that a model saw or is judged by: prompt, gold, rule ..."""
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


_LENGTHS = {"loglik_per_char": "n_chars", "loglik_per_byte": "n_bytes"}
"""What a rule divides the log-likelihood by."""


@dataclass(frozen=True)
class OptionGrid:
    """Option scores laid out densely."""

    # Summed log-likelihood in nats, and what the item's rule takes the argmax of: the same, or divided by the option's
    # length; minus infinity where an item has no such option or was not scored; shape (n_items, n_permutations,
    # n_options)
    loglik: Float
    by_rule: Float
    content: Int  # Original index of the option shown at that position; 0 where there is none
    n_tokens: Int  # Of the option; 0 where there is none
    greedy: Bool  # Every token of the option is the argmax
    scored: Bool  # All options of the item are there and have a log-likelihood; shape (n_items, n_permutations)


@dataclass(frozen=True)
class Predictions:
    """What one model answered; column 0 is the original order, the others are shuffles."""

    # There is a prediction; it is right (False where unscored: always mask with `scored`); shape (n_items,
    # n_permutations)
    scored: Bool
    correct: Bool
    # Chosen shown position, and the original index of what stands there; meaningful for scored multiple choice; shape
    # (n_items, n_permutations)
    letter: Int
    content: Int
    # p(best) - p(second best) with p the softmax over the options' (normalised) log-likelihoods; NaN elsewhere; shape
    # (n_items, n_permutations)
    margin: Float
    # How far the right option is ahead of the best other one, or behind it, in what a variant moves such options by:
    # see `gold_lead`; NaN where there is no margin
    lead: Float


def _check_complete(view: ItemTable, counts: Int, what: str) -> Bool:
    """Return where every option is there; `counts`, shape (n_items, ...), of only some of them are a `DataError`."""
    wanted = view.n_options.reshape(-1, *([1] * (counts.ndim - 1)))
    partial = (counts != 0) & (counts != wanted)
    if partial.any():
        first = np.argwhere(partial)[0]
        raise DataError(
            f"The {what} records hold {counts[tuple(first)]} of {view.n_options[first[0]]} options of an item",
            got=view.name(int(first[0])),
            fix="Run the evaluate stage again",
        )
    return np.asarray((counts == wanted) & (wanted > 0), dtype=bool)


def is_null(records: OptionScores | OptionDistances | OptionBounds, column: str) -> Bool:
    """Return where a column is null, shape (n_rows,): a null says "not scored", a NaN that something broke."""
    return np.asarray(records.table.column(column).is_null().to_numpy(), dtype=bool)


def _option_cells(view: ItemTable, scores: OptionScores | OptionDistances | OptionBounds) -> tuple[Int, Int, Int]:
    """Return (item row, permutation, option) of every row; negative positions and repeated cells are refused."""
    item = view.locate(scores)
    permutation = scores.column("permutation").astype(np.int64)
    option = scores.column("option").astype(np.int64)
    if len(item) and (permutation.min() < 0 or option.min() < 0 or (option >= view.n_options[item]).any()):
        raise DataError(f"The {scores.NAME} records hold an option that its item does not have")
    if len(item):
        cell = (item * (permutation.max() + 1) + permutation) * (option.max() + 1) + option
        if len(np.unique(cell)) != len(cell):
            raise AlignmentError(f"Duplicate keys in the {scores.NAME} records", fix="Every key must be unique")
    return item, permutation, option


def option_grid(view: ItemTable, scores: OptionScores) -> OptionGrid:
    """Lay option scores out as dense arrays. An item is unscored in an order with a null log-likelihood.

    Such an option is longer than the model's context. NaN or infinite log-likelihoods are a `DataError` (a broken
    forward pass must not become an answer), as is an item with only some of its options, and an option without
    characters under a rule that divides by them.
    """
    item, permutation, option = _option_cells(view, scores)
    loglik, unscored = scores.column("loglik").astype(np.float64), is_null(scores, "loglik")
    bad = ~np.isfinite(loglik) & ~unscored
    if bad.any():
        raise DataError(
            f"{int(bad.sum())} log-likelihoods are NaN or infinite; the first belongs to "
            f"{view.name(int(item[np.argmax(bad)]))}",
            fix="The forward pass overflowed: evaluate in float32 or bfloat16, or look at the compressed weights",
        )
    shape = (len(view), int(permutation.max(initial=0)) + 1, max(int(view.n_options.max()), 1))
    cells = (item, permutation, option)
    counts = np.zeros(shape[:2], dtype=np.int64)
    np.add.at(counts, (item, permutation), 1)
    grid = OptionGrid(
        loglik=np.full(shape, -np.inf),
        by_rule=np.full(shape, -np.inf),
        content=np.zeros(shape, dtype=np.int64),
        n_tokens=np.zeros(shape, dtype=np.int64),
        greedy=np.zeros(shape, dtype=bool),
        scored=_check_complete(view, counts, scores.NAME),
    )
    length: Float = np.ones(len(scores))
    for rule, column in _LENGTHS.items():
        length = np.where(view.rule[item] == rule, scores.column(column).astype(np.float64), length)
    empty = length <= 0
    if empty.any():
        raise DataError("An option has no characters to normalise by", got=view.name(int(item[np.argmax(empty)])))
    grid.scored[item[unscored], permutation[unscored]] = False
    loglik = np.where(unscored, -np.inf, loglik)
    grid.loglik[cells] = loglik
    grid.by_rule[cells] = loglik / length
    grid.content[cells] = scores.column("content").astype(np.int64)
    grid.n_tokens[cells] = scores.column("n_tokens").astype(np.int64)
    grid.greedy[cells] = scores.column("greedy").astype(bool)
    return grid


def top_margin(values: Float) -> Float:
    """Return p(best) - p(second best) over the last axis, p = softmax over the options; NaN for fewer than two."""
    possible = np.isfinite(values).sum(axis=-1) >= 2
    margin = np.full(values.shape[:-1], np.nan)
    if possible.any():
        p = np.sort(softmax(values[possible], axis=-1), axis=-1)
        margin[possible] = p[..., -1] - p[..., -2]
    return margin


def gold_lead(grid: OptionGrid, gold: Int) -> Float:
    """Return the lead: the nats between the right option and the best other one, over the root of the nats of both.

    It is ``|x_g - x_o| (l_g + l_o)/2 / sqrt(3 + n_g + n_o)`` with g the right option, o the best of the others, x what
    the item's rule compares, l the length that it divides by (1 where it does not), and n the negative log-likelihood.
    A variant moves a log-likelihood by errors of its tokens, which add up like a random walk, and by an error that even
    a letter has (`_FIXED_NATS`, chosen with one variant). Two options of one token each stand in one distribution: what
    a variant adds to their logits does not grow with their nats, and the root is that of `_OF_LETTERS`. Shape (n_items,
    n_permutations); NaN where one of the two options is missing.

    - `gold` (n_items,): Original index of the right option.
    """
    there, right = np.isfinite(grid.by_rule), grid.content == gold[:, None, None]
    length = np.divide(grid.loglik, grid.by_rule, out=np.ones_like(grid.loglik), where=there & (grid.by_rule != 0))
    ends = []
    for some in (there & right, there & ~right):
        values = np.where(some, grid.by_rule, -np.inf)
        best = values.argmax(axis=-1)[..., None]
        columns = values, length, grid.loglik, grid.n_tokens
        ends.append([np.take_along_axis(x, best, axis=-1)[..., 0] for x in columns])
    (x, a, first, n), (y, b, second, m) = ends
    known = np.isfinite(x) & np.isfinite(y)
    gap = np.subtract(x, y, out=np.full_like(x, np.nan), where=known)
    nats = np.where((n == 1) & (m == 1), _OF_LETTERS, np.where(known, _FIXED_NATS - first - second, np.nan))
    return np.asarray(np.abs(gap) * (a + b) / 2 / np.sqrt(nats), dtype=np.float64)


def normalise_answer(text: str) -> str:
    """Return an answer for exact matching: lower case, punctuation and repeated spaces removed.

    A text that is one number (also "$1,234.50" or "12%") keeps its sign and decimals: "1,234.0" equals "1234", and
    "3.5" does not equal "35".
    """
    stripped = text.strip()
    number = re.fullmatch(r"[$€£]?\s*([-+]?)\s*[$€£]?((?:\d[\d,]*)(?:\.\d+)?|\.\d+)\s*%?\.?", stripped)
    if number:
        return repr(float(number.group(1) + number.group(2).replace(",", "")))
    lowered = stripped.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(lowered.split())


def _written(view: ItemTable, generations: Generations) -> tuple[Bool, Bool]:
    # Free answers (MT-Bench, instructions) are generations too, but belong to no item.
    tasks = set(view.task[np.isin(view.rule, WRITTEN_RULES)])
    first = generations.where(task=tasks, turn=0, sample=0)
    rows = view.locate(first)
    if len(np.unique(rows)) != len(rows):
        repeated = int(rows[np.argmax(np.bincount(rows)[rows] > 1)])
        raise AlignmentError(
            "Duplicate keys in the generations records", got=view.name(repeated), fix="Every key must be unique"
        )
    answers = view.items.table.column("answers").to_pylist()
    scored, correct = np.zeros(len(view), dtype=bool), np.zeros(len(view), dtype=bool)
    columns = (first.table.column(name).to_pylist() for name in ("text", "correct"))
    for row, text, judged in zip(rows, *columns, strict=True):
        if judged is not None:
            scored[row], correct[row] = True, judged
        elif text is not None and answers[row] and view.rule[row] == "exact_match":
            scored[row] = True
            correct[row] = normalise_answer(text) in {normalise_answer(a) for a in answers[row]}
    return scored, correct


def predict(view: ItemTable, run: RunRecords) -> tuple[Predictions, OptionGrid | None]:
    """Return what a model answered, by each item's own rule, and the grid it was read from.

    "loglik" takes the argmax of the summed log-likelihood (the harness's acc), "loglik_per_char" and "loglik_per_byte"
    of that divided by the option's characters or UTF-8 bytes (acc_norm, acc_bytes), "greedy" asks whether the single
    continuation is what greedy decoding gives, "exact_match" whether the first sample of the first turn equals a
    permitted answer (`normalise_answer`), "calls", "number", "letter" and "text" what the task has graded. Ties: the
    lowest shown position wins, for every model.
    """
    grid = option_grid(view, run.option_scores) if run.option_scores is not None else None
    shape = grid.scored.shape if grid is not None else (len(view), 1)
    scored, correct = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool)
    letter, content = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    margin, lead = (np.full(shape, np.nan) for _ in range(2))
    written = np.isin(view.rule, WRITTEN_RULES)
    if grid is not None:
        values = grid.by_rule
        scored = grid.scored & ~written[:, None]
        letter = values.argmax(axis=-1)
        content = np.take_along_axis(grid.content, letter[..., None], axis=-1)[..., 0]
        greedy = view.rule == "greedy"
        correct = scored & np.where(greedy[:, None], grid.greedy[..., 0], content == view.gold[:, None])
        chosen = scored & view.chooses[:, None]
        margin = np.where(chosen, top_margin(values), np.nan)
        lead = np.where(chosen, gold_lead(grid, view.gold), np.nan)
    if run.generations is not None and written.any():
        answered, right = _written(view, run.generations)
        scored[:, 0] |= answered & written
        correct[:, 0] |= right & written
    predictions = Predictions(scored=scored, correct=correct, letter=letter, content=content, margin=margin, lead=lead)
    return predictions, grid


def option_means(view: ItemTable, distances: OptionDistances | OptionBounds, column: str) -> Float:
    """Return one value per item: the mean over its options of a distance at permutation 0; NaN where it has none.

    An item with a null distance has none: one of its options is longer than the model's context. NaN or infinite
    distances, and an item with only some of its options, are a `DataError`.
    """
    original = distances.where(permutation=0)
    item, _, _ = _option_cells(view, original)
    values, unscored = original.column(column).astype(np.float64), is_null(original, column)
    bad = ~np.isfinite(values) & ~unscored
    if bad.any():
        first = int(np.argmax(bad))
        raise DataError(f"The {column} distances hold NaN or infinite values", got=view.name(int(item[first])))
    counts = np.bincount(item, minlength=len(view))
    there = _check_complete(view, counts, distances.NAME)
    there[item[unscored]] = False
    sums = np.bincount(item, weights=np.where(unscored, 0.0, values), minlength=len(view))
    return np.where(there, sums / np.maximum(counts, 1), np.nan)
