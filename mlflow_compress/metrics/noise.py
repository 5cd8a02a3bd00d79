"""Noise floors: what a second run, another engine or a server moves by itself, and which distances exceed it."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mlflow_compress.metrics.core import requirements
from mlflow_compress.metrics.core.item_table import row_keys
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import METRICS, Direction, Metric, MetricKey, compute, key, metric
from mlflow_compress.metrics.divergence import ACCEPTANCE, ITEM_COLUMNS
from mlflow_compress.metrics.flips import ALL_FLIPS, C2W, CHANGED_CORRECT, CHANGED_INCORRECT, ITEM_FLIPS, W2C, W2W
from mlflow_compress.metrics.kl_tail import ABOVE_CLIP, CLIP, CLIPPED_KL
from mlflow_compress.metrics.stats.arrays import Bool, Float, Int
from mlflow_compress.metrics.stats.intervals import are_grouped, group_sums
from mlflow_compress.metrics.stats.significance import grouped_mcnemar_mid_p, mcnemar_exact, paired_mean
from mlflow_compress.records import MetricResult, Records, RunRecords

R = TypeVar("R", bound=Records)
SIGNIFICANT = 0.05
"""P-value below which a distance stands out from its noise floor."""


def _floors(wanted: Callable[[Metric], bool] = lambda metric: True) -> list[MetricKey]:
    """Return the distances of the wanted metrics that declare a noise floor, in the order of the headline table."""
    every = [key for _, one in METRICS.items() if one.noise and wanted(one) for key in one.keys]
    floors = [key for key in every if key.floor is not None and key.floor.startswith("noise/")]
    return sorted(floors, key=lambda key: (key.headline is None, key.headline or 0, key.name))


def _declare(prefix: str, keys: list[MetricKey], meaning: str, *, on_request: bool) -> tuple[MetricKey, ...]:
    """Return the keys of noise floors; `meaning` has "{}" where the distance's name goes."""
    return tuple(
        MetricKey(
            name=_name(prefix, key),
            low=key.low,
            high=key.high,
            unit=key.unit,
            meaning=meaning.format(key.name),
            on_request=on_request,
        )
        for key in keys
    )


def _name(prefix: str, key: MetricKey) -> str:
    return str(key.floor).replace("noise/", prefix)


def _renamed(prefix: str, keys: list[MetricKey], results: list[MetricResult]) -> list[MetricResult]:
    of_key = {result.name: result for result in results}
    return [replace(of_key[key.name], name=_name(prefix, key)) for key in keys if key.name in of_key]


@metric(
    "noise_floor",
    keys=lambda: _declare("noise/", _floors(), "{} of the baseline's second run from its first.", on_request=False),
    requires=(requirements.NOISE,),
    source="llama.cpp's habit of running the base against itself; ours for flips",
)
def noise_floor(inputs: MetricInputs) -> list[MetricResult]:
    """The pooled distances between two runs of the baseline that differ in batch composition only.

    Each has the p-value by which the variant's distance is told from it, where there is one (`paired_p_values`).
    """
    p_values = paired_p_values(inputs)
    results = [replace(result, p=p_values.get(result.name)) for result in _noise_distances(inputs)]
    return _renamed("noise/", _floors(), results)


def _of_both_engines() -> list[MetricKey]:
    """Return the distances that both engines have; bounds from lists of tokens are for models behind a server."""
    return _floors(lambda metric: requirements.OPTION_BOUNDS not in metric.requires)


@metric(
    "engine_distance",
    keys=lambda: _declare(
        "engine/",
        _of_both_engines(),
        "{} of transformers from another engine (vLLM), with the baseline's checkpoint in both.",
        on_request=True,
    ),
    requires=(requirements.ENGINE,),
    source="ours",
)
def engine_distance(inputs: MetricInputs) -> list[MetricResult]:
    """The pooled distances between two engines on one checkpoint: what another engine than vLLM's would move by itself.

    They are measured on the sample of the noise floor. The reference is the engine that runs baseline and variant.
    """
    return _renamed("engine/", _of_both_engines(), _own_distances(inputs, inputs.engine) if inputs.engine else [])


def _of_a_server() -> list[MetricKey]:
    """Return the distances that a server shows: those of answers, and bounds from lists of tokens."""
    complete = {requirements.OPTION_DISTANCES, requirements.TOKEN_DISTANCES, requirements.CHAIN_DISTANCES}
    return _floors(lambda metric: not complete & set(metric.requires))


