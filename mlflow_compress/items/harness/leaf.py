"""A leaf task of the harness with the documents that were drawn from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Document:
    """One document of a leaf task with what is asked about it.

    Attributes
    ----------
    item_id : str
    doc : object
        The document as the harness's task knows it.
    instances : list
        The harness's requests, by option.
    """

    item_id: str
    doc: Any
    instances: list[Any]


@dataclass(frozen=True)
class Leaf:
    """A leaf task with its documents.

    Attributes
    ----------
    name : str
        The harness's name for it.
    records : str
        Task name in our records: that of the group where its tasks make one table, else its own.
    task : object
        The harness's task.
    documents : list of Document
    kind : str
        "options", "answer" or "rolling".
    """

    name: str
    records: str
    task: Any
    documents: list[Document]
    kind: str
