"""The answers of baseline and variants to the same instructions, laid out for the page."""

from __future__ import annotations

from typing import Any

from mlflow_compress.records import Judgments
from mlflow_compress.reporting.answers.compared_answers import AnswerKey, first_texts, mean_grades
from mlflow_compress.reporting.page.page_content import PageContent

MOST_CHARACTERS = 4_000_000
"""Most characters of variants' answers on a page; the rest stays in the runs, and the page says how many."""


def answer_data(content: PageContent) -> dict[str, Any] | None:
    """Return the answers as values for JSON; None where there are none.

    `prompts` is one ``[id, turn, prompt, baseline's answer, baseline's grade]`` per answered turn. `variants` has,
    by name, one ``[answer, grade]`` per prompt. A grade is the mean over the judge's repeats, None without any. `total`
    counts the prompts that were answered; those beyond `MOST_CHARACTERS` are left out.
    """
    answered = [v for v in content.variants if v.answers is not None]
    if content.answers is None or not answered:
        return None
    baseline, grades = first_texts(content.answers), _grades(content.grades)
    prompts = first_texts(content.answers, "prompt")
    texts = {v.name: (first_texts(v.answers), _grades(v.grades)) for v in answered if v.answers is not None}
    shown: list[AnswerKey] = []
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


def _grades(judgments: Judgments | None) -> dict[AnswerKey, float]:
    """Return the grades of the only judge model; several are told apart in each run's report."""
    return {key: by_judge[""] for key, by_judge in mean_grades(judgments).items() if "" in by_judge}
