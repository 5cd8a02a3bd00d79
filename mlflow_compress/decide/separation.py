"""Which variants of one evaluation can be told apart: paired tests over the items that both have."""

import itertools
import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from scipy import special

from mlflow_compress.errors import AlignmentError, DataError
from mlflow_compress.metrics.core.estimates import PairedDifference
from mlflow_compress.metrics.core.metric_inputs import MetricInputs, MetricSettings
from mlflow_compress.metrics.core.requirements import PREDICTIONS, TOKEN_DISTANCES, TOKEN_SCORES, VARIANT
from mlflow_compress.metrics.core.token_groups import check_same_targets, matched, token_groups
from mlflow_compress.metrics.stats import stratified
from mlflow_compress.metrics.stats.arrays import Bool, Float, Int, Objects, same_length
from mlflow_compress.metrics.stats.intervals import FEWEST_GROUPS, are_grouped, effective_groups, group_sums
from mlflow_compress.metrics.stats.significance import holm, mcnemar_exact, paired_mean


@dataclass(frozen=True, eq=False)
class ItemScores:
    """What one variant scored on each item of the headline values. Row `i` of every array is item `i`."""

    task: Objects  # Together they identify an item; shape (n,)
    item_id: Objects
    # 1 where the variant is right, 0 where it is wrong, NaN where variant or baseline has no answer; shape (n,)
    correct: Float
    kl: Float  # Divergence from the baseline in nats, NaN where the item has none; shape (n,)
    # 1 where the baseline's answer is right and the variant's wrong, or the reverse, else 0; NaN like `correct`
    flipped: Float
    group: Int  # Code of the group that the item shares a text or source with; shape (n,)
    design: stratified.Design | None = None  # How the items were drawn; None where they are all items

    def __post_init__(self) -> None:
        same_length(**self._arrays())

    def __getitem__(self, rows: Bool | Int) -> "ItemScores":
        """Return the scores of some items."""
        return ItemScores(**{name: array[rows] for name, array in self._arrays().items()})

    def _arrays(self) -> dict[str, Any]:
        return {one.name: array for one in fields(self) if (array := getattr(self, one.name)) is not None}

    def in_order_of(self, other: "ItemScores") -> "ItemScores":
        """Return the same scores, with the items in the order of `other`; other items are an `AlignmentError`."""
        mine, theirs = self._keys(), other._keys()
        if mine == theirs:
            return self
        rows = {key: row for row, key in enumerate(mine)}
        if len(rows) != len(mine) or set(rows) != set(theirs):
            raise AlignmentError(
                "Two variants were not evaluated on the same items", fix="Compare variants of one evaluation"
            )
        return self[np.array([rows[key] for key in theirs])]

    def in_common(self, other: "ItemScores") -> "tuple[ItemScores, ItemScores]":
        """Return the scores of both on the items that both have.

        The order in which the items of a stratum are drawn is the same for all variants of an evaluation. So the items
        in common are the first of each stratum, as many as the variant with fewer of them has: a sample with known
        probabilities. Two variants differ on an item only if one of them differs from the baseline, so that the
        probability of it is at most the sum of theirs.
        """
        if self.design is None and other.design is None:
            return self, other.in_order_of(self)
        theirs = {key: row for row, key in enumerate(other._keys())}
        pairs = [(row, theirs[key]) for row, key in enumerate(self._keys()) if key in theirs]
        mine, yours = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        first, second = self[mine], other[yours]
        a = second.design if first.design is None else first.design
        b = first.design if second.design is None else second.design
        assert a is not None and b is not None
        known = [one.flips for one in (first.design, second.design) if one is not None and one.flips is not None]
        flips = np.minimum(np.sum(known, axis=0), 0.5) if known else None
        design = stratified.Design(a.stratum, a.size, np.minimum(a.drawn, b.drawn), flips)
        drawn = [Counter(one.design.stratum.tolist()) for one in (self, other) if one.design is not None]
        fewest = (drawn[0] & drawn[-1]).total()
        if len(pairs) != fewest or (a.stratum != b.stratum).any() or (a.size != b.size).any():
            raise AlignmentError(
                "The items of two variants were not drawn in the same order", fix="Compare variants of one evaluation"
            )
        return replace(first, design=design), replace(second, design=design)

    def _keys(self) -> list[tuple[str, str]]:
        return list(zip(self.task.tolist(), self.item_id.tolist(), strict=True))


