"""Answers behind a thought: how often each model is right, how much of that moved, and which questions it lost."""

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from math import comb
from typing import Any

import numpy as np
from scipy.stats import fisher_exact

from mlflow_compress.errors import AlignmentError
from mlflow_compress.metrics.core.estimates import Estimate, Mean, PairedDifference, Proportion, Resampled, pooled
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import MetricKey, keys_of, metric
from mlflow_compress.metrics.core.requirements import GENERATIONS, ITEMS, VARIANT, family
from mlflow_compress.metrics.health import loop_period
from mlflow_compress.metrics.hesitation import marker_starts
from mlflow_compress.metrics.stats.arrays import Bool, Float, Int
from mlflow_compress.metrics.stats.bootstrap import difference_of, first_column
from mlflow_compress.metrics.stats.significance import benjamini_hochberg
from mlflow_compress.reasoning import agree, conclusions, parted, read_answer, read_gold, stays_in_thought
from mlflow_compress.records import Generations, MetricResult

THINKING = "thinking"
ANSWERED_PROBLEMS = (ITEMS, VARIANT, GENERATIONS, family(THINKING))
_FLAGS = ("cut", "unclosed", "loops", "found", "found_another")
_LOOP_WITHIN = 8000  # last characters of a cut answer
_FALSE_DISCOVERIES = 0.05  # Of the questions that are called lost or won, at most this share on average


@dataclass(frozen=True, eq=False)
class DrawnAnswers:
    """What k drawn answers to each of n questions are; every array has shape (n, k)."""

    read: list[list[str | None]]  # In a form in which equal answers are equal; None where there is none
    right: Float  # 1 or 0; NaN where an answer cannot be read. One that is cut in its thought, or empty, is 0
    tokens: Float
    hesitations: Float  # Hesitation markers in the thought
    cut: Bool  # At the token limit
    unclosed: Bool  # The thought does not end
    loops: Bool  # Cut at the token limit, while a span was repeated until the end
    found: Bool  # The thought concludes the right answer somewhere
    found_another: Bool  # It concludes the right answer of another question

    @property
    def share_right(self) -> Float:
        """Of the answers that can be read, per question, shape (n,); NaN where there is none."""
        n = self.n_read
        share = np.full(len(n), np.nan)
        np.divide(np.nansum(self.right, axis=1), n, out=share, where=n > 0)
        return share

    @property
    def n_read(self) -> Int:
        return np.asarray(np.isfinite(self.right).sum(axis=1), dtype=np.int64)


@dataclass(frozen=True)
class ThinkingModels:
    """The baseline's two samplings and the variant's, which is drawn with the random numbers of the second."""

    rows: Int  # Of the questions, among the items; shape (n,)
    first: DrawnAnswers
    again: DrawnAnswers
    variant: DrawnAnswers

    @property
    def groups(self) -> Int:
        """Number of each answer's question, for arrays that are flattened; shape (n * k,)."""
        n, k = self.variant.right.shape
        return np.repeat(np.arange(n), k)


def thinking_models(inputs: MetricInputs) -> ThinkingModels:
    """Return what both models answered, read once; an answer that is not there is an `AlignmentError`."""
    return inputs.once("answers to problems", lambda: _thinking_models(inputs))


def _thinking_models(inputs: MetricInputs) -> ThinkingModels:
    view = inputs.view
    rows = np.flatnonzero(view.family == THINKING)
    assert inputs.variant is not None and inputs.variant.generations is not None
    assert inputs.baseline.generations is not None  # `requires` has been checked
    theirs = inputs.variant.generations.where(task=set(view.task[rows]))
    k = int(theirs.column("sample").max(initial=0))
    if k == 0:
        raise AlignmentError("The questions have no drawn answers", fix="Evaluate with thinking_samples of 2 or more")
    ours = inputs.baseline.generations
    return ThinkingModels(
        rows, _read(inputs, rows, ours, 1, k), _read(inputs, rows, ours, k + 1, k), _read(inputs, rows, theirs, 1, k)
    )


