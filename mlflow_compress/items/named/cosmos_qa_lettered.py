"""CosmosQA as lettered multiple choice. The validation split is used, because the test answers are not public.

The hub's copy is a script, which current versions of `datasets` do not run. Its Parquet files are in another revision.
The original files train.csv and valid.csv can be used instead.
"""

from __future__ import annotations

from typing import Any

from mlflow_compress.items.sources.hub_choice import Record, Source, register


def question(record: Record) -> dict[str, Any]:
    """Return the story as the passage, and the four answers."""
    return {
        "kind": "RC",
        "context": record["context"],
        "question": record["question"],
        "choices": [record[f"answer{number}"] for number in range(4)],
        "answer": int(record["label"]),
    }


register(
    "cosmos_qa_lettered",
    Source(
        dataset="allenai/cosmos_qa",
        revision="refs/convert/parquet",
        test="validation",
        category="everyday life",
        question=question,
    ),
    licence="CC BY 4.0",
    items="2,985 validation (each also with the options E and F)",
)
