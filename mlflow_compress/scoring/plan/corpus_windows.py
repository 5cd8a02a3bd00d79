"""Cuts a corpus into windows: independent (llama.cpp), or rolling (lm-evaluation-harness).

Answers that a model wrote are one window each.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mlflow_compress.errors import ConfigError, DataError
from mlflow_compress.models.length_regimes import LengthRegime, one_regime
from mlflow_compress.records import TokenAnswers
from mlflow_compress.scoring.plan.encoding import Encoder
from mlflow_compress.scoring.plan.packing import Ids, PaddedBatch, Plan, prefix_keys
from mlflow_compress.scoring.scoring_pass import Targets

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Windows:
    """Windows of a corpus."""

    ids: list[Ids]  # Tokens of each window
    scored: list[Positions]  # Positions of the scored tokens in each window; never 0
    names: list[str] = field(default_factory=list)  # Item id of each window; if empty, the window's number is its id
    last_is_read: bool = True  # If not, the last token of each window is only a target

    @property
    def targets(self) -> Positions:
        return np.concatenate([i[p] for i, p in zip(self.ids, self.scored, strict=True)]).astype(np.int64)

    def keys(self, task: str) -> dict[str, Any]:
        """Return the key columns of the records of all scored tokens, window by window."""
        counts = [len(p) for p in self.scored]
        return {
            "task": [task] * sum(counts),
            "item_id": np.repeat(self.names or np.arange(len(counts)).astype(str), counts),
            "position": np.concatenate(self.scored),
        }

    def plan(self, batch_tokens: int, regime: LengthRegime = one_regime) -> tuple[Plan, Targets]:
        """Return a plan of padded batches of windows in order, each of one `regime`, and its targets."""
        units: list[PaddedBatch] = []
        inputs, start = self.ids if self.last_is_read else [window[:-1] for window in self.ids], 0
        regimes = [regime(len(window)) for window in inputs]
        while start < len(inputs):
            most = start + max(1, batch_tokens // len(inputs[start]))
            stop = next((n for n in range(start, most) if regimes[n : n + 1] != regimes[start : start + 1]), most)
            units.append(PaddedBatch(inputs[start:stop], [p - 1 for p in self.scored[start:stop]]))
            start = stop
        scored = zip(inputs, self.scored, regimes, strict=True)
        digests = (key for ids, places, of_ids in scored for key in prefix_keys(ids, places - 1, of_ids))
        keys = np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(-1, 16)
        number = np.arange(len(keys))
        cuts = np.cumsum([len(p) for p in self.scored])[:-1]
        return Plan(units, keys, np.split(number, cuts)), Targets(number, self.targets)


def cut(
    encoder: Encoder,
    corpus: str | Sequence[str] | TokenAnswers,
    *,
    window: int,
    max_tokens: int | None = None,
    starts: Sequence[int] = (),
) -> Windows:
    """Return the windows of a running text, of documents or of answers; see `Scorer.score_corpus`."""
    if isinstance(corpus, TokenAnswers):
        return cut_answers(corpus)
    if not isinstance(corpus, str):
        return cut_documents(encoder, corpus)
    windows = cut_windows(encoder, corpus, window, max_tokens)
    documents = encoder.documents(corpus, starts) if starts else None
    if documents is None:
        return windows
    firsts = [number * window + int(places[0]) for number, places in enumerate(windows.scored)]
    return replace(windows, names=[f"{documents[first]}.{number}" for number, first in enumerate(firsts)])


def cut_windows(encoder: Encoder, text: str, window: int, max_tokens: int | None = None) -> Windows:
    """Return llama.cpp's windows.

    The text, or its first `max_tokens` tokens, is one string with the special tokens that the tokenizer prepends. The
    tail after ``n_tokens // window`` windows is dropped. Where the tokenizer adds BOS, it replaces the first token of
    every window. The positions ``window/2 + 1 .. window - 1`` are scored.
    """
    if window < 4 or window % 2 or window > encoder.max_length:
        allowed = f"an even number from 4 to {encoder.max_length}"
        raise ConfigError("The corpus window does not fit", allowed=allowed, got=window)
    ids = encoder.ids([text])[0][:max_tokens]
    if len(ids) < 2 * window:
        raise DataError("The corpus is too short", allowed=f"at least {2 * window} tokens", got=len(ids))
    windows = ids[: len(ids) // window * window].reshape(-1, window).copy()
    if encoder.adds_bos and encoder.prefix_token is not None:
        windows[:, 0] = encoder.prefix_token
    return Windows(list(windows), [np.arange(window // 2 + 1, window)] * len(windows))


def cut_documents(encoder: Encoder, documents: Sequence[str]) -> Windows:
    """Return lm-evaluation-harness's rolling windows: every token of every document is scored once.

    A document's first token is predicted from the prefix token (BOS, or EOS where there is none). Windows of the
    full context length follow each other without overlap. The last window begins earlier, so that it is full too where
    the document is long enough. The windows of document i are named "i.0", "i.1" ...
    """
    if encoder.prefix_token is None:
        raise DataError(
            "The tokenizer has neither a BOS nor an EOS token, from which a document's first token could be predicted"
        )
    room = encoder.max_length
    windows = Windows([], [], [], last_is_read=False)
    for number, ids in enumerate(encoder.ids(documents)):
        if not len(ids):
            raise DataError("A document has no tokens", got=f"document {number}")
        stream = np.concatenate([[encoder.prefix_token], ids]).astype(np.int32)
        done = part = 0
        while done < len(ids):
            fresh = min(room, len(ids) - done)
            stop = done + fresh + 1
            window = stream[max(0, stop - room - 1) : stop]
            windows.ids.append(window)
            windows.scored.append(np.arange(len(window) - fresh, len(window)))
            windows.names.append(f"{number}.{part}")
            done, part = done + fresh, part + 1
    return windows


def cut_answers(answers: TokenAnswers) -> Windows:
    """Return one window per answer, the longest first: its prompt, then its tokens, of which each is scored.

    The token ids are taken as they are. A text that is tokenized again may become other tokens than the model wrote.
    """
    rows = answers.table.select(["prompt_tokens", "tokens"]).to_pylist()
    sizes = [len(row["prompt_tokens"]) + len(row["tokens"]) for row in rows]
    if not rows or not all(row["tokens"] and row["prompt_tokens"] for row in rows):
        raise DataError("Answers without tokens cannot be scored", got=f"{len(rows)} answers")
    names, order = answers.windows(), np.argsort([-size for size in sizes], kind="stable").tolist()
    return Windows(
        [np.asarray(rows[row]["prompt_tokens"] + rows[row]["tokens"], dtype=np.int32) for row in order],
        [np.arange(len(rows[row]["prompt_tokens"]), sizes[row]) for row in order],
        [names[row] for row in order],
        last_is_read=False,
    )
