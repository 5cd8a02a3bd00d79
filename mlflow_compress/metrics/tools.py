"""Calls of tools: whether the variant calls where its baseline does, and whether its calls are valid and right."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlflow_compress.errors import AlignmentError
from mlflow_compress.metrics.core.estimates import Estimate, Mean, PairedDifference, Proportion, Resampled, pooled
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import MetricKey, keys_of, metric
from mlflow_compress.metrics.core.requirements import CALLS_TOOLS, GENERATIONS, ITEMS, OPTION_DISTANCES, VARIANT
from mlflow_compress.metrics.kl_tail import mean_kl
from mlflow_compress.metrics.stats.arrays import Bool, Float, Int
from mlflow_compress.metrics.stats.bootstrap import Statistic, difference_of
from mlflow_compress.records import Generations, MetricResult
from mlflow_compress.tool_calls import Call, is_valid, read_calls, same_calls

_key = keys_of("tools", unit="percent", high=100.0, counted="answers", on_request=True)
_EQUAL = "the baseline's second sampling against its first, the value of an identical model."
_CALLED = _key(
    "called_pct",
    "neither",
    "Drawn answers of the variant that call a tool.",
    label="Answers with a call",
    headline=145,
    difference="tools/called_delta_pct",
    floor="tools/called_floor_pct",
    on_main_run=False,
)
_CALLED_BASELINE = _key("called_pct_baseline", "neither", "The baseline's share of drawn answers that call a tool.")
_CALLED_DELTA = _key(
    "called_delta_pct",
    "neither",
    "Variant minus baseline; Tango's paired score interval.",
    low=-100.0,
    noticed="answers with a call of a tool",
)
_CALLED_FLOOR = _key("called_floor_pct", "neither", f"The same of {_EQUAL}", low=-100.0)

_PRECISION = _key(
    "trigger_precision_pct", "higher", "Of the variant's answers with a call, those where its baseline calls too."
)
_RECALL = _key(
    "trigger_recall_pct", "higher", "Of the baseline's answers with a call, those where the variant calls too."
)
_F1_FLOOR = _key("trigger_f1_floor_pct", "higher", f"The F1 of {_EQUAL}")
F1 = _key(
    "trigger_f1_pct",
    "higher",
    "F1 of the variant's decisions to call against its baseline's: 2 TP / (2 TP + FP + FN).",
    label="Same decision to call (F1)",
    headline=146,
    unchanged=100.0,
    floor=_F1_FLOOR.name,
    on_main_run=False,
)

_SAME_FUNCTIONS = _key(
    "same_functions_pct", "higher", "Of the answers with a call from both models, those that call the same functions."
)
_SAME_CALLS_FLOOR = _key("same_calls_floor_pct", "higher", f"The same of {_EQUAL}")
_SAME_CALLS = _key(
    "same_calls_pct",
    "higher",
    "Of the answers with a call from both models, those with the same functions and arguments.",
    floor=_SAME_CALLS_FLOOR.name,
    unchanged=100.0,
)

_JSON = _key("json_pct", "higher", "Of the variant's answers with a call, those whose calls are all valid JSON.")
_JSON_BASELINE = _key("json_pct_baseline", "higher", "The same of the baseline.")
SCHEMA = _key(
    "schema_pct",
    "higher",
    "Of the variant's answers with a call, those whose calls are all to given tools and valid against their schemas.",
    label="Calls valid against the schema",
    headline=147,
    difference="tools/schema_delta_pct",
    floor="tools/schema_floor_pct",
    on_main_run=False,
)
_SCHEMA_BASELINE = _key("schema_pct_baseline", "higher", "The same of the baseline.")
_SCHEMA_DELTA = _key(
    "schema_delta_pct", "higher", "Variant minus baseline.", low=-100.0, noticed="calls valid against the schema"
)
_SCHEMA_FLOOR = _key("schema_floor_pct", "neither", f"The difference of {_EQUAL}", low=-100.0)

_RIGHT = _key(
    "right_pct",
    "higher",
    "Drawn answers of the variant with exactly the right calls, or none if none is right.",
    label="Right calls",
    headline=148,
    difference="tools/right_delta_pct",
    floor="tools/right_floor_pct",
    on_main_run=False,
)
_RIGHT_BASELINE = _key("right_pct_baseline", "higher", "The same of the baseline.")
_RIGHT_DELTA = _key(
    "right_delta_pct",
    "higher",
    "Variant minus baseline; Tango's paired score interval.",
    low=-100.0,
    noticed="right calls",
)
_RIGHT_FLOOR = _key("right_floor_pct", "neither", f"The difference of {_EQUAL}", low=-100.0)
_GOLD_PRECISION = _key(
    "gold_precision_pct", "higher", "Of the variant's answers with a call, those for which a call is right."
)
_GOLD_RECALL = _key("gold_recall_pct", "higher", "Of the variant's answers where a call is right, those with a call.")
_GOLD_F1 = _key("gold_f1_pct", "higher", "F1 of the variant's decisions to call against the right ones.")
_GOLD_F1_BASELINE = _key("gold_f1_pct_baseline", "higher", "The same of the baseline.")

_decision = keys_of("tools", unit="nats", on_request=True)
_DECISION_KL_FLOOR = _decision(
    "decision_kl_floor", "neither", "The same of the baseline's second run, under another batch composition."
)
_DECISION_KL = _decision(
    "decision_kl",
    "lower",
    "Mean KL at the first token of the answer, which decides between call and no call.",
    floor=_DECISION_KL_FLOOR.name,
)
_MARGIN_DELTA = _decision(
    "decision_margin_delta",
    "higher",
    "Probability of the baseline's decision minus that of the other one: mean of variant minus baseline.",
    low=-2.0,
    high=2.0,
    unit="probability",
)


@dataclass(frozen=True)
class _Answers:
    """What k drawn answers to each of n items are; arrays have the shape (n * k,), sample by sample of an item."""

    calls: list[tuple[Call | None, ...]]
    called: Bool
    json: Bool  # Calls that are all valid JSON, and valid against the schema; False without a call
    schema: Bool


def _read(inputs: MetricInputs, rows: Int, answers: Generations, samples: Sequence[int], tools: list[Any]) -> _Answers:
    """Return some samples of some items; one that is not there is an `AlignmentError`."""
    view = inputs.view
    place = {int(row): number for number, row in enumerate(rows)}
    k = len(samples)
    drawn = answers.where(task=set(view.task[rows]), turn=0, sample=tuple(samples))
    items = view.locate(drawn)
    if len(items) != len(rows) * k:
        raise AlignmentError("Answers with tools are missing", allowed=f"{k} drawn answers per item and sampling")
    marks = [mark for [mark] in view.items.table.column("options").take(rows).to_pylist()]
    calls: list[tuple[Call | None, ...]] = [()] * len(items)
    for row, answer in zip(items.tolist(), drawn.table.select(["sample", "text"]).to_pylist(), strict=True):
        calls[place[row] * k + answer["sample"] - samples[0]] = read_calls(answer["text"], marks[place[row]])
    return _Answers(
        calls=calls,
        called=np.array([bool(made) for made in calls]),
        json=np.array([bool(made) and None not in made for made in calls]),
        schema=np.array(
            [bool(made) and all(is_valid(call, tools[n // k]) for call in made) for n, made in enumerate(calls)]
        ),
    )


def _percent(above: Sequence[int], below: Sequence[int]) -> Statistic:
    """Return the statistic "100 times some columns over some"; 0 where there are none below."""

    def statistic(means: Float) -> Float:
        over, under = means[..., list(above)].sum(axis=-1), means[..., list(below)].sum(axis=-1)
        return np.asarray(100.0 * np.divide(over, under, out=np.zeros_like(over), where=under > 0))

    return statistic


def _decisions(made: Bool, wanted: Bool, groups: Int, keys: Sequence[MetricKey]) -> dict[MetricKey, Estimate]:
    """Return precision, recall and F1 (2 TP / (2 TP + FP + FN)) of decisions; what divides by 0 is left out."""
    columns = np.column_stack([made & wanted, made & ~wanted, ~made & wanted]).astype(np.float64)
    parts = (((0,), (0, 1)), ((0,), (0, 2)), ((0, 0), (0, 0, 1, 2)))
    there = (made.any(), wanted.any(), made.any() or wanted.any())
    return {
        key: Resampled(columns, _percent(above, below), groups=groups)
        for key, (above, below), exists in zip(keys, parts, there, strict=True)
        if exists
    }


@metric(
    "tools",
    keys=(
        *(_CALLED, _CALLED_BASELINE, _CALLED_DELTA, _CALLED_FLOOR, _PRECISION, _RECALL, F1, _F1_FLOOR),
        *(_SAME_FUNCTIONS, _SAME_CALLS, _SAME_CALLS_FLOOR, _JSON, _JSON_BASELINE),
        *(SCHEMA, _SCHEMA_BASELINE, _SCHEMA_DELTA, _SCHEMA_FLOOR, _RIGHT, _RIGHT_BASELINE, _RIGHT_DELTA, _RIGHT_FLOOR),
        *(_GOLD_PRECISION, _GOLD_RECALL, _GOLD_F1, _GOLD_F1_BASELINE, _DECISION_KL, _DECISION_KL_FLOOR, _MARGIN_DELTA),
    ),
    requires=(ITEMS, VARIANT, GENERATIONS, CALLS_TOOLS),
    source="K2-Vendor-Verifier's trigger F1 and schema accuracy; BFCL's syntax-tree match; margin and floors are ours",
)
def tools(inputs: MetricInputs) -> list[MetricResult]:
    """Over k drawn answers (temperature 1) to each of n prompts with tools; intervals are over prompts.

    Values of each model, and their difference, are of the variant and of the baseline's second sampling, which share
    their random numbers, sample by sample: so a change is not hidden by chance. F1 and equal calls are against the
    baseline's first sampling. The floors are those of the second against the first.

    An answer "calls" where it holds the chat template's mark of a call, or, without such a mark, where it begins with
    JSON. K2-Vendor-Verifier reads the same off the server's `finish_reason`, and accepts a fixed F1 (73 or 80 %); here
    the floor says what an equal model has.

    At the first token of an answer, with p the probability that it begins a call and m = 2 p - 1: the KL, and the mean
    of ``s (m_variant - m_baseline)``, where s is the sign of the baseline's m. An answer that says something before its
    call, or reasons first, decides later than there.
    """
    view = inputs.view
    rows = np.flatnonzero(np.isin(view.family, view.families(lambda family: family.calls)))
    assert inputs.variant is not None and inputs.variant.generations is not None
    assert inputs.baseline.generations is not None  # `requires` has been checked
    k = int(inputs.variant.generations.where(task=set(view.task[rows])).column("sample").max())
    units = view.group[rows]
    groups = np.repeat(units, k)
    texts = view.items.table.column("answers").take(rows).to_pylist()
    known = [[json.loads(part) for part in parts] for parts in texts]
    given = [parts[0] for parts in known]
    first, again = (_read(inputs, rows, inputs.baseline.generations, range(at, at + k), given) for at in (1, k + 1))
    ours = _read(inputs, rows, inputs.variant.generations, range(1, k + 1), given)

    def same(other: _Answers) -> Bool:
        pairs = enumerate(zip(first.calls, other.calls, strict=True))
        return np.array([same_calls(a, b, given[n // k]) for n, (a, b) in pairs])

    def share(hits: Bool, of: Bool) -> Proportion:
        return Proportion.of(hits[of], groups[of])

    both = first.called & ours.called
    functions = [
        {c.name for c in a if c} == {c.name for c in b if c} for a, b in zip(first.calls, ours.calls, strict=True)
    ]
    estimates: dict[MetricKey, Estimate] = {
        _CALLED: Proportion.of(ours.called, groups),
        _CALLED_BASELINE: Proportion.of(again.called, groups),
        _CALLED_DELTA: PairedDifference.of(again.called, ours.called, groups),
        _CALLED_FLOOR: PairedDifference.of(first.called, again.called, groups),
        **_decisions(ours.called, first.called, groups, (_PRECISION, _RECALL, F1)),
        _F1_FLOOR: _decisions(again.called, first.called, groups, (_PRECISION, _RECALL, F1)).get(F1, Proportion(0, 0)),
        _SAME_FUNCTIONS: share(np.array(functions), both),
        _SAME_CALLS: share(same(ours), both),
        _SAME_CALLS_FLOOR: share(same(again), first.called & again.called),
        _JSON: share(ours.json, ours.called),
        _JSON_BASELINE: share(again.json, again.called),
        SCHEMA: share(ours.schema, ours.called),
        _SCHEMA_BASELINE: share(again.schema, again.called),
        **{
            key: _schema_change(one, other, groups)
            for key, one, other in ((_SCHEMA_DELTA, again, ours), (_SCHEMA_FLOOR, first, again))
            if one.called.any() and other.called.any()
        },
    }
    gold = np.repeat([len(parts) > 1 for parts in known], k)

    if gold.any():
        wanted = [[Call(c["name"], c["arguments"]) for c in parts[1]] if len(parts) > 1 else [] for parts in known]
        right, before, later = (
            np.array([same_calls(made, wanted[n // k], given[n // k]) for n, made in enumerate(one.calls)])[gold]
            for one in (ours, first, again)
        )
        some, calls = groups[gold], np.repeat([bool(one) for one in wanted], k)[gold]
        estimates |= {
            _RIGHT: Proportion.of(right, some),
            _RIGHT_BASELINE: Proportion.of(later, some),
            _RIGHT_DELTA: PairedDifference.of(later, right, some),
            _RIGHT_FLOOR: PairedDifference.of(before, later, some),
            **_decisions(ours.called[gold], calls, some, (_GOLD_PRECISION, _GOLD_RECALL, _GOLD_F1)),
        }
        of_baseline = _decisions(again.called[gold], calls, some, (_GOLD_PRECISION, _GOLD_RECALL, _GOLD_F1))
        estimates |= {_GOLD_F1_BASELINE: of_baseline[_GOLD_F1]} if _GOLD_F1 in of_baseline else {}
    if OPTION_DISTANCES.missing(inputs) is None:
        estimates |= _at_first_token(inputs, rows, units)
    return pooled(inputs, estimates)


def _schema_change(one: _Answers, other: _Answers, groups: Int) -> Resampled:
    columns = np.column_stack([one.schema, one.called, other.schema, other.called]).astype(np.float64)
    return Resampled(columns, difference_of(_percent([0], [1])), groups=groups)


def _at_first_token(inputs: MetricInputs, rows: Int, units: Int) -> dict[MetricKey, Estimate]:
    """Return how the decision to call moves at the first token of an answer; `units` are the groups of the prompts."""
    margins = [2.0 * np.exp(inputs.grid(who).loglik[rows, 0, 0]) - 1.0 for who in ("baseline", "variant")]
    change = np.where(margins[0] < 0, -1.0, 1.0) * (margins[1] - margins[0])
    estimates: dict[MetricKey, Estimate] = {
        _DECISION_KL: mean_kl(inputs.distance("kl")[rows], units),
        _MARGIN_DELTA: Mean.of_scored(change, units),
    }
    if inputs.noise is not None and len(inputs.noise.option_distances or ()):
        floor = inputs.distance("kl", noise=True)[rows]
        sampled = np.isfinite(floor)
        estimates[_DECISION_KL_FLOOR] = mean_kl(floor[sampled], units[sampled])
    return estimates
