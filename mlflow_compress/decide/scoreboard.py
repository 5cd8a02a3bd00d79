"""The scoreboard: the variants of one evaluation side by side, and which of them can be told apart."""

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np

from mlflow_compress.config.policy import MARGIN, Policy
from mlflow_compress.decide.direction import HarmVerdict, harm_of
from mlflow_compress.decide.gates import (
    CACHE,
    CACHE_RATIO,
    DECODE_SPEEDUP,
    DELTA,
    FLIPS,
    KL,
    MEMORY_RATIO,
    PREFILL_SPEEDUP,
    RATIO,
    SIZE,
)
from mlflow_compress.decide.separation import SIGNIFICANCE, ItemScores, Separation, groups_not_told_apart, separate
from mlflow_compress.errors import DataError
from mlflow_compress.metrics.chains import CHAIN_KL
from mlflow_compress.metrics.core.metric_registry import Direction, MetricKey, headline_keys, key
from mlflow_compress.metrics.kl_tail import ABOVE_CLIP, CLIPPED_KL, shows_clipped
from mlflow_compress.metrics.stats.arrays import Float
from mlflow_compress.metrics.stats.correlation import MOST_FOR_EXACT, spearman, spearman_exact_p
from mlflow_compress.metrics.stats.significance import holm
from mlflow_compress.metrics.stats.variance_components import MakeSpread, closer_probability, make_spread
from mlflow_compress.metrics.thinking import PASS_DELTA
from mlflow_compress.metrics.thought_length import COST_RATIO, LENGTH
from mlflow_compress.records import MetricResult

