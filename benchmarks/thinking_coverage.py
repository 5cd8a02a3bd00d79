"""How often intervals of answers behind a thought hold the truth, and how often a loss is seen.

Questions have difficulties of Beta(0.5, 0.5), so most are nearly sure, and lengths of their own. The variant loses a
share of its right answers, is 1.3 times as long, and has the random numbers of the baseline's second sampling, as where
answers are generated. A variant soon parts from the baseline and then has luck of its own: "own luck" is the difference
from the first sampling, with which it shares none. A wrong answer had the right one on the way with a probability that
is the question's own, 0.3 on average. Intervals are of 95 %; a share over 2,000 draws has a standard error of 0.5
points there. It prints tables in Markdown.

    python -m benchmarks.thinking_coverage --draws 2000
"""

import argparse
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
from scipy.stats import chi2_contingency, ttest_ind

from mlflow_compress.config.policy import MetricGate, Policy
from mlflow_compress.decide import item_checks as item_checks_module
from mlflow_compress.decide.item_checks import item_checks
from mlflow_compress.metrics import MetricInputs, headline, thinking, thought_length
from mlflow_compress.metrics.core.estimates import Estimates, pooled
from mlflow_compress.metrics.core.metric_registry import METRICS
from mlflow_compress.metrics.stats.sequential import p_values, verdicts
from mlflow_compress.metrics.thinking import DrawnAnswers, ThinkingModels
from mlflow_compress.records import MetricResult, RunRecords

LONGER, FOUND, MOST = 1.3, 0.3, 2000.0  # Nobody has drawn as many tokens as the last
NAMES = {
    "pass_at_1_delta": "difference",
    "own_luck": "the same, own luck",
    "flips_pct": "flips",
    "length_ratio": "length ratio",
    "found_and_lost_pct": "found and lost",
    "tokens_per_right_ratio": "tokens to a right answer, ratio",
}


def drawn(rng: np.random.Generator, n: int, k: int, loss: float, struck: float = 1.0) -> ThinkingModels:
    """Return k answers of both models to each of n questions; the loss falls on a share `struck` of these."""
    p, found = rng.beta(0.5, 0.5, (n, 1)), rng.beta(3.0, 7.0, (n, 1))
    u = rng.random((2, n, k))
    lost = loss if struck == 1.0 else loss * (rng.random((n, 1)) < struck)
    right = [u[0] < p, u[1] < p, u[1] < (1.0 - lost) * p]
    tokens = (
        rng.lognormal(0.0, 0.3, (n, 1))
        * rng.lognormal(4.0, 0.4, (3, n, k))
        * np.array([1.0, 1.0, LONGER])[:, None, None]
    )
    no = np.zeros((n, k), dtype=bool)
    parts = [
        DrawnAnswers(
            read=[["1" if one else "0" for one in row] for row in of],
            right=of.astype(np.float64),
            tokens=lengths,
            hesitations=no * 1.0,
            cut=no,
            unclosed=no,
            loops=no,
            found=rng.random((n, k)) < found,
            found_another=no,
        )
        for of, lengths in zip(right, tokens, strict=True)
    ]
    return ThinkingModels(np.arange(n), *parts)


def results(models: ThinkingModels, *names: str) -> dict[str, MetricResult]:
    """Return the pooled results of both metrics that have these names."""
    given = MetricInputs(RunRecords(), RunRecords())

    def some(inputs: MetricInputs, estimates: Estimates) -> list[MetricResult]:
        wanted = {key: x for key, x in estimates.items() if key.name.removeprefix("reasoning/") in names}
        return pooled(inputs, wanted)

    with ExitStack() as stack:
        for module in (thinking, thought_length):
            stack.enter_context(patch.object(module, "thinking_models", lambda _: models))
            stack.enter_context(patch.object(module, "pooled", some))
        both = [METRICS.get(name) for name in ("thinking", "thought_length")]
        asked = [one for one in both if any(key.name.removeprefix("reasoning/") in names for key in one.keys)]
        found = [result for one in asked for result in one.compute(given)]
    return {name.removeprefix("reasoning/"): result for name, result in headline(found).items()}


