"""The texts on which a diagnosis measures, and what their tokens read as."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from mlflow_compress.config import DiagnosisConfig
from mlflow_compress.errors import ConfigError
from mlflow_compress.items.suite import Suite
from mlflow_compress.items.task import Corpus
from mlflow_compress.metrics.diagnosis.moved_texts import MovedText, ShownText
from mlflow_compress.metrics.diagnosis.swap_table import SwapTable
from mlflow_compress.models.loading import LoadedModel
from mlflow_compress.scoring.plan.corpus_windows import Windows, cut_windows
from mlflow_compress.scoring.plan.encoding import Encoder

_CONTEXT = 12  # tokens shown before a change


def corpora_of(suite: Suite, tasks: str) -> list[Corpus]:
    """Return the running texts of a suite. A suite without one is refused, and so is `traces`."""
    found = [corpus for corpus in suite.corpora if isinstance(corpus, Corpus)]
    if not found or len(found) < len(suite.corpora):
        raise ConfigError(
            "A diagnosis needs running text that is there already",
            allowed="tasks with a corpus: demo, wikitext2, or a file such as corpus.txt",
            got=tasks,
            fix="Add a corpus to 'tasks', and leave 'traces' out",
        )
    return found


def texts_of(corpora: Sequence[Corpus], model: LoadedModel, asked: DiagnosisConfig) -> dict[str, Windows]:
    """Return the texts of every corpus: windows one after the other, of which every token but the first is scored.

    Raises
    ------
    ConfigError, DataError
        The window is longer than the model's context, or the corpus shorter than two windows.
    """
    encoder = Encoder(model.tokenizer, model.max_length)
    found = {}
    for corpus in corpora:
        limits = [n for n in (asked.corpus_tokens, corpus.max_tokens) if n]
        windows = cut_windows(encoder, corpus.text, asked.corpus_window, min(limits) if limits else None)
        found[corpus.name] = replace(windows, scored=[np.arange(1, asked.corpus_window)] * len(windows.ids))
    return found


class TokenTexts:
    """What the tokens of the measured texts read as.

    Parameters
    ----------
    windows : mapping of str to Windows
        By corpus.
    tokenizer : transformers.PreTrainedTokenizerBase
    """

    def __init__(self, windows: Mapping[str, Windows], tokenizer: Any) -> None:
        self._windows, self._tokenizer = windows, tokenizer
        self._after = cache(self._read_after)

    def rows(self, table: SwapTable) -> tuple[np.ndarray[Any, Any], list[str], list[str]]:
        """Return the token, its own text, and the text of the token before, of every row of a table."""
        tokens, own, before = [], [], []
        for code, position in zip(table.text.tolist(), table.position.tolist(), strict=True):
            previous, token = (int(self._ids(*table.texts[code])[position + step]) for step in (-1, 0))
            tokens.append(token)
            own.append(self._after(previous, token))
            before.append(self._text([previous]))
        return np.asarray(tokens, dtype=np.int64), own, before

    def shown(self, moved: MovedText) -> ShownText:
        """Return a moved text with the words around its first change."""
        ids = self._ids(moved.task, moved.item_id)
        begins = self._text(ids[1 : _CONTEXT + 1].tolist())
        place = moved.first_change
        if place is None or moved.baseline_top is None or moved.variant_top is None:
            return ShownText(moved=moved, begins=begins)
        previous = int(ids[place - 1])
        return ShownText(
            moved=moved,
            begins=begins,
            context=self._text(ids[max(0, place - _CONTEXT) : place].tolist()),
            actual=self._after(previous, int(ids[place])),
            baseline=self._after(previous, moved.baseline_top),
            variant=self._after(previous, moved.variant_top),
        )

    def _ids(self, task: str, item_id: str) -> np.ndarray[Any, Any]:
        return np.asarray(self._windows[task].ids[int(item_id)])

    def _text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _read_after(self, previous: int, token: int) -> str:
        """Return a token's text as it reads after another: alone, some tokenizers drop its space."""
        return self._text([previous, token])[len(self._text([previous])) :]