@metric(
    "served_noise",
    keys=lambda: _declare(
        "served/",
        _of_a_server(),
        "{} of the served variant's second answers from its first, to the same prompts.",
        on_request=True,
    ),
    requires=(requirements.VARIANT, requirements.ASKED_AGAIN),
    source="ours",
)
def served_noise(inputs: MetricInputs) -> list[MetricResult]:
    """The pooled distances between two answers of a served variant to the same prompts.

    They are measured on the sample of the noise floor, which is that of the baseline: a server that batches, or shares
    its GPU, adds noise of its own. The second time, nothing is taken from what was kept of the first.
    """
    assert inputs.variant is not None and inputs.asked_again is not None  # `requires` has been checked
    itself = MetricInputs(inputs.variant, settings=inputs.settings)
    return _renamed("served/", _of_a_server(), _own_distances(itself, inputs.asked_again))


def _noise_distances(inputs: MetricInputs) -> list[MetricResult]:
    """Return every pooled distance of the baseline's second run from its first, under the distance's own name."""
    return _own_distances(inputs, inputs.noise) if inputs.noise is not None else []


def _own_distances(inputs: MetricInputs, again: RunRecords) -> list[MetricResult]:
    """Return every pooled distance of a model that was scored again from its first run, `inputs.baseline`."""
    settings = replace(inputs.settings, pooled_only=True)
    first = _sampled(inputs.whole_baseline, again)
    itself = MetricInputs(first, replace(again, items=None), settings=settings)
    return [
        result
        for name, distance in METRICS.items()
        if distance.noise and itself.missing(*distance.requires) is None
        for result in compute(name, itself)
    ]


def _sampled(baseline: RunRecords, noise: RunRecords) -> RunRecords:
    """Return the baseline's records of what the second run covers: a sample of the items, some of a corpus's windows.

    Items and windows that the second run was not asked for are no unscored ones, and do not count.
    """
    asked = [row_keys(r) for r in (noise.items, noise.option_scores, noise.generations) if r is not None]
    windows, chains = (row_keys(r) if r is not None else None for r in (noise.token_scores, noise.chain_scores))

    def rows(records: R | None, keys: pa.Array | None) -> R | None:
        if records is None or keys is None:
            return None
        return type(records)(records.table.filter(pc.is_in(row_keys(records), value_set=keys)))

    items = pa.concat_arrays(asked) if asked else None
    return RunRecords(
        items=rows(baseline.items, items),
        option_scores=rows(baseline.option_scores, items),
        generations=rows(baseline.generations, items),
        token_scores=rows(baseline.token_scores, windows),
        traces=noise.traces,
        chains=noise.chains,
        chain_scores=rows(baseline.chain_scores, chains),
    )


def distinguishable(distance: MetricResult, floor: MetricResult, *, direction: Direction = "lower") -> bool:
    """Return whether a distance stands out from its noise floor.

    The near end of its interval must lie beyond the far end of the floor's (values, where there is no interval). Where
    neither way is better the sizes are compared, and an interval that holds 0 stands out from nothing.
    """
    low, high = _ends(distance)
    floor_low, floor_high = _ends(floor)
    if direction == "higher":
        return high < floor_low
    if direction == "lower":
        return low > floor_high
    return not low <= 0.0 <= high and min(abs(low), abs(high)) > max(abs(floor_low), abs(floor_high))


def _ends(result: MetricResult) -> tuple[float, float]:
    if result.low is None or result.high is None:
        return result.value, result.value
    return result.low, result.high


