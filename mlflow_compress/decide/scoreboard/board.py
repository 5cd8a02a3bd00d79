"""Builds the scoreboard of one evaluation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from mlflow_compress.decide.gates import DECODE_SPEEDUP, DELTA, KL, MEMORY_RATIO, SIZE
from mlflow_compress.decide.scoreboard.scored_variant import (
    Cell,
    ScoreColumn,
    ScoredVariant,
    Status,
    cells,
    columns,
)
from mlflow_compress.decide.scoreboard.separation import (
    SIGNIFICANCE,
    Separation,
    VariantCorrelation,
    correlate_metrics,
    groups_not_told_apart,
    separate,
)
from mlflow_compress.errors import DataError
from mlflow_compress.metrics.kl_tail import TOP_ITEM, TRUSTED_ITEMS, TRUSTED_TOP_PCT
from mlflow_compress.metrics.stats.significance import holm


def pareto_front(points: Mapping[str, tuple[float, float]]) -> tuple[str, ...]:
    """Return the names on the front, sorted by the first value.

    - `points`: Two values per name; of both, lower is better. Points that are equal are on the front together.

    Examples
    --------
    >>> pareto_front({"small": (1, 9), "close": (8, 2), "worse": (8, 3)})
    ('small', 'close')
    """
    front = [
        name
        for name, (x, y) in points.items()
        if not any(a <= x and b <= y and (a, b) != (x, y) for a, b in points.values())
    ]
    return tuple(sorted(front, key=lambda name: (points[name], name)))


Kind = Literal[
    "failed", "unsupported", "unlike_answers", "few_items", "one_item", "fewer_bits_beat_more", "not_told_apart"
]


@dataclass(frozen=True, kw_only=True)
class ScoreWarning:
    """One warning: its kind, a sentence, and the variants that it is about."""

    kind: Kind
    text: str
    variants: tuple[str, ...]


def score_warnings(
    variants: Sequence[ScoredVariant],
    separations: Sequence[Separation],
    groups: Mapping[str, Sequence[Sequence[str]]],
) -> tuple[ScoreWarning, ...]:
    """Return every warning.

    Variants without results, answers that are not compared, few items, fewer bits that beat more, groups of equals.
    """
    return (
        *_without_results(variants),
        *(
            ScoreWarning(kind="unlike_answers", text=f"{v.name}: {v.left_out}", variants=(v.name,))
            for v in variants
            if v.left_out
        ),
        *_few_items(variants),
        *_one_item(variants),
        *_fewer_bits(variants, separations),
        *_not_told_apart(groups),
    )


def _without_results(variants: Sequence[ScoredVariant]) -> list[ScoreWarning]:
    verbs = {"failed": "failed", "unsupported": "was not started"}
    return [
        ScoreWarning(
            kind="failed" if v.status == "failed" else "unsupported",
            text=f"{v.name} {verbs[v.status]}: {v.reason.removesuffix('.')}",
            variants=(v.name,),
        )
        for v in variants
        if v.status != "finished"
    ] + [
        ScoreWarning(kind="failed", text=f"{v.name} is not complete: {v.reason.removesuffix('.')}", variants=(v.name,))
        for v in variants
        if v.status == "finished" and v.reason
    ]


def _few_items(variants: Sequence[ScoredVariant]) -> list[ScoreWarning]:
    few = {v.name: len(v.items.task) for v in variants if v.items is not None and len(v.items.task) < TRUSTED_ITEMS}
    if not few:
        return []
    n = min(few.values())
    text = f"{n:,} {'item is' if n == 1 else 'items are'} too few for a decision: with fewer than {TRUSTED_ITEMS}, "
    text += "intervals of the KL can be too narrow"
    return [ScoreWarning(kind="few_items", text=text, variants=tuple(few))]


def _one_item(variants: Sequence[ScoredVariant]) -> list[ScoreWarning]:
    """Return a warning where one item holds so much of a mean KL that its interval cannot be trusted."""
    held = {v.name: v.results[TOP_ITEM.name].value for v in variants if TOP_ITEM.name in v.results}
    found = {name: share for name, share in held.items() if share >= TRUSTED_TOP_PCT}
    if not found:
        return []
    text = f"one item holds up to {max(found.values()):.0f} % of the mean KL of {_and(tuple(found))}: "
    text += "its interval can be too narrow"
    return [ScoreWarning(kind="one_item", text=text, variants=tuple(found))]


def _fewer_bits(variants: Sequence[ScoredVariant], separations: Sequence[Separation]) -> list[ScoreWarning]:
    apart = {frozenset((s.first, s.second)): s.kl is not None and s.kl.significant for s in separations}
    measured = [v for v in variants if v.bits is not None and KL in v.results]
    found = []
    for one, other in itertools.combinations(measured, 2):
        fewer, more = sorted((one, other), key=lambda v: v.bits or 0.0)
        if fewer.method != more.method or fewer.bits == more.bits:
            continue
        low, high = fewer.results[KL].value, more.results[KL].value
        if low < high:
            sure = "" if apart.get(frozenset((fewer.name, more.name))) else ", which is within the noise"
            text = f"{fewer.name} has fewer bits than {more.name} and a smaller KL ({low:.3g} < {high:.3g}){sure}"
            found.append(ScoreWarning(kind="fewer_bits_beat_more", text=text, variants=(fewer.name, more.name)))
    return found


def _not_told_apart(groups: Mapping[str, Sequence[Sequence[str]]]) -> list[ScoreWarning]:
    return [
        ScoreWarning(
            kind="not_told_apart", text=f"{_and(group)} cannot be told apart by their KL", variants=tuple(group)
        )
        for group in groups.get(KL, ())
    ]


def _and(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


_P = "quality/mcnemar_p"
_SERVING_COSTS = {DECODE_SPEEDUP: -1.0, MEMORY_RATIO: 1.0}  # 1 where lower is better


@dataclass(frozen=True, kw_only=True)
class ScoreRow:
    """One variant."""

    name: str  # As in `ScoredVariant`
    method: str
    run_id: str | None
    bits: float | None
    status: Status
    reason: str
    cells: Mapping[str, Cell]  # Values by column. What was not measured is not there.
    # McNemar's exact p-value of the accuracy difference to the baseline, and after Holm's correction over variants
    accuracy_p: float | None
    accuracy_p_holm: float | None
    on_front: bool  # Whether no other variant is both as small and as close to the baseline
    runtime: str = ""
    not_timed: str = ""

    @property
    def accuracy_moved(self) -> bool | None:
        """Whether the accuracy differs from the baseline's, corrected over variants; None where it was not measured."""
        return None if self.accuracy_p_holm is None else self.accuracy_p_holm < SIGNIFICANCE


