"""How long models think, thoughts that never end, and right answers that were found on the way and not given."""

from functools import partial

import numpy as np

from mlflow_compress.metrics.core.estimates import Estimate, PairedDifference, Proportion, Resampled, pooled
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import MetricKey, keys_of, metric
from mlflow_compress.metrics.stats.arrays import Float
from mlflow_compress.metrics.stats.bootstrap import difference_of, ratio, ratio_of_ratios
from mlflow_compress.metrics.thinking import ANSWERED_PROBLEMS, DrawnAnswers, ThinkingModels, thinking_models
from mlflow_compress.records import MetricResult

_times = keys_of("reasoning", unit="ratio", unchanged=1.0, counted="answers", on_request=True)
_percent = keys_of("reasoning", unit="percent", high=100.0, counted="answers", on_request=True)
_tokens = keys_of("reasoning", unit="tokens", counted="answers", on_request=True)
_LENGTH_FLOOR = _times(
    "length_ratio_floor", "neither", "The baseline's second sampling against its first, as of an identical model."
)
LENGTH = _times(
    "length_ratio",
    "neither",
    "Tokens of the variant's sampled answers, reasoning included, relative to the baseline's.",
    label="Length of thoughts and answers",
    headline=137,
    floor=_LENGTH_FLOOR.name,
    on_main_run=False,
    noticed="length of thoughts",
)

_SAME = "question by question, where both have some"
_LENGTH_RIGHT = _times("length_ratio_right", "neither", f"The same of right answers, {_SAME}.", counted="items")
_LENGTH_WRONG = _times("length_ratio_wrong", "neither", f"The same of wrong answers, {_SAME}.", counted="items")
_KINDS = {
    kind: (
        _percent(f"{kind}_pct", "lower", f"Drawn answers of the variant {what}."),
        _percent(f"{kind}_pct_baseline", "neither", "The same of the baseline."),
        _percent(f"{kind}_delta_pct", "lower", f"Answers {what}: variant minus baseline.", low=-100.0),
    )
    for kind, what in (
        ("cut", "cut at the token limit"),
        ("unclosed", "whose thought does not end"),
        ("loops", "cut at the token limit while they repeat a span"),
    )
}

_FOUND = _percent(
    "found_and_lost_pct",
    "neither",
    "Of the variant's wrong answers, those whose reasoning concludes the right answer somewhere.",
    label="Wrong, but found in the thought",
    headline=139,
    difference="reasoning/found_and_lost_delta_pct",
    on_main_run=False,
)
_FOUND_BASELINE = _percent("found_and_lost_pct_baseline", "neither", "The same of the baseline.")
_FOUND_DELTA = _percent("found_and_lost_delta_pct", "neither", "Variant minus baseline.", low=-100.0)
_FOUND_BY_CHANCE = _percent(
    "found_by_chance_pct", "neither", "The same by chance: with the right answers of other questions."
)

_hesitations = keys_of("reasoning", unit="markers", counted="answers", on_request=True)
_HESITATION = _hesitations(
    "hesitation_per_1k", "neither", "Hesitation markers in the variant's thoughts per 1,000 tokens."
)
_HESITATION_BASELINE = _hesitations("hesitation_per_1k_baseline", "neither", "The same of the baseline.")
_HESITATION_DELTA = _hesitations("hesitation_per_1k_delta", "neither", "Variant minus baseline.", low=-np.inf)
_HESITATION_FLOOR = _hesitations(
    "hesitation_per_1k_floor", "neither", "The baseline's second sampling minus its first.", low=-np.inf
)

_COST = _tokens(
    "tokens_per_right",
    "lower",
    "Tokens that the variant writes per right answer.",
    label="Tokens to a right answer",
    headline=138,
    difference="reasoning/tokens_per_right_ratio",
    on_main_run=False,
)
_COST_BASELINE = _tokens("tokens_per_right_baseline", "lower", "The same of the baseline.")
COST_RATIO = _times(
    "tokens_per_right_ratio",
    "lower",
    "Tokens to a right answer, variant over baseline.",
    unit="times",
    label="Tokens to a right answer, ratio",
)


_share_of = partial(Proportion.of, even=True)
_positive = partial(Resampled, jackknife=True, positive=True)


def _found_share(means: Float) -> Float:
    return 100.0 * ratio(means)


