"""Checks that calibration text and evaluation do not overlap."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mlflow_compress.errors import DataError
from mlflow_compress.items.task import Corpus, Task, TraceCorpus

_RUN = 13  # words in a row that make an overlap, as in GPT-3's contamination analysis (Brown et al. 2020, appendix C)
_FEWEST = 6  # an item with fewer words is not checked, because its words may occur by chance
_PARAGRAPH = 50  # a corpus paragraph with fewer words is not checked, because it may occur by chance

_WORD = re.compile(r"[^\W_]+")
_LABELS = frozenset("abcdefghijklmnopqrstuvwxyz")


def words(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation and without single letters (option labels)."""
    return [word for word in _WORD.findall(text.lower()) if word not in _LABELS]


def _runs(tokens: Sequence[str]) -> Iterator[str]:
    for start in range(len(tokens) - _RUN + 1):
        yield " ".join(tokens[start : start + _RUN])


def item_words(task: Task) -> Iterator[tuple[str, list[str]]]:
    """Yield (item id, words): those of the question, then of its options in order or of its answer."""
    for row in task.items.table.to_pylist():
        shown = (row["options"] or (row["answers"] or [])[:1]) if row["question"] else []
        yield row["item_id"], words(" ".join([row["question"] or "", *shown]))


@dataclass(frozen=True)
class CalibrationText:
    """Calibration text, prepared for searches."""

    runs: frozenset[str]  # Every sequence of `_RUN` consecutive words
    all_words: str  # All words of all texts; a line per text

    @classmethod
    def of(cls, texts: Sequence[str]) -> "CalibrationText":
        tokens = [words(text) for text in texts]
        runs = frozenset(run for text in tokens for run in _runs(text))
        return cls(runs, "\n".join(f" {' '.join(text)} " for text in tokens))

    def holds(self, item: Sequence[str]) -> bool:
        """Return whether 13 words in a row of an item occur in the text, or all of an item of 6 to 12 words."""
        if len(item) >= _RUN:
            return any(run in self.runs for run in _runs(item))
        return len(item) >= _FEWEST and f" {' '.join(item)} " in self.all_words


def check_contamination(
    calibration: Sequence[str], tasks: Sequence[Task], corpora: Sequence[Corpus | TraceCorpus]
) -> None:
    """Refuse calibration text that contains evaluation items, or paragraphs of evaluated corpora and documents.

    The baseline's own answers are not looked at: no calibration text can hold what is written later.
    """
    text = CalibrationText.of(calibration)
    for task in tasks:
        if held := [item_id for item_id, item in item_words(task) if text.holds(item)]:
            raise _refused(f"{len(held)} of {len(task.items)} items of task {task.name!r}", held[:3])
    documents = [Corpus(name=task.name, text="\n".join(task.documents)) for task in tasks if task.documents]
    texts = [corpus for corpus in corpora if isinstance(corpus, Corpus)]
    for corpus in [*texts, *documents]:
        paragraphs = ((text, words(text)) for text in corpus.text.split("\n"))
        if same := [t for t, item in paragraphs if len(item) >= _PARAGRAPH and f" {' '.join(item)} " in text.all_words]:
            raise _refused(f"{len(same)} paragraphs of {corpus.name!r}", [same[0][:80]])


def _refused(what: str, examples: list[str]) -> DataError:
    return DataError(
        f"The calibration text contains {what}",
        got=examples,
        fix="Calibrate on other text, or leave these items out of the evaluation",
    )