def item_scores(inputs: MetricInputs) -> ItemScores:
    """Return the scores of a variant on the items that its headline values are pooled over."""
    reason = inputs.missing(VARIANT, PREDICTIONS)
    if inputs.variant is None or reason is not None:
        raise DataError("The items of these records cannot be compared", got=reason)
    view, rows = inputs.view, inputs.headline_rows
    right = inputs.variant_predictions.correct[rows, 0].astype(np.float64)
    measured, scored = inputs.variant.option_distances is not None, inputs.scored_by_both[rows]
    return ItemScores(
        task=view.task[rows],
        item_id=view.item_id[rows],
        correct=np.where(scored, right, np.nan),
        kl=inputs.distance("kl")[rows] if measured else np.full(len(rows), np.nan),
        flipped=np.where(scored, right != inputs.baseline_predictions.correct[rows, 0], np.nan),
        group=view.group[rows],
        design=inputs.units(rows).design,
    )


SIGNIFICANCE = 0.05


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A paired difference of two variants, the second minus the first."""

    value: float  # Mean difference per item and its interval, which is not corrected
    low: float | None  # Neither end where all differences of KLs are 0: what was not seen may differ
    high: float | None
    n: int  # Items that both have
    p: float  # p-value of no difference: see `_kl`, and of McNemar's mid-p test (correctness)
    p_holm: float  # The same after Holm's correction over both tests of all pairs of the scoreboard

    @property
    def significant(self) -> bool:
        """Whether the corrected p-value is below 0.05."""
        return self.p_holm < SIGNIFICANCE


@dataclass(frozen=True, kw_only=True)
class Separation:
    """Whether two variants can be told apart."""

    first: str  # Their names
    second: str
    # Difference of the KL per item, in nats; None where fewer than two items, or `FEWEST_GROUPS` groups, have one
    kl: Difference | None
    # Difference of the share of right answers; None where no item, or too few groups, were answered by both
    correctness: Difference | None
    # Where items were drawn, and all of them may say otherwise by KL: items of each that should settle it
    more_items: int | None = None

    @property
    def told_apart(self) -> bool:
        return any(test is not None and test.significant for test in (self.kl, self.correctness))

    @property
    def tied(self) -> bool:
        return (self.kl is not None or self.correctness is not None) and not self.told_apart


@dataclass(frozen=True, kw_only=True)
class DocumentsTest:
    """On how many documents of running text each of two variants is nearer to the baseline, by mean KL."""

    first: int
    second: int
    equal: int

    @property
    def p(self) -> float:
        """The exact sign test's p-value; documents with equal KL do not count."""
        return mcnemar_exact(self.first, self.second)


def by_document(first: MetricInputs, second: MetricInputs) -> DocumentsTest | None:
    """Return the paired comparison over the documents of running text, None where one has none.

    Windows of one document share its topic and style. So documents count, not windows: more windows of the same few
    documents are no more evidence. A text with unknown documents is cut as for its intervals.

    Raises `AlignmentError`: the two have not scored the same tokens.
    """
    sides = (first, second)
    if any(one.missing(VARIANT, TOKEN_SCORES, TOKEN_DISTANCES) is not None for one in sides):
        return None
    tokens, theirs = (one.baseline.token_scores for one in sides)
    assert tokens is not None and theirs is not None
    check_same_targets(tokens, theirs)
    kl = [matched(tokens, one.variant.token_distances, "kl") for one in sides]  # type: ignore[union-attr, arg-type]
    documents = group_sums(kl[1] - kl[0], token_groups(tokens).document)[0]
    signs = Counter(np.sign(documents).tolist())
    return DocumentsTest(first=signs[1.0], second=signs[-1.0], equal=signs[0.0])


def _kl(
    first: ItemScores, second: ItemScores, level: float
) -> tuple[Difference | None, stratified.WeightedMean | None]:
    """Return Student's paired test; of items in groups, of the groups' sums; of drawn items, of the weighted mean.

    The second is the mean of drawn items with its variances.

    The p-value is the larger one of the sample's, and of the sample in which the unit that speaks most against the
    difference stands twice: what the heaviest item is, a sample may not have seen (`benchmarks/kl_against_harm.py`).
    """
    difference, groups = second.kl - first.kl, first.group
    there = np.isfinite(difference)
    difference, groups = difference[there], groups[there]
    n, units, mean_of_all = len(difference), difference, None
    if n and first.design is not None:
        design = first.design[there]
        mean_of_all = stratified.weighted_mean(difference, design, groups)
        if mean_of_all.n_groups < FEWEST_GROUPS:
            return None, None
        units = stratified.as_if_independent(difference, design, mean_of_all.population)
    elif n and are_grouped(groups):
        sums, sizes = group_sums(difference, groups)
        units = sums * len(sums) / n  # whose mean is that of the items
        if effective_groups(sizes) < FEWEST_GROUPS:
            return None, None
    mean = paired_mean(units, level=level) if n else None
    if mean is None:
        return None, None
    against = units.min() if mean.value > 0 else units.max()
    twice = paired_mean(np.append(units, against))
    assert twice is not None  # as `mean` is not
    p = max(mean.p_value, twice.p_value) if twice.value * mean.value > 0 else 1.0
    low, high = mean.interval or (None, None)
    return Difference(value=mean.value, low=low, high=high, n=n, p=p, p_holm=p), mean_of_all


