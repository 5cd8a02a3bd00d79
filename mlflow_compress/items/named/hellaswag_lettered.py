"""HellaSwag as lettered multiple choice. The wording of the question is ours, because the data set has none.

The validation split is used, because the test answers are not public.
"""

from __future__ import annotations

import re
from typing import Any

from mlflow_compress.items.sources.hub_choice import Record, Source, register

QUESTION = "Which of these is the most likely continuation?"


def without_marks(text: str) -> str:
    """Return a text without WikiHow's marks ("[header]", "[title]" ...), as in lm-evaluation-harness's hellaswag."""
    cleaned = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return cleaned.replace("  ", " ")


def question(record: Record) -> dict[str, Any]:
    """Return the question: activity and beginning are the passage, the four endings are the options."""
    beginning = f"{record['activity_label']}: {record['ctx_a']} {record['ctx_b'].capitalize()}"
    return {
        "kind": "CI",
        "context": without_marks(beginning),
        "question": QUESTION,
        "choices": [without_marks(ending) for ending in record["endings"]],
        "answer": int(record["label"]),
    }


register(
    "hellaswag_lettered",
    Source(dataset="Rowan/hellaswag", test="validation", category="common sense", question=question),
    licence="MIT",
    items="10,042 validation (each also with the options E and F)",
)