@metric(
    "thought_length",
    keys=(
        *(LENGTH, _LENGTH_FLOOR, _LENGTH_RIGHT, _LENGTH_WRONG),
        *(key for keys in _KINDS.values() for key in keys),
        *(_HESITATION, _HESITATION_BASELINE, _HESITATION_DELTA, _HESITATION_FLOOR),
        *(_FOUND, _FOUND_BASELINE, _FOUND_DELTA, _FOUND_BY_CHANCE, _COST, _COST_BASELINE, COST_RATIO),
    ),
    requires=ANSWERED_PROBLEMS,
    source="failures that had the answer on the way, and hesitation words: arXiv 2606.00206, there read by a model, "
    "here by rule; the list of markers is ours",
)
def thought_length(inputs: MetricInputs) -> list[MetricResult]:
    """Over k drawn answers to each of n questions; every interval is over questions, whose answers stay together.

    The variant is against the baseline's second sampling, with whose random numbers it is drawn; floors are the second
    against the first. Lengths are ratios of sums of tokens. Those of right answers alone are ratios of the questions'
    mean lengths, over the questions that both models have answered right at least once, so that they do not depend on
    which questions a model still answers; those of wrong answers likewise. Intervals of lengths and of tokens to a
    right answer are the jackknife's of the logarithm, with Student's t, which cover better than the bootstrap's
    (`benchmarks/thinking_coverage.py`).

    A thought "concludes" what stands in a box, or behind "answer is". How often this rule is met by accident says
    ``found_by_chance_pct``: the same thoughts, with the right answer of the next question that has another one.

    A cut answer loops where its last 8,000 characters end with a span that stands there three times or more in a row,
    over 32 characters or more, as for `health`. One that ends by itself does not loop.

    ``hesitation_per_1k = 1000 markers/tokens``, sums over answers. Markers are those of `hesitation.MARKERS`, in the
    thought; the tokens are those of thought and answer.

    ``tokens_per_right = sum(tokens)/sum(right)``: those of wrong answers are paid too. An answer that cannot be read
    counts as not right here. There is no result where a model has no right answer.
    """
    models = thinking_models(inputs)
    estimates: dict[MetricKey, Estimate] = {
        **_lengths(models),
        **_kinds(models),
        **_hesitation(models),
        **_found_and_lost(models),
        **_tokens_per_right(models),
    }
    return pooled(inputs, estimates)


def _lengths(models: ThinkingModels) -> dict[MetricKey, Estimate]:
    first, again, variant, groups = models.first, models.again, models.variant, models.groups

    def length(one: DrawnAnswers, other: DrawnAnswers) -> Resampled:
        columns = np.column_stack([other.tokens.ravel(), one.tokens.ravel()])
        return _positive(columns, ratio, groups=groups, most=float(columns.max()))

    def length_where(value: float) -> Resampled:
        means = []
        for one in (variant, again):
            chosen = one.right == value
            total, n = (one.tokens * chosen).sum(axis=1), chosen.sum(axis=1)
            means.append(np.divide(total, n, out=np.full(len(n), np.nan), where=n > 0))
        both = np.isfinite(means).all(axis=0)
        return _positive(np.column_stack(means)[both], ratio, n_unscored=int((~both).sum()))

    return {
        LENGTH: length(again, variant),
        _LENGTH_FLOOR: length(first, again),
        _LENGTH_RIGHT: length_where(1.0),
        _LENGTH_WRONG: length_where(0.0),
    }


def _kinds(models: ThinkingModels) -> dict[MetricKey, Estimate]:
    groups = models.groups
    estimates: dict[MetricKey, Estimate] = {}
    for kind, (share, base, delta) in _KINDS.items():
        a, b = (getattr(one, kind).ravel() for one in (models.again, models.variant))
        estimates |= {
            share: _share_of(b, groups),
            base: _share_of(a, groups),
            delta: PairedDifference.of(a, b, groups, even=True),
        }
    return estimates


def _hesitation(models: ThinkingModels) -> dict[MetricKey, Estimate]:
    first, again, variant = (
        np.column_stack([1000.0 * one.hesitations.ravel(), one.tokens.ravel()])
        for one in (models.first, models.again, models.variant)
    )
    alone, paired = partial(Resampled, groups=models.groups), difference_of(ratio)
    return {
        _HESITATION: alone(variant, ratio),
        _HESITATION_BASELINE: alone(again, ratio),
        _HESITATION_DELTA: alone(np.column_stack([again, variant]), paired),
        _HESITATION_FLOOR: alone(np.column_stack([first, again]), paired),
    }


def _found_and_lost(models: ThinkingModels) -> dict[MetricKey, Estimate]:
    again, variant, groups = models.again, models.variant, models.groups
    before, now = ((one.right == 0.0).ravel() for one in (again, variant))  # wrong answers
    found_before, found = again.found.ravel(), variant.found.ravel()
    estimates: dict[MetricKey, Estimate] = {
        _FOUND: _share_of(found[now], groups[now]),
        _FOUND_BASELINE: _share_of(found_before[before], groups[before]),
        _FOUND_BY_CHANCE: _share_of(variant.found_another.ravel()[now], groups[now]),
    }
    if before.any() and now.any():
        some = before | now
        columns = np.column_stack([found_before & before, before, found & now, now]).astype(np.float64)[some]
        estimates[_FOUND_DELTA] = Resampled(columns, difference_of(_found_share), groups=groups[some])
    return estimates


def _tokens_per_right(models: ThinkingModels) -> dict[MetricKey, Estimate]:
    again, variant, groups = models.again, models.variant, models.groups
    costs = [column for one in (variant, again) for column in (one.tokens.ravel(), (one.right == 1.0).ravel())]
    columns = np.column_stack(costs).astype(np.float64)
    estimates: dict[MetricKey, Estimate] = {}
    if (variant.right == 1.0).any():
        estimates[_COST] = _positive(columns[:, :2], ratio, groups=groups)
    if (again.right == 1.0).any():
        estimates[_COST_BASELINE] = _positive(columns[:, 2:], ratio, groups=groups)
    if len(estimates) == 2:
        estimates[COST_RATIO] = _positive(columns, ratio_of_ratios, groups=groups)
    return estimates
