"""The flips family: what changed between two models' answers, even where accuracy did not."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mlflow_compress.errors import DataError
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import METRICS, MetricKey, metric
from mlflow_compress.metrics.stats.arrays import same_length
from mlflow_compress.metrics.stats.intervals import wilson
from mlflow_compress.metrics.stats.significance import mcnemar_exact
from mlflow_compress.records import MetricResult


@dataclass(frozen=True, kw_only=True)
class Flips:
    """Counts of changed answers.

    Attributes
    ----------
    n, n_correct : int
        Items compared, and those that the baseline has right.
    c2w, w2c : int
        Right to wrong, wrong to right.
    w2w : int or None
        Wrong to another wrong answer; None where answers are not chosen from options.
    """

    n: int
    n_correct: int
    c2w: int
    w2c: int
    w2w: int | None

    @property
    def flips(self) -> float:
        """``(c2w + w2c)/n``, a share."""
        return (self.c2w + self.w2c) / self.n

    @property
    def all_flips(self) -> float | None:
        """``(c2w + w2c + w2w)/n``, a share; None where `w2w` is."""
        return None if self.w2w is None else (self.c2w + self.w2c + self.w2w) / self.n

    @property
    def accuracy_delta(self) -> float:
        """``(w2c - c2w)/n``, a share; never larger in size than `flips`."""
        return (self.w2c - self.c2w) / self.n

    @property
    def mcnemar_p(self) -> float:
        """Exact McNemar p-value of `c2w` against `w2c`."""
        return mcnemar_exact(self.c2w, self.w2c)


def count_flips(
    correct_baseline: npt.ArrayLike,
    correct_variant: npt.ArrayLike,
    answer_baseline: npt.ArrayLike | None = None,
    answer_variant: npt.ArrayLike | None = None,
) -> Flips:
    """Count the transitions between two models' answers to the same items.

    ``c2w = #(c_b & !c_q)``, ``w2c = #(!c_b & c_q)``, ``w2w = #(!c_b & !c_q & a_b != a_q)``.

    Parameters
    ----------
    correct_baseline, correct_variant : array_like of bool, shape (n,)
        Whether each model is right.
    answer_baseline, answer_variant : array_like, shape (n,), optional
        Each model's answer; without them `w2w` and `all_flips` are None.

    References
    ----------
    Dutta et al., "Accuracy is Not All You Need", section 2 and table 2.

    Examples
    --------
    >>> count_flips([1, 1, 0, 0], [1, 0, 1, 0], list("AABC"), list("ABAD")).all_flips
    0.75
    """
    b, q = np.asarray(correct_baseline, dtype=bool), np.asarray(correct_variant, dtype=bool)
    n = same_length(correct_baseline=b, correct_variant=q)
    if n == 0:
        raise DataError("Flips of no items are undefined", fix="Compare at least one item")
    if (answer_baseline is None) != (answer_variant is None):
        raise DataError("Give the answers of both models or of neither")
    w2w = None
    if answer_baseline is not None and answer_variant is not None:
        a_b, a_q = np.asarray(answer_baseline), np.asarray(answer_variant)
        same_length(correct_baseline=b, answer_baseline=a_b, answer_variant=a_q)
        w2w = int((~b & ~q & (a_b != a_q)).sum())
    return Flips(n=n, n_correct=int(b.sum()), c2w=int((b & ~q).sum()), w2c=int((~b & q).sum()), w2w=w2w)


def _key(name: str, meaning: str) -> MetricKey:
    return MetricKey(name=f"distance/{name}", direction="lower", low=0.0, high=100.0, unit="percent", meaning=meaning)


@METRICS.register("flips")
@metric(
    keys=(
        _key(
            "flips_pct",
            "Items whose correctness changed, either way; pooled over multiple choice, or all items where none is.",
        ),
        _key("all_flips_pct", "Multiple-choice items whose answer changed, between wrong answers too."),
        _key("c2w_pct", "Items that went from right to wrong."),
        _key("w2c_pct", "Items that went from wrong to right."),
        _key("w2w_pct", "Items that went from one wrong answer to another."),
        _key("changed_correct_pct", "Among items that the baseline has right, those that the variant has wrong."),
        _key("changed_incorrect_pct", "Among items that the baseline has wrong, those with another answer."),
    ),
    requires=("items", "variant", "predictions"),
    source="Accuracy is Not All You Need, sections 2 and 5, table 2",
)
def flips(inputs: MetricInputs) -> list[MetricResult]:
    """All transitions in percent with Wilson intervals; `all_flips` and what needs answers only for multiple choice."""
    view, both = inputs.view, inputs.scored_by_both
    b, q = inputs.baseline_predictions, inputs.variant_predictions
    level = inputs.settings.level
    results = []
    for subset in inputs.subsets(inputs.view.graded, pooled=inputs.headline_families):
        rows = subset.rows[both[subset.rows]]
        if not len(rows):
            continue
        answers = (b.content[rows, 0], q.content[rows, 0]) if view.chooses[rows].all() else (None, None)
        found = count_flips(b.correct[rows, 0], q.correct[rows, 0], *answers)
        counts = {
            "flips_pct": (found.c2w + found.w2c, found.n),
            "c2w_pct": (found.c2w, found.n),
            "w2c_pct": (found.w2c, found.n),
            "changed_correct_pct": (found.c2w, found.n_correct),
        }
        if found.w2w is not None:
            counts["all_flips_pct"] = (found.c2w + found.w2c + found.w2w, found.n)
            counts["w2w_pct"] = (found.w2w, found.n)
            counts["changed_incorrect_pct"] = (found.w2c + found.w2w, found.n - found.n_correct)
        for name, (count, n) in counts.items():
            # Categories carry the two headline rates only: 57 subjects times seven rates help nobody.
            if n == 0 or (subset.category is not None and name not in ("flips_pct", "all_flips_pct")):
                continue
            low, high = wilson(count, n, level=level)
            results.append(
                subset.result(
                    f"distance/{name}",
                    100.0 * count / n,
                    (100.0 * low, 100.0 * high),
                    n=n,
                    level=level,
                    n_unscored=len(subset.rows) - len(rows),
                )
            )
    return results
