"""OpenBookQA with letters, without the book."""

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
    items="500 test (twice: with E and F too)",
)
