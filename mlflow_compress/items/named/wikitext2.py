"""WikiText-2: the raw test text."""

from __future__ import annotations

from mlflow_compress.items.sources.data_dir import load_split, register_corpus

DATASET = "Salesforce/wikitext"
CONFIG = "wikitext-2-raw-v1"


def read(data_dir: str, split: str = "test", task: str = "wikitext2") -> str:
    """Return the text of the original file. Its blank lines hold a space, which the hub's copy has removed."""
    lines = load_split(DATASET, CONFIG, split, data_dir=data_dir, task=task)["text"]
    return "".join(line or " \n" for line in lines)


register_corpus(
    "wikitext2",
    read,
    source=f"{DATASET}, {CONFIG}",
    licence="CC BY-SA 3.0",
    items="test text",
    definition=f"{DATASET} {CONFIG} test",
)
