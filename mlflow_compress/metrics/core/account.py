"""The account of an evaluation: what was asked, what became of it, and under what conditions."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from mlflow_compress.metrics.core.item_table import ItemTable, Predictions, is_null
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import TOO_LONG
from mlflow_compress.metrics.core.requirements import ITEMS
from mlflow_compress.metrics.core.token_groups import token_groups
from mlflow_compress.metrics.stats.arrays import Bool
from mlflow_compress.metrics.stats.intervals import FEWEST_GROUPS, effective_groups
from mlflow_compress.records import ItemKey, RunRecords

UNSCORED_PCT, CUT_PCT = "items/unscored_pct", "items/cut_pct"
"""Metrics of a run: shares of the items in percent, which policies bound."""


@dataclass(frozen=True, kw_only=True)
class Account:
    """What one evaluation was asked, and what became of it."""

    asked: int  # Items
    again: int = 0  # Of them, questions of another task that are asked again in another form: no more answers to flip
    drawn_from: int | None = None  # Items from which these were drawn by the baseline's lead; None where all were asked
    smallest_probability: float | None = None  # By which an item was drawn
    groups: int | None = None  # Groups of items that share something; None where every item stands alone
    effective_groups: int = 0  # As how many of one size these count
    unscored: Mapping[str, int] = field(default_factory=dict)  # Items without an answer of both models, by reason
    tokens: int = 0  # Tokens of running text that have a log-probability
    windows: int = 0  # Their windows, and the texts that these are from: documents, or stretches of one long text
    texts: int = 0
    effective_texts: int = 0  # As how many of one size these count
    cut: int = 0  # Items whose prompt was longer than the context, and lost its beginning
    asked_again: Mapping[str, int] = field(default_factory=dict)  # Requests to a server that were repeated, by fault
    # Under what conditions: baseline, engine, dtype, threads, processor
    setting: Mapping[str, str] = field(default_factory=dict)

    @property
    def scored(self) -> int:
        """Items with an answer of the model, and of its baseline."""
        return self.asked - sum(self.unscored.values())

    @property
    def unscored_pct(self) -> float:
        """Share of the items without a score, in percent; 0 where only running text was scored."""
        return 100.0 * (self.asked - self.scored) / self.asked if self.asked else 0.0

    @property
    def cut_pct(self) -> float:
        """Share of the items whose prompt was cut, in percent."""
        return 100.0 * self.cut / self.asked if self.asked else 0.0

    @property
    def lacking(self) -> str:
        """How many items have no score and why, as "11 of 24 items have no score (the variant gave none: 11)"."""
        n = self.asked - self.scored
        return f"{n:,} of {self.asked:,} items {'has' if n == 1 else 'have'} no score ({_listed(self.unscored)})"

    @property
    def shortened(self) -> str:
        """How many prompts were cut, as "3 of 24 prompts were cut to the context"."""
        return f"{self.cut:,} of {self.asked:,} prompts {'was' if self.cut == 1 else 'were'} cut to the model's context"

    @property
    def sentence(self) -> str:
        """All of it, in one line."""
        parts = []
        if self.asked:
            if self.drawn_from is not None:
                least = f", with probabilities from {self.smallest_probability:.2g} to 1, and weighted"
                parts.append(f"{self.asked:,} of {self.drawn_from:,} items drawn by the baseline's lead{least}")
            parts.append(self.lacking if self.unscored else f"all {self.asked:,} items scored")
            if self.again:
                parts.append(f"{self.again:,} of the items are questions asked again in another form")
            if self.groups is not None:
                few = _too_few(self.effective_groups)
                parts.append(f"they are in {self.groups:,} groups that share a text or source{few}")
            parts.append(self.shortened if self.cut else "no prompt cut")
        if self.tokens:
            texts = "1 text" if self.texts == 1 else f"{self.texts:,} texts"
            few = _too_few(self.effective_texts)
            parts.append(f"{self.tokens:,} tokens of text scored, in {self.windows:,} windows of {texts}{few}")
        if self.asked_again:
            parts.append(f"{sum(self.asked_again.values()):,} requests repeated ({_listed(self.asked_again)})")
        setting = ", ".join(f"{name} {value}" for name, value in self.setting.items())
        return f"Account: {'; '.join(parts) or 'nothing was asked'}." + (
            f" {setting[:1].upper()}{setting[1:]}." if setting else ""
        )

    def values(self) -> dict[str, float]:
        """Return what is logged as metrics of a run, and read by policies."""
        return {UNSCORED_PCT: self.unscored_pct, CUT_PCT: self.cut_pct} if self.asked else {}

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "scored": self.scored}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Account":
        return cls(**{name: value for name, value in content.items() if name != "scored"})


def _too_few(n: int) -> str:
    few = f" (no intervals: too few, as they count as {n} of one size, and {FEWEST_GROUPS} are needed)"
    return few if n < FEWEST_GROUPS else ""


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{reason}: {n:,}" for reason, n in sorted(counts.items()))


def _without_score(view: ItemTable, run: RunRecords, predictions: Predictions) -> Bool:
    """Return where an item has no score of a model, shape (n_items,)."""
    lacks = np.isin(view.family, view.graded) & ~predictions.scored[:, 0]
    if run.option_scores is not None:
        every_order = np.isin(view.family, view.families(lambda family: family.every_order))
        rows = view.locate(run.option_scores)
        null = is_null(run.option_scores, "loglik")
        lacks[rows[null & ((run.option_scores.column("permutation") == 0) | every_order[rows])]] = True
    return np.asarray(lacks, dtype=bool)


def take_account(
    inputs: MetricInputs,
    *,
    cut: Collection[ItemKey] = (),
    too_long: Collection[ItemKey] = (),
    asked_again: Mapping[str, int] | None = None,
    setting: Mapping[str, str] | None = None,
) -> Account:
    """Return the account of records: both models over one set of items.

    An item has a score where each model has one for all of its options in the original order, or in every order if it
    is scored in all, or has answered it.

    - `cut`, `too_long`: Items whose prompt lost its beginning, or of which an option alone is longer than the context.
    """
    subject = inputs.subject
    empty = Account(asked=0, asked_again=dict(asked_again or {}), setting=dict(setting or {}))
    if subject.token_scores is not None and len(subject.token_scores):
        text = token_groups(subject.token_scores)
        windows, texts = len(np.unique(text.window)), np.unique(text.document, return_counts=True)[1]
        empty = replace(empty, tokens=len(subject.token_scores), windows=windows, texts=len(texts))
        empty = replace(empty, effective_texts=effective_groups(texts))
    if ITEMS.missing(inputs) is not None:
        return empty
    view = inputs.view
    names = list(zip(view.task.tolist(), view.item_id.tolist(), strict=True))
    without = {"baseline": _without_score(view, inputs.baseline, inputs.baseline_predictions)}
    if inputs.variant is not None:
        without["variant"] = _without_score(view, inputs.variant, inputs.variant_predictions)
    reasons: Counter[str] = Counter()
    for row in np.flatnonzero(np.logical_or.reduce(list(without.values()))):
        lacking = [side for side, missing in without.items() if missing[row]]
        reasons[TOO_LONG if names[row] in too_long else f"the {' and the '.join(lacking)} gave none"] += 1
    if inputs.design is not None:
        least = float((1 / inputs.design.weight).min())
        empty = replace(empty, drawn_from=inputs.design.n_items, smallest_probability=least)
    sizes = np.unique(view.group, return_counts=True)[1]
    if len(sizes) < len(view):
        empty = replace(empty, groups=len(sizes), effective_groups=effective_groups(sizes))
    again = int(np.isin(view.family, view.families(lambda family: family.again)).sum())
    return replace(empty, asked=len(view), again=again, unscored=dict(reasons), cut=len(set(names) & set(cut)))