def coverage(n: int, k: int, loss: float, draws: int, struck: float = 1.0) -> dict[str, float]:
    """Return the share of draws whose interval holds the truth, and of those that see a change, in percent."""
    rng = np.random.default_rng([11, n, k, round(1000 * loss)])
    # E[p] = 1/2 and E[p^2] = 3/8 of this Beta.
    truth = {"pass_at_1_delta": -struck * loss / 2, "own_luck": -struck * loss / 2}
    truth |= {
        "flips_pct": 100.0 * struck * loss**2 * 3 / 8,
        "length_ratio": LONGER,
        "found_and_lost_pct": 100.0 * FOUND,
    }
    truth["tokens_per_right_ratio"] = LONGER / (1.0 - struck * loss)
    shares = dict.fromkeys([*truth, "seen", "seen_own_luck", "seen_questions_apart", "seen_answers_apart"], 0)
    for _ in range(draws):
        models = drawn(rng, n, k, loss, struck)
        found = results(models, *truth)
        turned = replace(models, first=models.again, again=models.first)
        found["own_luck"] = results(turned, "pass_at_1_delta")["pass_at_1_delta"]
        for name, value in truth.items():
            low, high = found[name].low, found[name].high
            shares[name] += low is not None and high is not None and low <= value <= high
        for name, of in (("seen", "pass_at_1_delta"), ("seen_own_luck", "own_luck")):
            low, high = found[of].low, found[of].high
            assert low is not None and high is not None
            shares[name] += not low <= 0.0 <= high
        ours, theirs = models.first.share_right, models.variant.share_right
        shares["seen_questions_apart"] += bool(ttest_ind(ours, theirs).pvalue < 0.05)
        counts = [[one.sum() * k, (1.0 - one).sum() * k] for one in (ours, theirs)]
        shares["seen_answers_apart"] += bool(chi2_contingency(counts, correction=False).pvalue < 0.05)
    return {name: 100.0 * hits / draws for name, hits in shares.items()}


def gates(n: int, k: int, loss: float, draws: int, limits_of: float | None = None) -> tuple[float, float, float]:
    """Return the share of gates that pass a check and that fail one, in percent, and the questions used by the latter.

    Each looks after every 20 questions, at an error of 5 %. Its four limits are what a variant has that loses
    `limits_of` of its right answers: by default the very loss that it has, so that every verdict is an error.
    """
    of = loss if limits_of is None else limits_of
    limits = {"pass_at_1_delta": -of / 2, "flips_pct": 100.0 * of**2 * 3 / 8, "length_ratio": LONGER}
    limits["found_and_lost_pct"] = 100.0 * FOUND
    entries = [
        MetricGate.model_validate(
            {"metric": f"reasoning/{name}", "at_least" if name == "pass_at_1_delta" else "at_most": limit}
        )
        for name, limit in limits.items()
    ]
    checks = item_checks(Policy(kl=None, margins=(), gates=tuple(entries)))
    claims = [
        replace(one.claim, low=MOST * one.claim.low, high=MOST * one.claim.high)
        if "length" in one.metric
        else one.claim
        for one in checks
    ]
    rng, passed, failed, used = np.random.default_rng(12), 0, 0, []
    given: Any = SimpleNamespace(view=SimpleNamespace(family=np.full(n, thinking.THINKING)))
    for _ in range(draws):
        models = drawn(rng, n, k, loss)
        with patch.object(item_checks_module, "thinking_models", lambda _, models=models: models):
            values = [one.values(given)[0] for one in checks]
        paths = [p_values(claim, x, error=0.05, n_checks=4) for claim, x in zip(claims, values, strict=True)]
        looks = [verdicts([w[t] for w, _ in paths], [r[t] for _, r in paths], error=0.05) for t in range(19, n, 20)]
        passed += any("pass" in look for look in looks)
        first = next((20 * (at + 1) for at, look in enumerate(looks) if "fail" in look), None)
        failed += first is not None
        used += [first] if first is not None else []
    return 100.0 * passed / draws, 100.0 * failed / draws, float(np.mean(used)) if used else np.nan


def row(*cells: object) -> None:
    """Print one row of a table."""
    print("|", " | ".join(f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in cells), "|", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=2000)
    draws = parser.parse_args().draws
    row("questions", "answers", "lost, %", *NAMES.values())
    row(*["---"] * (3 + len(NAMES)))
    told = []
    for n, k, loss in [(n, k, loss) for n in (40, 200) for k in (4, 8, 16) for loss in (0.0, 0.03, 0.1, 0.3)]:
        shares = coverage(n, k, loss, draws)
        row(n, k, round(100 * loss), *(shares[name] for name in NAMES))
        told += [(n, k, loss, shares)] if loss == 0.0 else []
    for n, k, struck in [(n, k, struck) for n in (40, 200) for k in (4, 8, 16) for struck in (0.05, 0.1)]:
        shares = coverage(n, k, 1.0, draws, struck)
        row(n, k, f"{100 * struck:.0f}, whole questions", *(shares[name] for name in NAMES))
    print()
    row(
        "questions",
        "answers",
        "lost, %",
        "seen",
        "own luck",
        "t test of unpaired questions",
        "chi² of unpaired answers",
    )
    row(*["---"] * 7)
    for n, k, loss, shares in [*told, (200, 8, 0.06, coverage(200, 8, 0.06, draws))]:
        row(n, k, round(100 * loss), *(share for name, share in shares.items() if name.startswith("seen")))
    print()
    row("questions", "answers", "lost, %", "gates that pass", "gates that fail", "questions used")
    row(*["---"] * 6)
    for n, k, loss, limits_of in [(n, k, 0.1, None) for n in (40, 200) for k in (4, 8, 16)] + [(200, 8, 0.3, 0.04)]:
        row(n, k, round(100 * loss), *gates(n, k, loss, draws, limits_of))
