"""WikiText-2, raw test text, scored in llama.cpp's windows."""

from __future__ import annotations

from mlflow_compress.errors import ConfigError
from mlflow_compress.tasks.base import Corpus, Parts, TaskSettings
from mlflow_compress.tasks.catalogue import TASKS, NamedTask
from mlflow_compress.tasks.data_dir import load_split

DATASET = "Salesforce/wikitext"
CONFIG = "wikitext-2-raw-v1"


def _build(settings: TaskSettings, shots: int | None) -> Parts:
    """Join the lines to the file they came from; the hub's copy has emptied its blank lines, which held a space."""
    if shots is not None:
        raise ConfigError("A corpus has no few-shot examples", got=f"wikitext2@{shots}")
    lines = load_split(DATASET, CONFIG, "test", data_dir=settings.data_dir, task="wikitext2")["text"]
    return Parts(corpora=(Corpus(name="wikitext2", text="".join(line or " \n" for line in lines)),))


TASKS.register("wikitext2")(
    NamedTask(
        source=f"{DATASET}, {CONFIG}",
        licence="CC BY-SA 3.0",
        items="test text",
        shots="",
        rule="perplexity and KL, windows of 512",
        definition=lambda: f"{DATASET} {CONFIG} test, llama.cpp windows of 512".encode(),
        build=_build,
    )
)