T = TypeVar("T")
Status = Literal["finished", "failed", "unsupported"]
NO_SPEED_STAGE = "the speed stage was not run"
"""Why a variant has no speed where none was asked for."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoredVariant:
    """One variant of an evaluation, as the scoreboard reads it."""

    name: str  # The variant's name, which no other variant of the scoreboard has, and the method that made it
    method: str
    run_id: str | None = None  # Its main run; None where none was started
    bits: float | None = None  # The bits that were asked for; None where the method has no such setting
    status: Status = "finished"  # Whether it has results
    reason: str = ""  # Why it has none, or not all
    # Headline results by metric: `metrics.headline(results)`
    results: Mapping[str, MetricResult] = field(default_factory=dict)
    sizes: Mapping[str, float] = field(default_factory=dict)  # "size/bytes", "size/ratio", and so on
    seconds: Mapping[str, float] = field(default_factory=dict)  # Processor seconds of each stage, by its name
    items: ItemScores | None = None  # What it scored on each item; None where it has no results
    # Its further makes, with other calibration samples, by run: what each scored on each item
    again: Mapping[str, ItemScores | None] = field(default_factory=dict)
    made_once: bool = False  # Whether it reads no calibration text, so that another make is the same
    left_out: str = ""  # Which of its results are not compared, and why
    lacking: tuple[str, ...] = ()  # Too many items without a score, or cut: there is no verdict on it then
    runtime: str = ""  # What it was timed in, with the version, or why it has no speed; the other of the two is empty
    not_timed: str = ""
    seed: str = ""  # The seed of its evaluation where one was given
    drawn: str = ""  # Parameter `items` of its evaluation; with "+" where it was scored on more to tell it apart


BITS = "size/bits_per_weight"
SECONDS = "seconds/total"
MT_BENCH, SIMILARITY = "judge/mt_bench", "judge/similarity"
KL_DISTANCES = (KL, CHAIN_KL.name)
"""The distances by which variants are closer to the baseline, the first that any of them has."""

MAIN_METRICS = (
    DELTA,
    FLIPS,
    "distance/all_flips_pct",
    KL,
    CHAIN_KL.name,
    PASS_DELTA.name,
    COST_RATIO.name,
    LENGTH.name,
    "distance/top1_agreement",
    "robustness/shuffle_drop_pct",
    "uncertainty/uacc",
    SIMILARITY,
    MT_BENCH,
)
"""The metrics of the narrow tables, in their order."""

SERVING = (DECODE_SPEEDUP, PREFILL_SPEEDUP, MEMORY_RATIO)
"""What serving a variant costs beside its baseline: in narrow tables where a variant was timed."""


@dataclass(frozen=True)
class ScoreColumn:
    """One column of numbers."""

    key: str  # Name of the value: that of the metric, or "size/..." or "seconds/..."
    label: str  # What a reader sees. `unit` is as in `MetricKey`, or "bytes", "times", "bits", "seconds".
    unit: str
    direction: Direction  # Which way is better
    meaning: str
    main: bool  # Whether narrow tables have it
    is_difference: bool = False  # Of the variant's value and the baseline's: it is shown with its sign


@dataclass(frozen=True, kw_only=True)
class ScoreboardValue:
    """One value with its interval; `low`, `high` and `n` are None where there is none."""

    value: float
    low: float | None = None
    high: float | None = None
    n: int | None = None


_SIZES = (
    ScoreColumn(SIZE, "Size", "bytes", "lower", "Bytes of the stored tensors.", main=True),
    ScoreColumn(
        RATIO, "Times smaller", "times", "higher", "Bytes of the baseline divided by those of the variant.", main=False
    ),
    ScoreColumn(
        BITS,
        "Bits per weight, linear layers",
        "bits",
        "lower",
        "Stored bits per weight of the linear layers.",
        main=True,
    ),
    ScoreColumn(
        CACHE,
        "Cache per token",
        "bytes",
        "lower",
        "Bytes of the keys and values of one token in all layers, scales included.",
        main=True,
    ),
)
_COST = (
    ScoreColumn(SECONDS, "Processor seconds", "seconds", "lower", "Processor time of all stages together.", main=True),
    *(
        ScoreColumn(
            f"seconds/{s}",
            f"Processor seconds, {s}",
            "seconds",
            "lower",
            f"Processor time of the {s} stage.",
            main=False,
        )
        for s in ("quantize", "evaluate", "judge")
    ),
)


def columns() -> tuple[ScoreColumn, ...]:
    """Return all columns: sizes, the main metrics, serving, the other metrics of the headline table, and the cost."""
    main = (*MAIN_METRICS, *SERVING)
    metrics = [*map(key, main), *(row for row in headline_keys() if row.name not in main), CLIPPED_KL, ABOVE_CLIP]
    return (*_SIZES, *(_metric_column(declared, main=declared.name in main) for declared in metrics), *_COST)


def _metric_column(declared: MetricKey, *, main: bool) -> ScoreColumn:
    texts = declared.name, declared.label, declared.unit, declared.direction, declared.meaning
    return ScoreColumn(*texts, main, declared.is_difference)


def _cells(variant: ScoredVariant, columns: Collection[str]) -> dict[str, ScoreboardValue]:
    """Return the values of a variant by column. What was not measured, or is not shown, is left out."""
    values = {name: ScoreboardValue(value=size) for name, size in variant.sizes.items()}
    values |= {
        name: ScoreboardValue(value=r.value, low=r.low, high=r.high, n=r.n) for name, r in variant.results.items()
    }
    values |= {f"seconds/{stage}": ScoreboardValue(value=seconds) for stage, seconds in variant.seconds.items()}
    if variant.seconds:
        values[SECONDS] = ScoreboardValue(value=sum(variant.seconds.values()))
    shown = set(columns) if shows_clipped(variant.results) else set(columns) - {CLIPPED_KL.name, ABOVE_CLIP.name}
    return {name: cell for name, cell in values.items() if name in shown}


@dataclass(frozen=True, kw_only=True)
class _Luck:
    """What other calibration samples change in a variant: its spread between makes."""

    runs: tuple[str, ...]  # The main runs of its further makes
    kl: MakeSpread | None  # In nats; None where fewer than 20 groups of items have a value of every make
    flips: MakeSpread | None  # In percent


@dataclass(frozen=True, kw_only=True)
class Closer:
    """How probable it is that a fresh make of one variant is closer to the baseline than one of another."""

    first: str  # Their names
    second: str
    kl: float | None  # Probability that the first has the smaller mean KL; None where nothing is known
    flips: float | None  # Probability that the first has fewer flips


def _luck(variants: Sequence[ScoredVariant]) -> tuple[dict[str, _Luck], tuple[Closer, ...]]:
    """Return the spread of every variant with several makes, and every pair of which a fresh make can be predicted.

    Nothing is said of makes that were scored on drawn items.
    """
    first = next((v.items for v in variants if v.items is not None and v.items.design is None), None)
    makes: dict[str, tuple[Float, Float]] = {}  # KL and flips in percent, both of shape (makes, items)
    for v in variants:
        every = [v.items, *v.again.values()]
        if any(one is not None and one.design is not None for one in every):
            continue
        aligned = [one.in_order_of(first) for one in every if one is not None and first is not None]
        if (v.again or v.made_once) and len(aligned) == len(every):
            makes[v.name] = np.array([one.kl for one in aligned]), 100 * np.array([one.flipped for one in aligned])

    def of(estimate: Callable[..., T], *some: Float) -> T:
        assert first is not None
        there = np.isfinite(np.concatenate(some)).all(axis=0)
        return estimate(*(values[:, there] for values in some), first.group[there])

    several = {v.name: tuple(v.again) for v in variants if v.again}
    spreads = {name: [of(make_spread, values) for values in makes[name]] for name in several if name in makes}
    return (
        {
            name: _Luck(runs=runs, kl=kl, flips=flips)
            for name, runs in several.items()
            for kl, flips in [spreads.get(name, (None, None))]
        },
        tuple(
            Closer(
                first=a,
                second=b,
                kl=of(closer_probability, makes[a][0], makes[b][0]),
                flips=of(closer_probability, makes[a][1], makes[b][1]),
            )
            for a, b in itertools.combinations(makes, 2)
            if a in several or b in several
        ),
    )


_FEWEST = 4


@dataclass(frozen=True, kw_only=True)
class VariantCorrelation:
    """Spearman's rank correlation of two metrics over the variants that have both."""

    first: str  # The metrics
    second: str
    value: float | None = None  # In [-1, 1]; None where there is none, for the `reason`
    # The 95 % interval of Bonett and Wright; None for fewer than five variants, and for a correlation of 1 or -1
    low: float | None = None
    high: float | None = None
    # Two-sided p-value of no correlation: over all orders for up to eight variants, Student's approximation for more.
    # It is not corrected for the number of correlations.
    p: float | None = None
    n: int  # Variants that have both
    reason: str = ""  # Why there is no correlation