def _read(inputs: MetricInputs, rows: Int, answers: Generations, start: int, k: int) -> DrawnAnswers:
    view = inputs.view
    drawn = answers.where(task=set(view.task[rows]), turn=0, sample=tuple(range(start, start + k)))
    place = {int(row): number for number, row in enumerate(rows)}
    at = [place[int(row)] for row in view.locate(drawn)]
    if len(at) != len(rows) * k:
        raise AlignmentError("Answers with thoughts are missing", allowed=f"{k} drawn answers per question")
    rules = view.rule[rows].tolist()
    known = view.items.table.column("answers").take(rows).to_pylist()
    golds = [read_gold(gold, rule) for (gold, _), rule in zip(known, rules, strict=True)]
    others = [
        next((g for g in [*golds[n + 1 :], *golds[:n]] if not agree(gold, g, rules[n])), None)
        for n, gold in enumerate(golds)
    ]
    read: list[list[str | None]] = [[None] * k for _ in rows]
    right, tokens, hesitations = np.full((len(rows), k), np.nan), np.zeros((len(rows), k)), np.zeros((len(rows), k))
    flags = {name: np.zeros((len(rows), k), dtype=bool) for name in _FLAGS}
    columns = ("sample", "prompt", "text", "n_tokens")
    for n, row in zip(at, drawn.table.select(columns).to_pylist(), strict=True):
        cell = n, row["sample"] - start
        thought, answer = parted(row["prompt"], row["text"])
        own = read_answer(answer, rules[n]) if answer else None
        is_right = agree(golds[n], own, rules[n])
        read[n][cell[1]] = golds[n] if is_right else own  # a formula can be written in several ways
        if own is not None or not answer:
            right[cell] = is_right
        tokens[cell] = row["n_tokens"]
        hesitations[cell] = len(marker_starts(thought))
        concluded = set(conclusions(thought, rules[n]))
        flags["cut"][cell] = row["n_tokens"] >= int(known[n][1])
        # Longer periods than a third of this are not looked for: an answer has 100,000 characters and more.
        flags["loops"][cell] = flags["cut"][cell] and loop_period(row["text"][-_LOOP_WITHIN:]) is not None
        flags["unclosed"][cell] = not answer and stays_in_thought(row["prompt"], row["text"])
        for name, sought in (("found", golds[n]), ("found_another", others[n])):
            flags[name][cell] = any(agree(sought, one, rules[n]) for one in concluded)
    return DrawnAnswers(read=read, right=right, tokens=tokens, hesitations=hesitations, **flags)


def pass_at_k(right: int, n: int, k: int) -> float:
    """Return the unbiased estimate of the probability that one of k answers is right, from n answers, n >= k.

    ``1 - C(n - c, k)/C(n, k)`` with c right ones: the share of the sets of k answers that hold a right one.

    Source: Chen et al., "Evaluating Large Language Models Trained on Code", arXiv 2107.03374.
    """
    return 1.0 - comb(n - right, k) / comb(n, k)