_OPEN = 0.025
"""Probability that all items tell a pair apart, above which a pair that is not told apart is open."""


def _more_items(
    test: Difference, drawn: stratified.WeightedMean, design: stratified.Design, critical: float
) -> int | None:
    """Return with how many items a test of drawn ones should be settled; None where it is.

    It is settled where the two are told apart by `EARLY` of the error; or not told apart, and with all items they
    hardly would be: the mean of all items is normal around that of the drawn ones with the variance for the benchmark,
    and its own test is known but for that.

    - `critical`: Standard errors that tell two apart.

    Source: Lan, Simon and Halperin, "Stochastically curtailed tests in long-term clinical trials", 1982.
    """
    own, every = drawn.population - drawn.benchmark, design.n_items
    if min(own, drawn.benchmark) <= 0 or test.p_holm < stratified.EARLY * SIGNIFICANCE:
        return None

    def apart(benchmark: float) -> float:
        ends = (sign * abs(test.value) - critical * own**0.5 for sign in (1, -1))
        return sum(float(special.ndtr(end / benchmark**0.5)) for end in ends)

    if not test.significant and apart(drawn.benchmark) <= _OPEN:
        return None
    for growth in (1.5, 2.0, 3.0):
        n = math.ceil(test.n * growth)
        if n >= stratified.NEARLY_ALL * every:
            break
        left = drawn.benchmark * (1 / n - 1 / every) / (1 / test.n - 1 / every)
        if abs(test.value) > 1.2 * critical * (own + left) ** 0.5 or apart(left) <= _OPEN / 2:
            return n
    return every


def _correctness(first: ItemScores, second: ItemScores, level: float) -> Difference | None:
    both = np.isfinite(first.correct) & np.isfinite(second.correct)
    if not both.any():
        return None
    units = stratified.Units(first.group, first.design)[both]
    change = PairedDifference.of(first.correct[both] == 1, second.correct[both] == 1, units)
    value, ends = change.at(MetricSettings(level=level), 1.0)
    if ends is None:
        return None
    p = change.p_value.value
    return Difference(value=value, low=ends[0], high=ends[1], n=change.n, p=p, p_holm=p)


def separate(named: Sequence[tuple[str, ItemScores]], *, level: float = 0.95) -> tuple[Separation, ...]:
    """Return every pair of variants, with Holm's correction over both tests of all pairs."""
    aligned = all(items.design is None for _, items in named)
    if aligned:  # once, not in every pair
        named = [(name, items.in_order_of(named[0][1])) for name, items in named]
    both = [
        (a, b, *((one, other) if aligned else one.in_common(other)))
        for (a, one), (b, other) in itertools.combinations(named, 2)
    ]
    by_kl = [_kl(x, y, level) for _, _, x, y in both]
    pairs = tuple(
        Separation(first=a, second=b, kl=test, correctness=_correctness(x, y, level))
        for (a, b, x, y), (test, _) in zip(both, by_kl, strict=True)
    )
    tests = [test for pair in pairs for test in (pair.kl, pair.correctness) if test is not None]
    corrected = iter(holm([test.p for test in tests]).tolist() if tests else [])

    def with_correction(test: Difference | None) -> Difference | None:
        return None if test is None else replace(test, p_holm=next(corrected))

    comparisons = [
        replace(pair, kl=with_correction(pair.kl), correctness=with_correction(pair.correctness)) for pair in pairs
    ]
    # What Holm's next test must reach
    left = len(tests) - sum(test.significant for pair in comparisons for test in (pair.kl, pair.correctness) if test)
    critical = -float(special.ndtri(SIGNIFICANCE / 2 / max(left, 1)))
    return tuple(
        replace(pair, more_items=_more_items(pair.kl, drawn, x.design, critical))
        if pair.kl is not None and drawn is not None and x.design is not None and not x.design.is_whole
        else pair
        for pair, (_, _, x, _), (_, drawn) in zip(comparisons, both, by_kl, strict=True)
    )


def groups_not_told_apart(order: Sequence[str], apart: Collection[frozenset[str]]) -> tuple[tuple[str, ...], ...]:
    """Return the groups of a critical-difference view: neighbours in `order` of which no two are told apart.

    `order` has the variants, sorted by the value that is compared. Groups have two members or more, and are part of no
    larger one.
    """
    groups: list[tuple[str, ...]] = []
    last = 0
    for start in range(len(order)):
        end = start + 1
        while end < len(order) and not any(frozenset((order[i], order[end])) in apart for i in range(start, end)):
            end += 1
        if end > last and end - start > 1:
            groups.append(tuple(order[start:end]))
        last = max(last, end)
    return tuple(groups)