def _correlate_metrics(rows: Sequence[Mapping[str, ScoreboardValue]]) -> tuple[VariantCorrelation, ...]:
    """Return the correlation of every pair of main metrics that at least one variant has."""
    metrics = [name for name in MAIN_METRICS if any(name in row for row in rows)]
    return tuple(_correlation(rows, a, b) for a, b in itertools.combinations(metrics, 2))


def _correlation(rows: Sequence[Mapping[str, ScoreboardValue]], first: str, second: str) -> VariantCorrelation:
    pairs = [(row[first].value, row[second].value) for row in rows if first in row and second in row]
    n = len(pairs)
    if n < _FEWEST:
        reason = f"{n} {'variant has' if n == 1 else 'variants have'} both, at least {_FEWEST} are needed"
        return VariantCorrelation(first=first, second=second, n=n, reason=reason)
    x, y = zip(*pairs, strict=True)
    rho = spearman(x, y)
    if rho is None:
        return VariantCorrelation(first=first, second=second, n=n, reason="one of them is the same for all variants")
    perfect = abs(rho.value) == 1.0  # the formula's interval is then a point, however few the variants
    low, high = (None, None) if rho.interval is None or perfect else rho.interval
    p = spearman_exact_p(x, y) if n <= MOST_FOR_EXACT else rho.p_value
    return VariantCorrelation(first=first, second=second, value=rho.value, low=low, high=high, p=p, n=n)


def pareto_front(points: Mapping[str, tuple[float, ...]]) -> tuple[str, ...]:
    """Return the names on the front, sorted by the first value. Of all values of a name, lower is better.

    Points that are equal are on the front together.
    """
    front = [
        name
        for name, point in points.items()
        if not any(o != point and all(a <= b for a, b in zip(o, point, strict=True)) for o in points.values())
    ]
    return tuple(sorted(front, key=lambda name: (points[name], name)))


Kind = Literal[
    "no_verdict",
    "given_seed",
    "failed",
    "unsupported",
    "unlike_answers",
    "fewer_bits_beat_more",
    "not_told_apart",
]


