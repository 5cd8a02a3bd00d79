"""A policy decided item by item: which claims about bounded values stand for each of its gates, and their values.

A metric can be decided early if it is the mean of one bounded value per item, or the ratio of two such means. The
registry of these values is `VALUES`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from mlflow_compress.config.policy import MarginGate, MetricGate, Policy
from mlflow_compress.decide.gates import DELTA, SPEED, DivergenceGate, Gate
from mlflow_compress.decide.promotion import gates_of
from mlflow_compress.errors import ConfigError, UnsupportedError
from mlflow_compress.metrics.core.item_table import ItemTable
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import key
from mlflow_compress.metrics.divergence import LN2
from mlflow_compress.metrics.kl_tail import ABOVE_CLIP, CLIP, CLIPPED_KL
from mlflow_compress.metrics.stats.arrays import Bool, Float, Int
from mlflow_compress.metrics.stats.sequential import BoundedCheck
from mlflow_compress.metrics.thinking import THINKING, ThinkingModels, squared_change, thinking_models


@dataclass(frozen=True, kw_only=True)
class _ItemValue:
    """One bounded value per item, whose mean is a metric."""

    of: Callable[[MetricInputs], Float]  # The values, NaN where an item has none; shape (n_items,)
    low: float = 0.0  # Their bounds
    high: float = 1.0
    factor: float = 1.0  # What the metric's unit multiplies the mean by: 100 for percent
    # Where the metric is a ratio of means, what it divides by: from 0 to 1 of an item, whose value lies between `low`
    # and `high` times that. "The ratio is at most r" is "the mean of value - r per is at most 0".
    per: Callable[[MetricInputs], Float] | None = None
    tokens: bool = False  # Value and `per` are tokens instead: each between 0 and the longest answer
    family: str | None = None  # Family of the items that the metric is about; None for those of the headline

    def claim(self, limit: float) -> tuple[float, float, float]:
        """Return the limit of the mean that the checks are about, and the bounds of its values."""
        if self.tokens:
            return 0.0, -limit, 1.0
        if self.per is not None:
            return 0.0, min(0.0, self.low - limit), max(0.0, self.high - limit)
        return limit, self.low, self.high


def _answered(inputs: MetricInputs, values: Bool | Float | Int, also: Bool | None = None) -> Float:
    there = inputs.scored_by_both if also is None else inputs.scored_by_both & also
    return np.where(there, np.asarray(values, dtype=np.float64), np.nan)


def _correct(inputs: MetricInputs) -> tuple[Bool, Bool]:
    return inputs.baseline_predictions.correct[:, 0], inputs.variant_predictions.correct[:, 0]


def _delta(inputs: MetricInputs) -> Float:
    before, after = _correct(inputs)
    return _answered(inputs, after.astype(np.int64) - before.astype(np.int64))


def _all_flips(inputs: MetricInputs) -> Float:
    before, after = (p.content[:, 0] for p in (inputs.baseline_predictions, inputs.variant_predictions))
    return _answered(inputs, before != after, inputs.view.chooses)


def _from_right_to_wrong(inputs: MetricInputs) -> Float:
    before, after = _correct(inputs)
    return _answered(inputs, before & ~after)


def _distance(inputs: MetricInputs, name: str) -> Float:
    """Return a distance per item; NaN for all where every answer is generated."""
    if inputs.variant is not None and inputs.variant.option_distances is None:
        return np.full(len(inputs.view), np.nan)
    return inputs.distance(name)


def _kl(inputs: MetricInputs) -> Float:
    return np.maximum(_distance(inputs, "kl"), 0.0)


def _column(name: str, most: float = 1.0) -> Callable[[MetricInputs], Float]:
    # float32 sums leave their bounds by rounding; the metrics allow for it too.
    return lambda inputs: np.clip(_distance(inputs, name), 0.0, most)


_OfAnswers = Callable[[ThinkingModels], Float | Bool]


def _drawn(value: _OfAnswers, inputs: MetricInputs) -> Float:
    """Return a value of each problem that a model thinks about; NaN for other items.

    A value of each drawn answer counts as their mean, to which one without a value adds 0.
    """
    found = np.full(len(inputs.view.family), np.nan)
    if THINKING in inputs.view.family:
        models = thinking_models(inputs)
        values = value(models)
        found[models.rows] = values if values.ndim == 1 else np.nansum(values, axis=1) / values.shape[1]
    return found


def _thought(
    of: Callable[[ThinkingModels], Float | Bool],
    per: Callable[[ThinkingModels], Float | Bool] | None = None,
    **more: Any,
) -> _ItemValue:
    return _ItemValue(
        of=partial(_drawn, of), per=None if per is None else partial(_drawn, per), family=THINKING, **more
    )


def _right_delta(models: ThinkingModels) -> Float:
    return np.asarray(models.variant.right - models.again.right)


THOUGHTS: Mapping[str, _ItemValue] = {
    "reasoning/pass_at_1": _thought(lambda m: m.variant.right, lambda m: np.isfinite(m.variant.right)),
    "reasoning/pass_at_1_delta": _thought(_right_delta, lambda m: np.isfinite(_right_delta(m)), low=-1.0),
    # Of two answers, one right, the estimate of either variance is 1/4; it is less of more.
    "reasoning/flips_pct": _thought(lambda m: squared_change(m.first, m.variant), low=-0.5, factor=100.0),
    "reasoning/length_ratio": _thought(lambda m: m.variant.tokens, lambda m: m.again.tokens, tokens=True),
    "reasoning/found_and_lost_pct": _thought(
        lambda m: (m.variant.right == 0.0) & m.variant.found, lambda m: m.variant.right == 0.0, factor=100.0
    ),
    "reasoning/cut_pct": _thought(lambda m: m.variant.cut, factor=100.0),
}
VALUES: Mapping[str, _ItemValue] = {
    "distance/flips_pct": _ItemValue(of=lambda inputs: np.abs(_delta(inputs)), factor=100.0),
    "distance/all_flips_pct": _ItemValue(of=_all_flips, factor=100.0),
    "distance/c2w_pct": _ItemValue(of=_from_right_to_wrong, factor=100.0),
    DELTA: _ItemValue(of=_delta, low=-1.0),
    "distance/kl_clipped_mean": _ItemValue(of=lambda inputs: np.minimum(_kl(inputs), CLIP), high=CLIP),
    "distance/kl_above_clip_pct": _ItemValue(
        of=lambda inputs: np.where(np.isnan(_kl(inputs)), np.nan, _kl(inputs) > CLIP), factor=100.0
    ),
    "distance/js_mean": _ItemValue(of=_column("js", LN2), high=LN2),
    "distance/acceptance": _ItemValue(of=lambda inputs: 1.0 - _column("tv")(inputs)),
    "distance/top1_agreement": _ItemValue(of=_column("same_top")),
    "distance/top10_agreement": _ItemValue(of=_column("top10")),
    "distance/rbo10": _ItemValue(of=_column("rbo10")),
    **THOUGHTS,
}
"""The metrics that can be decided item by item."""

_WITHOUT_ITEMS = ("size/", SPEED)
_OF_ANSWERS = "judge/"
_OF_JUDGE_MODELS = ("judge/mt_bench", "judge/agreement", "judge/win", "judge/losses", "judge/pairwise")
_REASONS = {
    "distance/kl_mean": "KL has no upper bound: one item may hold any part of the mean. Use the policy's part 'kl'",
    "distance/kl_reverse_mean": "KL has no upper bound: one item may hold any part of the mean",
}


@dataclass(frozen=True, kw_only=True)
class ItemCheck:
    """One claim about the items, and where its values come from."""

    claim: BoundedCheck
    limit: float  # Of the metric, as a mean or ratio of values
    metric: str  # The metric, and which items it is about; None means pooled
    task: str | None
    category: str | None
    gate: int  # Number of the policy's gate that the claim belongs to

    def rows(self, view: ItemTable, headline: Sequence[str]) -> Int:
        """Return the items that the check is about."""
        of = VALUES[self.metric].family
        chosen = np.isin(view.family, list(headline) if of is None else [of])
        if self.task is not None:
            chosen = (view.task == self.task) & (chosen | (of is None))
        if self.category is not None:
            chosen = chosen & (view.category == self.category)
        return np.flatnonzero(chosen)

    def values(self, inputs: MetricInputs) -> tuple[Float, Float, Float]:
        """Return what the claim is about, and what the metric divides by what; NaN where an item has none."""
        value = VALUES[self.metric]
        of = value.of(inputs)
        per = np.ones_like(of) if value.per is None else value.per(inputs)
        return of if value.per is None else of - self.limit * per, of, per

    def within(self, view: ItemTable) -> "ItemCheck":
        """Return the check with the bounds that the items set: an answer has at most as many tokens as it may have."""
        if not VALUES[self.metric].tokens:
            return self
        known = view.items.table.column("answers").take(self.rows(view, ())).to_pylist()
        most = max((int(tokens) for _, tokens in known), default=1)
        return replace(self, claim=replace(self.claim, low=most * self.claim.low, high=most * self.claim.high))


@dataclass(frozen=True, kw_only=True)
class ItemPolicy:
    """A policy as a gate in CI reads it."""

    gates: tuple[Gate | DivergenceGate, ...]  # As a promotion has them: they decide what the items left open
    checks: tuple[ItemCheck, ...]  # What is decided item by item. A gate passes when all of its checks do.
    at_once: frozenset[int]  # Gates that need no item: those on the checkpoint's size, its speed and its memory
    of_answers: frozenset[int] = frozenset()  # Gates on what both models answer to instructions


def item_policy(policy: Policy, file: str | None = None) -> ItemPolicy:
    """Return what a policy means item by item; an `UnsupportedError` names the part that cannot be decided so."""
    entries: list[MetricGate | MarginGate] = [*policy.gates, *policy.margins]
    stages = {"evaluate", "judge"} if any(one.metric.startswith(_OF_ANSWERS) for one in entries) else {"evaluate"}
    if not stages.issuperset(policy.require.stages):
        raise UnsupportedError(
            "The policy requires a stage that the gate does not run", allowed=sorted(stages), got=policy.require.stages
        )
    if policy.require.replicates > 1:
        raise UnsupportedError("The gate evaluates one checkpoint; it cannot require replicates", fix="Use promote")
    if policy.anomalies.max_accuracy_gain is not None:
        raise UnsupportedError(
            "anomalies.max_accuracy_gain is not decided item by item", fix="Leave it out, or use promote"
        )
    gates = gates_of(policy, file).gates
    at_once, of_answers = set(), set()
    for number, entry in enumerate(entries, start=int(policy.kl is not None)):
        if entry.metric.startswith(_WITHOUT_ITEMS):
            at_once.add(number)
        elif entry.metric.startswith(_OF_JUDGE_MODELS):
            raise UnsupportedError(f"The gate calls no judge model, and {entry.metric} needs one", fix="Use promote")
        elif entry.metric.startswith(_OF_ANSWERS):
            of_answers.add(number)
    return ItemPolicy(
        gates=gates, checks=item_checks(policy), at_once=frozenset(at_once), of_answers=frozenset(of_answers)
    )


def item_checks(policy: Policy) -> tuple[ItemCheck, ...]:
    """Return what a policy claims about items; an `UnsupportedError` names a claim that items cannot decide."""
    checks: list[ItemCheck] = []
    if policy.kl is not None:
        limits = {CLIPPED_KL.name: policy.kl.max_kl, ABOVE_CLIP.name: policy.kl.max_outliers_pct}
        checks += [_check(metric, limit, False, 0) for metric, limit in limits.items()]
    entries: list[MetricGate | MarginGate] = [*policy.gates, *policy.margins]
    for number, entry in enumerate(entries, start=int(policy.kl is not None)):
        if not entry.metric.startswith((*_WITHOUT_ITEMS, _OF_ANSWERS)):
            limit, at_least = _margin_limit(entry) if isinstance(entry, MarginGate) else _gate_limit(entry)
            checks.append(_check(entry.metric, limit, at_least, number, entry.task, entry.category))
    return tuple(checks)


def _gate_limit(gate: MetricGate) -> tuple[float, bool]:
    """Return the limit, and whether the metric must be at least that."""
    at_least = gate.at_least is not None
    if gate.bound != "auto" and gate.end != ("lower" if at_least else "upper"):
        raise UnsupportedError(
            f"The gate on {gate.metric} must read the interval's worse end", allowed="bound: auto", got=gate.bound
        )
    return gate.limit, at_least


def _margin_limit(margin: MarginGate) -> tuple[float, bool]:
    declared = key(margin.metric)
    at_least = declared.direction == "higher"
    return declared.unchanged + (-margin.margin if at_least else margin.margin), at_least


def _check(
    metric: str, limit: float, at_least: bool, gate: int, task: str | None = None, category: str | None = None
) -> ItemCheck:
    value = VALUES.get(metric)
    if value is None:
        why = _REASONS.get(metric, "it is no mean of one bounded value per item")
        raise UnsupportedError(f"{metric} cannot be decided item by item: {why}", allowed=sorted(VALUES))
    place = "/".join(part for part in (task, category) if part)
    # Two gates may bound one metric from both sides: the number tells them apart.
    name = f"{metric}{f' of {place}' if place else ''} {'>=' if at_least else '<='} {limit:g} (gate {gate + 1})"
    share = limit / value.factor
    of_mean, low, high = value.claim(share)
    claim = BoundedCheck(name=name, limit=of_mean, low=low, high=high, at_least=at_least)
    return ItemCheck(claim=claim, limit=share, metric=metric, task=task, category=category, gate=gate)


def check_places(checks: Sequence[ItemCheck], view: ItemTable, headline: Sequence[str]) -> None:
    """Refuse a check that is about no item of the evaluation."""
    for check in checks:
        if not len(check.rows(view, headline)):
            raise ConfigError(
                f"{check.claim.name} has no items",
                allowed=sorted(set(view.task.tolist())),
                got=check.task or "pooled",
                fix="Name a task of this evaluation, and one of its categories",
            )
