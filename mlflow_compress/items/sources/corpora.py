"""Registers named corpora: texts of data sets, scored in windows of 512 tokens as in llama.cpp."""

from __future__ import annotations

from collections.abc import Callable

from mlflow_compress.errors import ConfigError
from mlflow_compress.items.named_tasks import TASKS, NamedTask
from mlflow_compress.items.task import Corpus, Parts, TaskSettings


def register_corpus(
    name: str,
    read: Callable[[str], str],
    *,
    source: str,
    licence: str,
    items: str,
    definition: str,
    max_tokens: int | None = None,
) -> None:
    """Register a corpus under a name.

    Parameters
    ----------
    name : str
    read : callable (data_dir) -> str
        Returns the text.
    source, licence, items : str
        As in `NamedTask`.
    definition : str
        Everything that decides the text, see `NamedTask`.
    max_tokens : int, optional
        Tokens that are scored, from the beginning.
    """

    def build(settings: TaskSettings, shots: int | None) -> Parts:
        if shots is not None:
            raise ConfigError("A corpus has no few-shot examples", got=f"{name}@{shots}")
        return Parts(corpora=(Corpus(name=name, text=read(settings.data_dir), max_tokens=max_tokens),))

    TASKS.register(name)(
        NamedTask(
            source=source,
            licence=licence,
            items=items,
            shots="",
            rule="perplexity and KL, windows of 512",
            definition=f"{definition}, llama.cpp windows of 512".encode,
            build=build,
        )
    )
