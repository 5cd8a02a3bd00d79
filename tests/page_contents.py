"""The content of a page over variants, from a few records by hand."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mlflow_compress.decide.gates import standard_gates
from mlflow_compress.decide.promotion import Candidate, decide
from mlflow_compress.decide.scoreboard import Scoreboard, ScoredVariant, scoreboard
from mlflow_compress.metrics.conscompf import ModelSimilarity, model_similarity
from mlflow_compress.records import (
    Generations,
    Items,
    Judgments,
    MetricResult,
    OptionDistances,
    OptionScores,
    RunRecords,
)
from mlflow_compress.reporting.page.page_content import PageContent, PageVariant, changes_of
from mlflow_compress.reporting.page.variants_page import gate_texts
from tests.metric_records import generations_of, score_of
from tests.scored_variants import scores, variant

HOSTILE = "</script><script>window.alarm=1</script><img src=x onerror=window.alarm=2>"
EXAMPLES = "Two examples\n\nQ: x\nA: y\n\n"

# The odds of the two options of each question. The first is right in all of them.
ODDS = {"baseline": ((3, 1), (1, 1.5), (9, 1)), "near": ((3, 1), (1, 1), (9, 1)), "far": ((1, 4), (3, 1), (1, 3))}


def items(text: str = "why") -> Items:
    """Return three questions with two options, and one that is answered freely."""
    common = {"task": "choice", "family": "lettered", "rule": "loglik", "category": "animals", "answers": None}
    rows = [
        {**common, "item_id": f"c{i}", "question": text, "prompt": f"{EXAMPLES}Q: {i} {text}", "options": [text, "no"]}
        for i in range(3)
    ]
    free = {"task": "free", "family": "exact", "rule": "exact_match", "category": None, "options": None, "gold": None}
    return Items.from_rows(
        [
            *({**row, "gold": 0} for row in rows),
            {**free, "item_id": "f0", "question": "2 + 2", "prompt": "2 + 2", "answers": ["4"]},
        ]
    )


def records(model: str, answer: str, text: str = "why") -> RunRecords:
    """Return what a model scored on `items`."""
    rows = [
        score_of(f"c{i}", option, math.log(odds), task="choice")
        for i, pair in enumerate(ODDS[model])
        for option, odds in enumerate(pair)
    ]
    key = ("task", "item_id", "permutation", "option")
    kl = dict.fromkeys(("kl", "kl_reverse", "js", "tv", "same_top", "top10", "rbo10"), 0.125)
    return RunRecords(
        items=items(text),
        option_scores=OptionScores.from_rows(rows),
        option_distances=OptionDistances.from_rows([{**{name: row[name] for name in key}, **kl} for row in rows]),
        generations=answers("free", ["f0"], [answer]),
    )


def answers(task: str, ids: Sequence[str], texts: Sequence[str]) -> Generations:
    """Return one generated answer per id."""
    return generations_of({i: [text] for i, text in zip(ids, texts, strict=True)}, task=task, prompt="asked")


def grades(score: float) -> Judgments:
    """Return one grade."""
    row = {"task": "mt_bench", "item_id": "i1", "turn": 0, "repeat": 0, "category": "math"}
    return Judgments.from_rows([{**row, "score": score, "judgment": "fine", "judge": "test"}])


def similarity(text: str = "why") -> ModelSimilarity:
    """Return how alike four models answer: of two instructions, "far" answers one in another direction."""
    same = np.array([[[1.0, 0.0], [1.0, 0.2]], [[0.0, 1.0], [0.1, 1.0]]])
    models = {"baseline": same, "baseline, second sample": same[:, ::-1], "near": same * [1.0, 1.1]}
    return model_similarity(
        {**models, "far": same * [[[-1.0, 1.0]], [[1.0, 1.0]]]},
        encoder=f"MiniLM {text}",
        left_out={"other": f"of {text}"},
    )


def page_content(text: str = "why") -> PageContent:
    """Return a page of two variants: one changed an answer, the other one three."""
    baseline = records("baseline", "4", text)
    made = {name: records(name, "4" if name == "near" else text, text) for name in ("near", "far")}
    scored, shown, candidates = [], [], []
    for number, (name, own) in enumerate(made.items()):
        kl, flips = 0.01 + 0.2 * number, 1.0 + 20 * number
        results = [
            MetricResult("distance/kl_mean", kl, kl / 2, 2 * kl, n=3),
            MetricResult("distance/kl_clipped_mean", kl, kl / 2, 2 * kl, n=3),
            MetricResult("distance/kl_above_clip_pct", 0.0, 0.0, 0.9, n=3),
            MetricResult("distance/flips_pct", flips, flips / 2, flips * 2, n=4),
            MetricResult("quality/accuracy_delta", -0.15 * number, -0.3 * number - 0.005, 0.005 - 0.1 * number, n=4),
            MetricResult("distance/flips_pct", flips, flips / 2, flips * 2, n=3, task="choice", category="animals"),
            MetricResult(
                "distance/worst_slice_flips_pct",
                2 * flips,
                flips,
                3 * flips,
                n=2,
                task="choice",
                category="law",
                p=0.01,
            ),
        ]
        sizes = {"size/bytes": 4e6 - 1e6 * number, "size/ratio": 2.0 + number}
        gates = {"gate/kl_items": 3, "gate/kl_clipped_upper": 2 * kl, "gate/kl_above_clip_pct_upper": 0.3}
        gates |= {"gate/flips_pct_upper": 2 * flips}
        gates |= {"gate/accuracy_drop_pct_upper": 1.0}
        pooled = {r.name: r for r in results if r.task is None}
        scored.append(ScoredVariant(name=name, method="rtn", run_id=name * 8, results=pooled, sizes=sizes))
        shown.append(
            PageVariant(
                name=name,
                verdict=f"{name}: {text}",
                run_id=name * 8,
                address=f"http://127.0.0.1:5000/#/{name}",
                results=results,
                settings={"method": "rtn", "bits": str(8 - 4 * number)},
                changes=changes_of(baseline, own),
                answers=answers("instructions", ["i1"], [f"one {text} three"]),
                grades=grades(4.0 + number),
            )
        )
        metrics = {**{name: r.value for name, r in pooled.items()}, **sizes, **gates}
        candidates.append(Candidate(name=name, run_id="", version=None, method="rtn", metrics=metrics))
    return PageContent(
        board=scoreboard(scored, baseline="base", evaluation="e" * 16),
        decision=decide(candidates, standard_gates()),
        policy="the default policy",
        objective="size",
        gates=gate_texts(standard_gates()),
        variants=shown,
        items=baseline.items,
        answers=answers("instructions", ["i1"], ["one two three"]),
        grades=grades(9.0),
        similarity=similarity(text),
        setup={"seed": 42, "hash of task": {"choice": text}},
    )


def directed_board() -> Scoreboard:
    """Return three variants of 1,000 items: "a" is worse and tied with "b", which is not; "c" is far from both."""
    made = {"a": (0.01, 20, 3.0, -1.0, 0.8), "b": (0.01, 20, 2.0, 0.0, 0.8), "c": (0.5, 90, 12.0, -6.0, 6.5)}
    variants = []
    for number, (name, (kl, wrong, flips, change, half)) in enumerate(made.items()):
        results = [
            MetricResult("distance/kl_mean", kl, n=1000),
            MetricResult("distance/flips_pct", flips, n=1000),
            MetricResult("quality/accuracy_delta", change / 100, (change - half) / 100, (change + half) / 100, n=1000),
        ]
        noise = np.random.default_rng(number).normal(0.0, 0.001, 1000)
        right = np.roll(np.repeat([0.0, 1.0], [wrong, 1000 - wrong]), 100 * number)
        scored = variant(name, run_id=name * 8, items=scores(right.tolist(), (kl + noise).tolist()))
        variants.append(replace(scored, results={result.name: result for result in results}))
    return scoreboard(variants, baseline="base", evaluation="e" * 16)