def _majority_right(answers: list[str | None], right: Float) -> float:
    """Return whether the most frequent answer is right, from the answers of one question; NaN where none is there.

    Of several that are equally frequent one is drawn: the value is the share of them that is right.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0 if np.isfinite(right).any() else np.nan
    most = [answer for answer, n in votes.items() if n == max(votes.values())]
    won = {answer for answer, one in zip(answers, right, strict=True) if one == 1.0}
    return len(won.intersection(most)) / len(most)


def squared_change(first: DrawnAnswers, second: DrawnAnswers) -> Float:
    """Return the unbiased estimate of ``(p2 - p1)^2`` per question, shape (n,); NaN with fewer than two answers.

    ``(c1/n1 - c2/n2)^2`` is too large by the variances of both shares, for which ``p (1 - p)/(n - 1)`` is unbiased:
    they are taken off. So one question's estimate can be negative. It needs answers that are independent of each other.
    """
    parts = []
    for one in (first, second):
        n = np.where(one.n_read >= 2, one.n_read, np.nan)
        parts.append(one.share_right * (1.0 - one.share_right) / (n - 1.0))
    return np.asarray((second.share_right - first.share_right) ** 2 - parts[0] - parts[1])


@lru_cache(maxsize=4096)
def _fisher(right: int, n: int, other_right: int, other_n: int) -> float:
    return float(fisher_exact([[right, n - right], [other_right, other_n - other_right]]).pvalue)


def change_p(first: DrawnAnswers, second: DrawnAnswers) -> Float:
    """Return the p-value of "as often right" of each question, shape (n,), adjusted by Benjamini and Hochberg's rule.

    Fisher's exact test of the numbers of right answers.
    """
    counts = [(np.nansum(one.right, axis=1).astype(int).tolist(), one.n_read.tolist()) for one in (first, second)]
    return benjamini_hochberg([_fisher(*cells) for cells in zip(*counts[0], *counts[1], strict=True)])


_share = keys_of("reasoning", unit="share", high=1.0, counted="answers", on_request=True)
_percent = keys_of("reasoning", unit="percent", high=100.0, on_request=True)
_EQUAL = "the baseline's second sampling against its first, the value of an identical model."
_PASS_FLOOR = _share("pass_at_1_floor", "neither", f"The same of {_EQUAL}", low=-1.0)
_PASS_BASELINE = _share("pass_at_1_baseline", "higher", "The same of the baseline.")
PASS = _share(
    "pass_at_1",
    "higher",
    "Sampled answers of the variant that are right, with or without reasoning.",
    label="Right answers (pass@1)",
    headline=135,
    difference="reasoning/pass_at_1_delta",
    floor=_PASS_FLOOR.name,
    on_main_run=False,
)
PASS_DELTA = _share(
    "pass_at_1_delta",
    "higher",
    "Variant minus baseline; Tango's paired score interval.",
    low=-1.0,
    label="Right answers, difference",
    noticed="right answers to problems",
)

_of_questions = keys_of("reasoning", unit="share", high=1.0, on_request=True)
_PASS_K = _of_questions("pass_at_k", "higher", "Probability that one of k answers is right, k half of those drawn.")
_PASS_K_BASELINE = _of_questions("pass_at_k_baseline", "higher", "The same of the baseline.")
_PASS_K_DELTA = _of_questions("pass_at_k_delta", "higher", "Variant minus baseline.", low=-1.0)
_MAJORITY = _of_questions("majority_at_k", "higher", "Questions whose most frequent answer is right.")
_MAJORITY_BASELINE = _of_questions("majority_at_k_baseline", "higher", "The same of the baseline.")
_MAJORITY_DELTA = _of_questions("majority_at_k_delta", "higher", "Variant minus baseline.", low=-1.0)

_FLIPS_FLOOR = _percent("flips_floor_pct", "neither", f"The same of {_EQUAL}", low=-100.0)
PROBLEM_FLIPS = _percent(
    "flips_pct",
    "lower",
    "Mean squared change of the probability of being right, without the luck of sampling; of sure answers, flips.",
    low=-100.0,
    label="Flips of drawn answers",
    headline=136,
    floor=_FLIPS_FLOOR.name,
    on_main_run=False,
)
_LOST = _percent("lost_pct", "lower", "Questions that the variant answers right significantly less often.")
_WON = _percent("won_pct", "neither", "Questions that the variant answers right significantly more often.")


@metric(
    "thinking",
    keys=(
        *(PASS, _PASS_BASELINE, PASS_DELTA, _PASS_FLOOR, _PASS_K, _PASS_K_BASELINE, _PASS_K_DELTA),
        *(_MAJORITY, _MAJORITY_BASELINE, _MAJORITY_DELTA, PROBLEM_FLIPS, _FLIPS_FLOOR, _LOST, _WON),
    ),
    requires=ANSWERED_PROBLEMS,
    source="pass@k of HumanEval (arXiv 2107.03374); majority of self-consistency (arXiv 2203.11171); flips are ours",
)
def thinking(inputs: MetricInputs) -> list[MetricResult]:
    """Over k drawn answers to each of n questions; every interval is over questions, whose answers stay together.

    An answer without a value, because it cannot be read, is left out and counted; one that is cut in its thought, or
    empty, answers nothing, and is not right. Values of each model, and their difference, are of the variant and of the
    baseline's second sampling, which share their random numbers: so a change is not hidden by chance. Flips, and
    questions that were lost or won, need independent answers: they are against the baseline's first sampling.

    ``flips = 100 mean_i (p_i - q_i)^2``, see `squared_change`: where every p and q is 0 or 1 it is the share of flips.
    Questions are lost and won by Fisher's exact test with a false discovery rate of 5 % (`change_p`).

    In 2,000 simulations each (40 and 200 questions, 4, 8 and 16 answers, difficulties of Beta(0.5, 0.5); none, 3, 10
    and 30 % of the right answers lost) intervals of 95 % hold the truth in 95 to 99 % for the difference (100 % where
    both models have the same answers), in 94 to 98 % for flips, in 95 to 97 % for found and lost, and in 94 to 96 % for
    lengths and tokens to a right answer. Where 2 or 4 of 40 questions are lost whole and no other changes, flips are
    held in 82 to 93 % only (`benchmarks/thinking_coverage.py`).
    """
    models = thinking_models(inputs)
    first, again, variant, groups = models.first, models.again, models.variant, models.groups

    def share(one: DrawnAnswers) -> Proportion:
        right = one.right.ravel()
        known = np.isfinite(right)
        return replace(Proportion.of(right[known] == 1.0, groups[known], even=True), n_unscored=int((~known).sum()))

    def change(one: DrawnAnswers, other: DrawnAnswers) -> PairedDifference:
        a, b = one.right.ravel(), other.right.ravel()
        known = np.isfinite(a) & np.isfinite(b)
        moved = PairedDifference.of(a[known] == 1.0, b[known] == 1.0, groups[known], even=True)
        return replace(moved, n_unscored=int((~known).sum()))

    estimates: dict[MetricKey, Estimate] = {
        PASS: share(variant),
        _PASS_BASELINE: share(again),
        PASS_DELTA: change(again, variant),
        _PASS_FLOOR: change(first, again),
    }
    k = max(1, variant.right.shape[1] // 2)

    def of_k(one: DrawnAnswers) -> Float:
        counts = zip(np.nansum(one.right, axis=1).astype(int).tolist(), one.n_read.tolist(), strict=True)
        return np.array([pass_at_k(c, n, k) if n >= k else np.nan for c, n in counts])

    def majority(one: DrawnAnswers) -> Float:
        return np.array([_majority_right(read, right) for read, right in zip(one.read, one.right, strict=True)])

    for values, (own, base, delta) in (
        (of_k, (_PASS_K, _PASS_K_BASELINE, _PASS_K_DELTA)),
        (majority, (_MAJORITY, _MAJORITY_BASELINE, _MAJORITY_DELTA)),
    ):
        a, b = values(again), values(variant)
        estimates |= {own: Mean.of_scored(b), base: Mean.of_scored(a)}
        both = np.isfinite(a) & np.isfinite(b)
        estimates[delta] = Resampled(
            np.column_stack([a, b])[both], difference_of(first_column), n_unscored=int((~both).sum())
        )
    for key, other in ((PROBLEM_FLIPS, variant), (_FLIPS_FLOOR, again)):
        estimates[key] = Mean.of_scored(100.0 * squared_change(first, other), skewed=True)
    sure = change_p(first, variant) < _FALSE_DISCOVERIES
    worse = np.nan_to_num(variant.share_right - first.share_right) < 0.0
    estimates |= {_LOST: Proportion.of(sure & worse), _WON: Proportion.of(sure & ~worse)}
    return pooled(inputs, estimates)


def questions_table(inputs: MetricInputs) -> list[dict[str, Any]]:
    """Return one row per question: how many answers of both models are right, and whether it was surely lost or won."""
    models = thinking_models(inputs)
    items = inputs.view.items.table.take(models.rows).select(["task", "item_id", "question", "answers"]).to_pylist()
    rows = []
    for n, (item, p) in enumerate(zip(items, change_p(models.first, models.variant).tolist(), strict=True)):
        ours, theirs = (np.nan_to_num(one.share_right[n]) for one in (models.first, models.variant))
        rows.append(
            {
                **{name: item[name] for name in ("task", "item_id", "question")},
                "answer": item["answers"][0],
                "right_baseline": int(np.nansum(models.first.right[n])),
                "read_baseline": int(models.first.n_read[n]),
                "right_variant": int(np.nansum(models.variant.right[n])),
                "read_variant": int(models.variant.n_read[n]),
                "p": p,
                "change": None if p >= _FALSE_DISCOVERIES else "lost" if theirs < ours else "won",
            }
        )
    return rows