@dataclass(frozen=True, kw_only=True)
class Scoreboard:
    """The variants of one evaluation side by side."""

    baseline: str  # The baseline's short name
    evaluation: str | None  # The evaluation id, which all variants share; None where no variant finished
    level: float  # Confidence level of the intervals
    n_items: int | None  # Number of items of the headline values; None where no variant finished
    columns: tuple[ScoreColumn, ...]  # Those that at least one variant has a value for, in their order
    rows: tuple[ScoreRow, ...]  # Finished variants first, the closest to the baseline on top
    pareto: tuple[str, ...]  # The variants on the front of size against KL, the smallest first
    # By what serving costs (decode speedup, peak memory): the variants on the front of it against KL, the best first.
    # Only where a variant has both.
    serving_fronts: Mapping[str, tuple[str, ...]]
    correlations: tuple[VariantCorrelation, ...]  # Of every pair of main metrics
    separations: tuple[Separation, ...]  # Every pair of finished variants
    # By metric (mean KL, accuracy difference): neighbours of which no two are told apart
    groups: Mapping[str, tuple[tuple[str, ...], ...]]
    warnings: tuple[ScoreWarning, ...]  # What a reader must know before a decision

    @property
    def finished(self) -> tuple[ScoreRow, ...]:
        """The rows of variants that have results."""
        return tuple(row for row in self.rows if row.status == "finished")

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, ready for JSON. A missing value is null or not there."""
        return {
            **asdict(self),
            "rows": [{**asdict(row), "accuracy_moved": row.accuracy_moved} for row in self.rows],
            "separations": [{**asdict(pair), "told_apart": pair.told_apart} for pair in self.separations],
        }


def scoreboard(
    variants: Sequence[ScoredVariant], *, baseline: str, evaluation: str | None, level: float = 0.95
) -> Scoreboard:
    """Return the scoreboard of the variants of one evaluation. It does not depend on their order.

    - `level`: Confidence level of the intervals between variants.

    Raises `DataError`: two variants have one name; `AlignmentError`: two variants were not evaluated on the same items.
    """
    names = [variant.name for variant in variants]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError("Two variants have one name", got=twice[0])
    found = {variant.name: cells(variant) for variant in variants}
    ordered = sorted(variants, key=lambda v: _place(v, found[v.name]))
    front = _front(found, SIZE)
    raw = {v.name: v.results[_P].value for v in ordered if _P in v.results}
    corrected = dict(zip(raw, holm(list(raw.values())).tolist(), strict=True)) if raw else {}
    rows = tuple(
        ScoreRow(
            name=v.name,
            method=v.method,
            run_id=v.run_id,
            bits=v.bits,
            status=v.status,
            reason=v.reason,
            cells=found[v.name],
            accuracy_p=raw.get(v.name),
            accuracy_p_holm=corrected.get(v.name),
            on_front=v.name in front,
            runtime=v.runtime,
            not_timed=v.not_timed,
        )
        for v in ordered
    )
    separations = separate(ordered, level=level)
    groups = _groups(ordered, found, separations)
    return Scoreboard(
        baseline=baseline,
        evaluation=evaluation,
        level=level,
        n_items=max((len(v.items.task) for v in variants if v.items is not None), default=None),
        columns=tuple(column for column in columns() if any(column.key in row for row in found.values())),
        rows=rows,
        pareto=front,
        serving_fronts={cost: best for cost in _SERVING_COSTS if (best := _front(found, cost))},
        correlations=correlate_metrics([found[v.name] for v in ordered]),
        separations=separations,
        groups=groups,
        warnings=score_warnings(ordered, separations, groups),
    )


def _front(found: Mapping[str, Mapping[str, Cell]], cost: str) -> tuple[str, ...]:
    """Return the variants that no other one beats in both a cost and KL."""
    sign = _SERVING_COSTS.get(cost, 1.0)
    return pareto_front(
        {name: (sign * row[cost].value, row[KL].value) for name, row in found.items() if cost in row and KL in row}
    )


def _place(variant: ScoredVariant, row: Mapping[str, Cell]) -> tuple[int, float, float, str]:
    """Return the sort key: status, then KL, then size, then name."""
    status = ("finished", "failed", "unsupported").index(variant.status)
    kl, size = (row[name].value if name in row else math.inf for name in (KL, SIZE))
    return status, kl, size, variant.name


def _groups(
    variants: Sequence[ScoredVariant], found: Mapping[str, Mapping[str, Cell]], separations: Sequence[Separation]
) -> dict[str, tuple[tuple[str, ...], ...]]:
    """Return the groups that cannot be told apart by KL, and by correctness."""
    compared = {
        KL: {frozenset((s.first, s.second)): s.kl for s in separations},
        DELTA: {frozenset((s.first, s.second)): s.correctness for s in separations},
    }
    groups = {}
    for metric, tests in compared.items():
        order = [v.name for v in variants if v.items is not None and metric in found[v.name]]
        order.sort(key=lambda name: (found[name][metric].value, name))
        # A pair without a test is in no group: nothing is known about it.
        groups[metric] = groups_not_told_apart(
            order, {pair for pair, test in tests.items() if test is None or test.significant}
        )
    return groups