@dataclass(frozen=True)
class _ScoreWarning:
    """One warning: its kind, a sentence, and the variants that it is about."""

    kind: Kind
    text: str
    variants: tuple[str, ...]


def _warnings(
    variants: Sequence[ScoredVariant], separations: Sequence[Separation], same_kl: Sequence[tuple[str, ...]]
) -> Iterator[_ScoreWarning]:
    """Yield every warning; `same_kl` has the groups that cannot be told apart by their KL."""
    for v in variants:
        if v.lacking:
            yield _ScoreWarning("no_verdict", f"no verdict on {v.name}: {'; '.join(v.lacking)}", (v.name,))
    if given := sorted({v.seed for v in variants if v.seed}):
        text = f"seed {_and(given)} was given: of many seeds, one may show the wanted result"
        yield _ScoreWarning("given_seed", text, tuple(v.name for v in variants if v.seed))
    for v in variants:
        reason = v.reason.removesuffix(".")
        if v.status == "failed":
            yield _ScoreWarning("failed", f"{v.name} failed: {reason}", (v.name,))
        elif v.status == "unsupported":
            yield _ScoreWarning("unsupported", f"{v.name} was not started: {reason}", (v.name,))
    for v in variants:
        if v.status == "finished" and v.reason:
            yield _ScoreWarning("failed", f"{v.name} is not complete: {v.reason.removesuffix('.')}", (v.name,))
    for v in variants:
        if v.left_out:
            yield _ScoreWarning("unlike_answers", f"{v.name}: {v.left_out}", (v.name,))
    yield from _fewer_bits(variants, separations)
    for group in same_kl:
        yield _ScoreWarning("not_told_apart", f"{_and(group)} cannot be told apart by their KL", group)


def _fewer_bits(variants: Sequence[ScoredVariant], separations: Sequence[Separation]) -> Iterator[_ScoreWarning]:
    apart = {frozenset((s.first, s.second)): s.kl is not None and s.kl.significant for s in separations}
    measured = [v for v in variants if v.bits is not None and KL in v.results]
    for pair in itertools.combinations(measured, 2):
        fewer, more = sorted(pair, key=lambda v: v.bits or 0.0)
        if fewer.method != more.method or fewer.bits == more.bits:
            continue
        low, high = fewer.results[KL].value, more.results[KL].value
        if low < high:
            sure = "" if apart.get(frozenset((fewer.name, more.name))) else ", which is within the noise"
            text = f"{fewer.name} has fewer bits than {more.name} and a smaller KL ({low:.3g} < {high:.3g}){sure}"
            yield _ScoreWarning("fewer_bits_beat_more", text, (fewer.name, more.name))


