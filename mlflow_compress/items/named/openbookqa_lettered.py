"""OpenBookQA as lettered multiple choice, without the book's facts."""

from __future__ import annotations

from functools import partial

from mlflow_compress.items.sources.hub_choice import Source, labelled, register

register(
    "openbookqa_lettered",
    Source(
        dataset="allenai/openbookqa",
        config="main",
        test="test",
        category="science",
        question=partial(labelled, text="question_stem"),
    ),
    licence="not stated",
    items="500 test (each also with the options E and F)",
)
