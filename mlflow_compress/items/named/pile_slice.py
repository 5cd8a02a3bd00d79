"""A slice of the Pile's validation text, of the same size as the slice of C4. No paper defines one.

(The harness's own tasks `pile_*` score complete documents of the test text.)
"""

from __future__ import annotations

from mlflow_compress.items.named.c4_slice import DOCUMENTS, TOKENS
from mlflow_compress.items.sources.data_dir import load_split, register_corpus

DATASET = "mit-han-lab/pile-val-backup"  # AutoAWQ's calibration set


def read(data_dir: str) -> str:
    """Return the documents, joined with spaces."""
    found = load_split(DATASET, None, "validation", data_dir=data_dir, task="pile_slice")
    return " ".join(found[:DOCUMENTS]["text"])


register_corpus(
    "pile_slice",
    read,
    source=DATASET,
    licence="not stated",
    items=f"first {DOCUMENTS:,} documents of validation, {TOKENS:,} tokens",
    definition=f"{DATASET} validation first {DOCUMENTS} documents, blanks, {TOKENS} tokens",
    max_tokens=TOKENS,
)
