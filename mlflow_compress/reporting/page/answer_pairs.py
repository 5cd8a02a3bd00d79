"""The answers of baseline and variants to the same instructions, laid out for the page."""

from __future__ import annotations

import math
from typing import Any

from mlflow_compress.records import Generations, Judgments
from mlflow_compress.reporting.page.page_content import PageContent

MOST_CHARACTERS = 4_000_000
"""Most characters of variants' answers on a page; the rest stays in the runs, and the page says how many."""

JUDGE = "mt_bench"
"""The judge whose grades stand beside the answers: the task of its judgments."""

_Key = tuple[str, int]


def answer_data(content: PageContent) -> dict[str, Any] | None:
    """Return the answers as values for JSON; None where there are none.

    `prompts` is one ``[id, turn, prompt, baseline's answer, baseline's grade]`` per answered turn. `variants` has,
    by name, one ``[answer, grade]`` per prompt. A grade is the mean over the judge's repeats, None without any. `total`
    counts the prompts that were answered; those beyond `MOST_CHARACTERS` are left out.
    """
    answered = [v for v in content.variants if v.answers is not None]
    if content.answers is None or not answered:
        return None
    baseline, grades = _texts(content.answers), _grades(content.grades)
    prompts = _texts(content.answers, "prompt")
    texts = {v.name: (_texts(v.answers), _grades(v.grades)) for v in answered if v.answers is not None}
    shown: list[_Key] = []
    used = 0
    for key in baseline:
        used += sum(len(found.get(key) or "") for found, _ in texts.values())
        if shown and used > MOST_CHARACTERS:
            break
        shown.append(key)
    return {
        "total": len(baseline),
        "prompts": [[*key, prompts[key], baseline[key], grades.get(key)] for key in shown],
        "variants": {name: [[found.get(k), graded.get(k)] for k in shown] for name, (found, graded) in texts.items()},
    }


def _keys(records: Generations | Judgments) -> list[_Key]:
    return list(zip(*(records.table.column(name).to_pylist() for name in ("item_id", "turn")), strict=True))


def _texts(generations: Generations, column: str = "text") -> dict[_Key, str | None]:
    first = generations.where(sample=0)
    return dict(zip(_keys(first), first.table.column(column).to_pylist(), strict=True))


def _grades(judgments: Judgments | None) -> dict[_Key, float]:
    """Return the mean grade of each answer over the judge's repeats; an answer without a readable grade has none."""
    if judgments is None:
        return {}
    own = judgments.where(task=JUDGE)
    found: dict[_Key, list[float]] = {}
    for key, score in zip(_keys(own), own.table.column("score").to_pylist(), strict=True):
        if score is not None and not math.isnan(score):
            found.setdefault(key, []).append(score)
    return {key: sum(scores) / len(scores) for key, scores in found.items()}