def _and(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


_P = "quality/mcnemar_p"
_SERVING_COSTS = {DECODE_SPEEDUP: -1.0, MEMORY_RATIO: 1.0, COST_RATIO.name: 1.0}  # 1 where lower is better


@dataclass(frozen=True, kw_only=True)
class ScoreRow:
    """One variant."""

    name: str  # As in `ScoredVariant`
    method: str
    run_id: str | None
    bits: float | None
    status: Status
    reason: str
    cells: Mapping[str, ScoreboardValue]  # Values by column. What was not measured is not there.
    # McNemar's mid-p value of the accuracy difference to the baseline, and after Holm's correction over variants
    accuracy_p: float | None
    accuracy_p_holm: float | None
    on_front: bool  # Whether no other variant is as small, in weights and cache, and as close to the baseline
    harm: HarmVerdict | None = None  # Worse, no worse, or open; None where its accuracy has no interval, or items lack
    runtime: str = ""
    not_timed: str = ""
    made_once: bool = False
    luck: _Luck | None = None  # None where it was made once
    drawn: str = ""

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
    # What the baseline itself has, by column; its size to the digits of the stored ratio. It has no distances.
    baseline_cells: Mapping[str, ScoreboardValue]
    pareto: tuple[str, ...]  # The variants on the front of size against KL, the smallest first
    # By what serving costs (decode speedup, peak memory, tokens to a right answer): the variants on the front of it
    # against KL, the best first. Only where a variant has both.
    serving_fronts: Mapping[str, tuple[str, ...]]
    correlations: tuple[VariantCorrelation, ...]  # Of every pair of main metrics
    separations: tuple[Separation, ...]  # Every pair of finished variants
    # By metric (mean KL, accuracy difference): neighbours of which no two are told apart
    groups: Mapping[str, tuple[tuple[str, ...], ...]]
    warnings: tuple[_ScoreWarning, ...]  # What a reader must know before a decision
    # Pairs of which at least one was made several times, and the other too, or it is made once and for all
    closer: tuple[Closer, ...] = ()
    drawn_from: int | None = None  # Items of which those of some variant were drawn; None where all were scored
    distance: str = KL  # The KL by which variants are closer: of the items, or where there is none, of own thoughts

    @property
    def finished(self) -> tuple[ScoreRow, ...]:
        return tuple(row for row in self.rows if row.status == "finished")

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, ready for JSON. A missing value is null or not there."""
        return {
            **asdict(self),
            "rows": [{**asdict(row), "accuracy_moved": row.accuracy_moved} for row in self.rows],
            "separations": [{**asdict(pair), "told_apart": pair.told_apart} for pair in self.separations],
        }


def scoreboard(
    variants: Sequence[ScoredVariant],
    *,
    baseline: str,
    evaluation: str | None,
    level: float = 0.95,
    margin: float = MARGIN,
) -> Scoreboard:
    """Return the scoreboard of the variants of one evaluation. It does not depend on their order.

    The `margin` is the loss of accuracy in points up to which a variant is called no worse.

    Raises `DataError`: two variants have one name; `AlignmentError`: two variants were not evaluated on the same items.
    """
    names = [variant.name for variant in variants]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError("Two variants have one name", got=twice[0])
    every = columns()
    shown = [column.key for column in every]
    values = {variant.name: _cells(variant, shown) for variant in variants}
    distance = next((name for name in KL_DISTANCES if any(name in row for row in values.values())), KL)
    ordered = sorted(variants, key=lambda v: _place(v, values[v.name], distance))
    judged = {v.name: values[v.name] for v in variants if not v.lacking}
    baseline_cells = _baseline_cells(ordered, shown)
    front = _front(judged, SIZE, distance, baseline_cells.get(CACHE))
    raw = {v.name: v.results[_P].value for v in ordered if _P in v.results}
    corrected = dict(zip(raw, holm(list(raw.values())).tolist(), strict=True)) if raw else {}
    lucks, closer = _luck(ordered)
    rows = tuple(
        ScoreRow(
            name=v.name,
            method=v.method,
            run_id=v.run_id,
            bits=v.bits,
            status=v.status,
            reason=v.reason,
            cells=values[v.name],
            accuracy_p=raw.get(v.name),
            accuracy_p_holm=corrected.get(v.name),
            on_front=v.name in front,
            harm=None if v.lacking else harm_of(v.results, margin),
            runtime=v.runtime,
            not_timed=v.not_timed,
            made_once=v.made_once,
            luck=lucks.get(v.name),
            drawn=v.drawn,
        )
        for v in ordered
    )
    separations = separate([(v.name, v.items) for v in ordered if v.items is not None], level=level)
    groups = _groups(ordered, values, separations)

    return Scoreboard(
        baseline=baseline,
        evaluation=evaluation,
        level=level,
        n_items=max((len(v.items.task) for v in variants if v.items is not None), default=None),
        columns=tuple(column for column in every if any(column.key in row for row in values.values())),
        rows=rows,
        baseline_cells=baseline_cells,
        pareto=front,
        serving_fronts={cost: best for cost in _SERVING_COSTS if (best := _front(judged, cost, distance))},
        correlations=_correlate_metrics([values[v.name] for v in ordered]),
        separations=separations,
        groups=groups,
        warnings=tuple(_warnings(ordered, separations, groups[KL])),
        closer=closer,
        drawn_from=max(
            (v.items.design.n_items for v in variants if v.items is not None and v.items.design is not None),
            default=None,
        ),
        distance=distance,
    )


MATTERS = 0.02
"""Share of the largest KL that a policy allows by which two variants must be able to differ to be scored on more."""


def more_items(board: Scoreboard, policy: Policy) -> dict[str, tuple[int, str]]:
    """Return the variants that need more items than they have, how many in all, and from whom to tell them apart.

    Only of pairs that are neighbours by KL, or in one group that cannot be told apart by KL: the others are far from
    each other. And not of pairs that surely differ by less than `MATTERS` of what the policy allows, nor of pairs that
    both surely have more KL than it allows: neither can be chosen.
    """
    limit = math.inf if policy.kl is None else policy.kl.max_kl
    least = 0.0 if policy.kl is None else MATTERS * limit
    lows = {
        row.name: [row.cells[x].low or 0.0 for x in (KL, CLIPPED_KL.name) if x in row.cells] for row in board.finished
    }
    refused = {name for name, ends in lows.items() if max(ends, default=0.0) > limit}
    order = [row.name for row in board.finished if KL in row.cells]
    near = {frozenset(pair) for pair in itertools.pairwise(order)}
    near |= {frozenset(pair) for group in board.groups[KL] for pair in itertools.combinations(group, 2)}
    have = {row.name: row.cells[FLIPS].n or 0 for row in board.finished if FLIPS in row.cells}
    needs: dict[str, tuple[int, str]] = {}
    for pair in board.separations:
        if pair.kl is None or pair.more_items is None:
            continue
        if max(-(pair.kl.low or 0.0), pair.kl.high or 0.0) < least:
            continue
        if {pair.first, pair.second} <= refused:
            continue
        if frozenset((pair.first, pair.second)) in near:
            for name, other in ((pair.first, pair.second), (pair.second, pair.first)):
                if have.get(name, pair.more_items) < pair.more_items:
                    needs[name] = max(needs.get(name, (0, "")), (pair.more_items, other))
    return needs


def _baseline_cells(variants: Sequence[ScoredVariant], columns: Collection[str]) -> dict[str, ScoreboardValue]:
    """Return the baseline's values from the results of the variants, which each hold them."""
    cells: dict[str, ScoreboardValue] = {}
    for variant in variants:
        for name in columns:
            result = variant.results.get(f"{name}_baseline")
            if result is not None:
                cells.setdefault(
                    name, ScoreboardValue(value=result.value, low=result.low, high=result.high, n=result.n)
                )
        for name, ratio in ((SIZE, RATIO), (CACHE, CACHE_RATIO)):
            if name in variant.sizes and ratio in variant.sizes:
                size = variant.sizes[name] * variant.sizes[ratio]
                cells.setdefault(name, ScoreboardValue(value=float(f"{size:.4g}")))
    return cells


def _front(
    values: Mapping[str, Mapping[str, ScoreboardValue]],
    cost: str,
    distance: str,
    plain_cache: ScoreboardValue | None = None,
) -> tuple[str, ...]:
    """Return the variants that no other one beats in both a cost and the distance.

    - `plain_cache`: With the size as cost, the bytes of the baseline's cache where some variant has another one: then
      none beats a variant with a smaller cache.
    """
    sign, points = _SERVING_COSTS.get(cost, 1.0), {}
    for name, row in values.items():
        if cost in row and distance in row:
            cache = () if plain_cache is None else (row.get(CACHE, plain_cache).value,)
            points[name] = (sign * row[cost].value, row[distance].value, *cache)
    return pareto_front(points)


def _place(variant: ScoredVariant, row: Mapping[str, ScoreboardValue], distance: str) -> tuple[int, float, float, str]:
    """Return the sort key: status, then distance, then size, then name."""
    status = ("finished", "failed", "unsupported").index(variant.status)
    kl, size = (row[name].value if name in row else math.inf for name in (distance, SIZE))
    return status, kl, size, variant.name


def _groups(
    variants: Sequence[ScoredVariant],
    values: Mapping[str, Mapping[str, ScoreboardValue]],
    separations: Sequence[Separation],
) -> dict[str, tuple[tuple[str, ...], ...]]:
    """Return the groups that cannot be told apart by KL, and by correctness."""
    groups = {}
    for metric in (KL, DELTA):
        tests = [(s.first, s.second, s.kl if metric == KL else s.correctness) for s in separations]
        # A pair without a test is in no group: nothing is known about it.
        apart = {frozenset((a, b)) for a, b, test in tests if test is None or test.significant}
        order = [v.name for v in variants if v.items is not None and metric in values[v.name]]
        order.sort(key=lambda name: (values[name][metric].value, name))
        groups[metric] = groups_not_told_apart(order, apart)
    return groups