def paired_p_values(inputs: MetricInputs) -> dict[str, float]:
    """Return p-values of "the variant is as far from the first run as the second run is", by the distance's name.

    Both are compared on the headline's items that the second run covers: shares of items by McNemar's exact test, means
    by Student's paired test. Of items in groups whole groups are compared. Two-sided, but 1 where the variant is the
    nearer one. Distances without a value per item, such as a corpus's, have none, nor have items that were drawn by
    their margin: the second run's are another sample.
    """
    if inputs.variant is None or inputs.noise is None or inputs.noise.items is None or inputs.draws is not None:
        return {}
    second, rows = MetricInputs(inputs.baseline, replace(inputs.noise, items=None)), inputs.headline_rows
    p_values: dict[str, float] = {}
    group = inputs.view.group
    if inputs.missing(requirements.OPTION_DISTANCES) is None and inputs.noise.option_distances is not None:
        for of_items, column in {**ITEM_COLUMNS, ACCEPTANCE: "tv"}.items():
            sign = -1.0 if of_items.direction == "higher" and of_items is not ACCEPTANCE else 1.0
            further = [sign * inputs.distance(column, noise=noise)[rows] for noise in (False, True)]
            p_values |= _paired_mean(of_items.name, group[rows], *further)
        kl = [np.maximum(inputs.distance("kl", noise=noise)[rows], 0.0) for noise in (False, True)]
        p_values |= _paired_mean(CLIPPED_KL.name, group[rows], *(np.minimum(values, CLIP) for values in kl))
        both = np.isfinite(kl[0]) & np.isfinite(kl[1])
        p_values[ABOVE_CLIP.name] = _mcnemar(kl[0][both] > CLIP, kl[1][both] > CLIP, group[rows][both])
    if inputs.missing(requirements.PREDICTIONS) is None and second.missing(requirements.PREDICTIONS) is None:
        rows = rows[inputs.scored_by_both[rows] & second.scored_by_both[rows]]
        sets = [_changes(each, rows) for each in (inputs, second)]
        p_values |= {name: _mcnemar(sets[0][name], sets[1][name], group[rows]) for name in sets[0]}
    return p_values


def _changes(inputs: MetricInputs, rows: Int) -> dict[str, Bool]:
    """Return which items changed, in each of the ways that are counted."""
    b, q = inputs.baseline_predictions, inputs.variant_predictions
    right, other = b.correct[rows, 0], q.correct[rows, 0]
    changes = {ITEM_FLIPS.name: right != other, C2W.name: right & ~other, W2C.name: ~right & other}
    changes[CHANGED_CORRECT.name] = changes[C2W.name]  # of the items that the baseline has right: the others differ not
    if inputs.view.chooses[rows].all():
        wrong = ~right & ~other & (b.content[rows, 0] != q.content[rows, 0])
        changes |= {W2W.name: wrong, ALL_FLIPS.name: changes[ITEM_FLIPS.name] | wrong}
        changes[CHANGED_INCORRECT.name] = changes[W2C.name] | wrong
    return changes


def _mcnemar(variant: Bool, noise: Bool, groups: Int) -> float:
    more, fewer = variant & ~noise, ~variant & noise
    if more.sum() <= fewer.sum():
        return 1.0
    if are_grouped(groups):
        return grouped_mcnemar_mid_p(more.astype(np.int64) - fewer, groups)
    return mcnemar_exact(int(more.sum()), int(fewer.sum()))


def _paired_mean(name: str, groups: Int, variant: Float, noise: Float) -> dict[str, float]:
    difference = variant - noise
    there = np.isfinite(difference)
    difference = difference[there]
    if are_grouped(groups[there]):
        difference = group_sums(difference, groups[there])[0]
    test = paired_mean(difference) if len(difference) else None
    return {} if test is None else {name: test.p_value if test.value > 0.0 else 1.0}


def noise_table(inputs: MetricInputs, results: Iterable[MetricResult]) -> list[dict[str, Any]]:
    """Return one row per pooled distance: its value, its floor, and whether it can be told from noise.

    The paired test decides (p below 0.05, see `paired_p_values`); the intervals do where there is none, and `p` is
    None. Floor and label are None where the second run has no such distance, and the label where nothing decides.
    """
    p_values = paired_p_values(inputs)
    floors = {r.name: r for r in _noise_distances(inputs)}
    rows = []
    for r in results:
        if not r.name.startswith("distance/") or r.task is not None or r.category is not None:
            continue
        floor, label, p = floors.get(r.name), None, None
        if floor is not None:
            p = p_values.get(r.name)
            stands_out = distinguishable(r, floor, direction=key(r.name).direction) if p is None else p < SIGNIFICANT
            if p is not None or r.low is not None:
                label = "distinguishable" if stands_out else "not distinguishable from the noise floor"
        row = {"name": r.name, "value": r.value, "low": r.low, "high": r.high, "label": label, "p": p}
        ends = {"floor": floor and floor.value, "floor_low": floor and floor.low, "floor_high": floor and floor.high}
        rows.append({**row, **ends})
    return rows
