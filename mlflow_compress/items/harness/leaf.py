"""A leaf task of the harness with its sampled documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Document:
    """One document of a leaf task with its requests.

    Attributes
    ----------
    item_id : str
    doc : object
        The harness's document.
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
        Task name in our records: the group's, if the group becomes one task; otherwise the leaf's own.
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
