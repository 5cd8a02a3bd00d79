"""CosmosQA with letters. Its test answers are not public.

The hub's copy is a script, which no current `datasets` runs; its Parquet files lie in another revision. The original
train.csv and valid.csv do as well.
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
    items="2,985 validation (twice: with E and F too)",
)
