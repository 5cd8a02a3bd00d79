"""Calibration text must not hold what the evaluation asks: what was fitted to is no fair question."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mlflow_compress.errors import DataError
from mlflow_compress.items.task import Corpus, Task

RUN = 13  # words in a row that make an overlap, as in GPT-3's contamination analysis (Brown et al. 2020, appendix C)
FEWEST = 6  # words of an item below which its wording proves nothing
PARAGRAPH = 50  # words of a corpus paragraph that must be found whole: shorter ones repeat by chance

_WORD = re.compile(r"[^\W_]+")
_LABELS = frozenset("abcdefghijklmnopqrstuvwxyz")


def words(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation and without single letters (option labels)."""
    return [word for word in _WORD.findall(text.lower()) if word not in _LABELS]


def _runs(tokens: Sequence[str]) -> Iterator[str]:
    for start in range(len(tokens) - RUN + 1):
        yield " ".join(tokens[start : start + RUN])


def item_words(task: Task) -> Iterator[tuple[str, list[str]]]:
    """Iterate over (item id, words as shown): the question, then its options in order or its answer."""
    for row in task.items.table.to_pylist():
        shown = (row["options"] or (row["answers"] or [])[:1]) if row["question"] else []
        yield row["item_id"], words(" ".join([row["question"] or "", *shown]))


@dataclass(frozen=True)
class CalibrationText:
    """Calibration text, prepared for looking things up.

    Attributes
    ----------
    runs : frozenset of str
        Every `RUN` words in a row.
    whole : str
        All words; texts are separated by line ends.
    """

    runs: frozenset[str]
    whole: str

    @classmethod
    def of(cls, texts: Sequence[str]) -> CalibrationText:
        """Prepare texts."""
        tokens = [words(text) for text in texts]
        runs = frozenset(run for text in tokens for run in _runs(text))
        return cls(runs, "\n".join(f" {' '.join(text)} " for text in tokens))

    def held_items(self, task: Task) -> list[str]:
        """Return the ids of the items that stand in the text.

        An item does when 13 words in a row of it (question, then options in the order shown, or the answer) do; when it
        has only 6 to 12 words, all of them. Case, punctuation and option letters do not count.
        """
        return [item_id for item_id, item in item_words(task) if self.holds(item)]

    def held_paragraphs(self, corpus: Corpus) -> list[str]:
        """Return the corpus's paragraphs of 50 words and more that stand in the text whole."""
        paragraphs = ((text, words(text)) for text in corpus.text.split("\n"))
        return [t for t, item in paragraphs if len(item) >= PARAGRAPH and f" {' '.join(item)} " in self.whole]

    def holds(self, item: Sequence[str]) -> bool:
        """Return whether an item, given as its words, stands in the text."""
        if len(item) >= RUN:
            return any(run in self.runs for run in _runs(item))
        return len(item) >= FEWEST and f" {' '.join(item)} " in self.whole


def check_contamination(calibration: Sequence[str], tasks: Sequence[Task], corpora: Sequence[Corpus]) -> None:
    """Refuse calibration text that holds evaluation items or paragraphs of evaluated corpora and documents.

    Raises
    ------
    DataError
        With how many of a task's items are held, and the first of them.
    """
    text = CalibrationText.of(calibration)
    for task in tasks:
        if found := text.held_items(task):
            raise _refused(f"{len(found)} of {len(task.items)} items of task {task.name!r}", found[:3])
    documents = [Corpus(name=task.name, text="\n".join(task.documents)) for task in tasks if task.documents]
    for corpus in [*corpora, *documents]:
        if same := text.held_paragraphs(corpus):
            raise _refused(f"{len(same)} paragraphs of {corpus.name!r}", [same[0][:80]])


def _refused(what: str, examples: list[str]) -> DataError:
    return DataError(
        f"The calibration text holds {what}",
        got=examples,
        fix="Calibrate on other text, or leave these items out of the evaluation",
    )
