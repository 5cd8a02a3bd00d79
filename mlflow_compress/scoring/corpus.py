"""Cut a corpus into windows: llama.cpp's independent ones (METRICS §3), or overlapping ones of full length."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mlflow_compress.errors import ConfigError, DataError
from mlflow_compress.scoring.execute import Targets
from mlflow_compress.scoring.requests import Encoder
from mlflow_compress.scoring.trie import Ids
from mlflow_compress.scoring.units import Batch, Plan, prefix_keys

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Windows:
    """Windows of a corpus.

    Attributes
    ----------
    ids : list of ndarray of int32
        Tokens of each window.
    scored : list of ndarray of int64
        Positions in each window of the tokens that are scored; never 0.
    """

    ids: list[Ids]
    scored: list[Positions]

    @property
    def targets(self) -> Positions:
        """The scored tokens, window by window."""
        return np.concatenate([i[p] for i, p in zip(self.ids, self.scored, strict=True)]).astype(np.int64)

    def plan(self, batch_tokens: int) -> tuple[Plan, Targets]:
        """Plan plain batches of whole windows, in order."""
        units: list[Batch] = []
        start = 0
        while start < len(self.ids):
            stop = start + max(1, batch_tokens // len(self.ids[start]))
            units.append(Batch(self.ids[start:stop], [p - 1 for p in self.scored[start:stop]]))
            start = stop
        digests = (k for ids, p in zip(self.ids, self.scored, strict=True) for k in prefix_keys(ids, p - 1))
        keys = np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(-1, 16)
        number = np.arange(len(keys))
        cuts = np.cumsum([len(p) for p in self.scored])[:-1]
        return Plan(units, keys, np.split(number, cuts)), Targets(number, self.targets)


def cut_windows(encoder: Encoder, text: str, window: int) -> Windows:
    """Return llama.cpp's windows.

    The text is tokenized as one string with what the tokenizer prepends; ``n_windows = n_tokens // window``, the tail
    is dropped. Where the tokenizer adds BOS, it replaces the first token of every window. Scored are the positions
    ``window/2 + 1 .. window - 1`` of each.

    Raises
    ------
    ConfigError
        When the window is odd, below 4, or longer than the model's context.
    DataError
        When there are fewer than ``2 * window`` tokens.
    """
    if window < 4 or window % 2 or window > encoder.max_length:
        allowed = f"an even number from 4 to {encoder.max_length}"
        raise ConfigError("The corpus window does not fit", allowed=allowed, got=window)
    ids = encoder.ids([text])[0]
    if len(ids) < 2 * window:
        raise DataError("The corpus is too short", allowed=f"at least {2 * window} tokens", got=len(ids))
    windows = ids[: len(ids) // window * window].reshape(-1, window).copy()
    if encoder.adds_bos and encoder.prefix_token is not None:
        windows[:, 0] = encoder.prefix_token
    return Windows(list(windows), [np.arange(window // 2 + 1, window)] * len(windows))


def cut_strided(encoder: Encoder, text: str, window: int, stride: int) -> Windows:
    """Return overlapping windows in which every token but the first is scored once.

    Window i holds the tokens ``i * stride .. i * stride + window - 1`` and scores those that no window before it held;
    the last one ends with the text. Each token after the first window is so predicted from at least ``window - stride``
    tokens. Convention of Hugging Face's guide to the perplexity of fixed-length models.

    Raises
    ------
    ConfigError
        When the window is below 2 or longer than the model's context, or the stride not in ``1 .. window - 1``.
    DataError
        When there are fewer than two tokens.
    """
    if not 2 <= window <= encoder.max_length:
        raise ConfigError("The corpus window does not fit", allowed=f"2 to {encoder.max_length}", got=window)
    if not 1 <= stride < window:
        raise ConfigError("The stride does not fit the window", allowed=f"1 to {window - 1}", got=stride)
    ids = encoder.ids([text])[0]
    if len(ids) < 2:
        raise DataError("The corpus is too short", allowed="at least 2 tokens", got=len(ids))
    parts: list[Ids] = []
    scored: list[Positions] = []
    start, done = 0, 1
    while done < len(ids):
        stop = min(start + window, len(ids))
        parts.append(ids[start:stop])
        scored.append(np.arange(done - start, stop - start))
        done, start = stop, start + stride
    return Windows(parts, scored)
