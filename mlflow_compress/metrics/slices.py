"""Slices: tasks, categories, scripts and languages, each tested against the items outside it."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mlflow_compress.metrics.core.estimates import Estimate, Mean, PairedDifference, Proportion, of_subset
from mlflow_compress.metrics.core.item_table import ItemSubset
from mlflow_compress.metrics.core.language import language, script
from mlflow_compress.metrics.core.metric_inputs import MetricInputs, MetricSettings
from mlflow_compress.metrics.core.metric_registry import MetricKey, metric
from mlflow_compress.metrics.core.requirements import ITEM_DISTANCES, ITEMS, PREDICTIONS, VARIANT
from mlflow_compress.metrics.kl_tail import CLIP
from mlflow_compress.metrics.stats.arrays import Float, Int
from mlflow_compress.metrics.stats.intervals import FEWEST_GROUPS, effective_groups
from mlflow_compress.metrics.stats.significance import holm, larger_part_p
from mlflow_compress.records import MetricResult


def slice_key(name: str, what: str, **more: Any) -> MetricKey:
    """Return the key of a distance by slice; `what` is the beginning of its meaning."""
    worst = (
        "in the slice with most: a task, a category, or items of one script or language; each slice has its value too."
    )
    return MetricKey(
        name=name, direction="lower", meaning=f"{what} {worst}", on_request=True, worst_of_slices=True, **more
    )


@dataclass(frozen=True, eq=False)
class _Slicing:
    """Items sorted into slices by one property. Items that are in no slice are among the others."""

    names: Sequence[tuple[str | None, str | None]]  # Task and category of each slice
    code: Int  # Number of each item's slice, `len(names)` and more for none; shape (n,)


def slicings(task: Sequence[str], category: Sequence[str | None], texts: Sequence[str]) -> list[_Slicing]:
    """Return how items are sliced: by task, by the categories of each task, and by script and language of their text.

    A property that all items share makes no slices, nor do languages that part the items as their scripts do. The
    script is that of most letters, see `script`; a text whose language is not sure is in the slice of none.
    """
    categories: dict[str, set[str]] = defaultdict(set)
    for one, part in zip(task, category, strict=True):
        categories[one].add(part or "")
    split = [(one, part or "") if len(categories[one]) > 1 else None for one, part in zip(task, category, strict=True)]
    scripts, languages = [script(text) for text in texts], [language(text) for text in texts]
    if len(set(zip(scripts, languages, strict=True))) == len(set(scripts)):
        languages = [None] * len(texts)
    columns: list[list[tuple[str | None, str | None] | None]] = [
        [(one, None) for one in task],
        [place if place is not None and place[1] else None for place in split],
        [None if one is None else (None, f"{one if one == 'CJK' else one.capitalize()} script") for one in scripts],
        [None if one is None else (None, f"language {one}") for one in languages],
    ]
    result = []
    for column in columns:
        names = sorted({place for place in column if place is not None}, key=str)
        if len(names) > 1:
            number = {place: i for i, place in enumerate(names)}
            code = np.array([len(names) if place is None else number[place] for place in column], dtype=np.int64)
            result.append(_Slicing(names, code))
    return result


@dataclass(frozen=True, eq=False)
class SlicedDistance:
    """One distance of some items, a value per item, with its estimate for any of them."""

    key: MetricKey
    values: Float  # Larger is worse, NaN for an item without a value; shape (n,)
    groups: Int  # shape (n,)
    estimate: Callable[[Int], Estimate]  # From the numbers of some of the items


def by_slice(
    inputs: MetricInputs, slices: Sequence[_Slicing], distances: Sequence[SlicedDistance]
) -> list[MetricResult]:
    """Return the worst slice's value of every distance, each followed by those of the slices.

    Slices of fewer than `FEWEST_GROUPS` groups, or with fewer beside them, are left out. `p` of a slice is the
    permutation test's "its distance is larger than that of the other items", after Holm's correction over all slices
    and distances together. The first result of a distance has the largest value of any slice, and an interval of the
    largest true one: no slice is above the largest upper end with 97.5 %, as each one's own end errs no more often; and
    one is above the largest lower end, where each is of an interval that holds for all slices at once (Bonferroni).
    """
    of_distance: dict[str, list[tuple[MetricResult, Estimate]]] = {}
    raw: list[float] = []
    for distance in distances:
        rows = np.flatnonzero(np.isfinite(distance.values))
        for slicing in slices:
            code, groups = slicing.code[rows], distance.groups[rows]
            large = [i for i in range(len(slicing.names)) if _enough(groups[code == i]) and _enough(groups[code != i])]
            if not large:
                continue
            present, parts = np.unique(code, return_inverse=True)
            tested = larger_part_p(distance.values[rows], parts, groups, seed=inputs.settings.seed)
            p = dict(zip(present.tolist(), tested, strict=True))
            for i in large:
                subset = ItemSubset(*slicing.names[i], rows[code == i])
                estimate = distance.estimate(subset.rows)
                [found] = of_subset(inputs, subset, {distance.key: estimate})
                of_distance.setdefault(distance.key.name, []).append((found, estimate))
                raw.append(float(p[i]))
    adjusted = iter(holm(raw).tolist() if raw else [])
    results = []
    for distance in distances:
        measured = [
            (replace(one, p=next(adjusted)), estimate) for one, estimate in of_distance.get(distance.key.name, [])
        ]
        if measured:
            results += [_worst(distance.key, measured, inputs.settings), *(one for one, _ in measured)]
    return results


def _enough(groups: Int) -> bool:
    return len(groups) > 0 and effective_groups(np.unique(groups, return_counts=True)[1]) >= FEWEST_GROUPS


def _worst(key: MetricKey, slices: Sequence[tuple[MetricResult, Estimate]], settings: MetricSettings) -> MetricResult:
    """Return the largest value of some slices as a pooled result."""
    results = [result for result, _ in slices]
    for_all = replace(settings, level=1 - (1 - settings.level) / len(slices))  # Bonferroni
    ends = [estimate.at(for_all, 100.0 if key.unit == "percent" else 1.0)[1] for _, estimate in slices]
    lows = [max(end[0], key.low) for end in ends if end is not None]
    highs = [result.high for result in results if result.high is not None]
    both = len(lows) == len(highs) == len(slices)
    return replace(
        max(results, key=lambda result: result.value),
        task=None,
        category=None,
        low=max(lows) if both else None,
        high=max(highs) if both else None,
        p=min(result.p for result in results if result.p is not None),
    )


WORST_FLIPS = slice_key(
    "distance/worst_slice_flips_pct",
    "Items whose correctness changed,",
    unit="percent",
    high=100.0,
    label="Flips, worst slice",
    headline=25,
    on_main_run=False,
)
WORST_KL = slice_key("distance/worst_slice_kl_clipped", "Mean KL clipped at 1 nat per item,", unit="nats", high=CLIP)
WORST_DROP = slice_key(
    "quality/worst_slice_drop_pct", "Points of accuracy lost,", unit="percent", low=-100.0, high=100.0
)


@metric(
    "slices",
    keys=(WORST_FLIPS, WORST_KL, WORST_DROP),
    requires=(ITEMS, VARIANT, PREDICTIONS, ITEM_DISTANCES),
    source="ours; see `larger_part_p` and `holm`",
)
def slices(inputs: MetricInputs) -> list[MetricResult]:
    """Flips, clipped KL and loss of accuracy by slice of the headline's items; see `by_slice`."""
    view, rows = inputs.view, inputs.headline_rows
    if not len(rows):
        return []
    texts = [
        item["question"] or item["prompt"] or ""
        for item in view.items.table.select(["question", "prompt"]).take(rows).to_pylist()
    ]
    before, after = (model.correct[rows, 0] for model in (inputs.baseline_predictions, inputs.variant_predictions))
    both, groups = inputs.scored_by_both[rows] & np.isin(view.family[rows], view.graded), view.group[rows]

    def scored(values: Float) -> Float:
        return np.where(both, values, np.nan)

    def drop(some: Int) -> Estimate:
        return PairedDifference.of(after[some], before[some], groups[some])

    distances = [
        SlicedDistance(
            WORST_FLIPS,
            scored((before != after).astype(np.float64)),
            groups,
            lambda some: Proportion.of((before != after)[some], groups[some]),
        ),
        SlicedDistance(WORST_DROP, scored(before.astype(np.float64) - after), groups, drop),
    ]
    if np.isin(view.family[rows], view.scored).any():
        kl = np.clip(inputs.distance("kl")[rows], 0.0, CLIP)  # NaN stays
        distances.insert(
            1,
            SlicedDistance(WORST_KL, kl, groups, lambda some: Mean.of(kl[some], groups[some], bounds=(0.0, CLIP))),
        )
    sliced = slicings(view.task[rows].tolist(), view.category[rows].tolist(), texts)
    return by_slice(inputs, sliced, distances)
