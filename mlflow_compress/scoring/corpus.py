"""Cut a corpus as llama.cpp's perplexity tool does (METRICS §3)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mlflow_compress.errors import ConfigError, DataError
from mlflow_compress.scoring.execute import Targets
from mlflow_compress.scoring.plan import Batch, Plan, prefix_keys
from mlflow_compress.scoring.requests import Encoder

Windows = npt.NDArray[np.int32]


def cut_windows(encoder: Encoder, text: str, window: int) -> Windows:
    """Return the corpus's windows, shape (n_windows, window).

    The text is tokenized as one string with what the tokenizer prepends; ``n_windows = n_tokens // window``, the tail
    is dropped. Where the tokenizer adds BOS, it replaces the first token of every window.

    Raises
    ------
    ConfigError
        When the window is odd, below 4, or longer than the model's context.
    DataError
        When there are fewer than ``2 * window`` tokens.
    """
    if window < 4 or window % 2 or window > encoder.max_length:
        raise ConfigError(
            "The corpus window does not fit", allowed=f"an even number from 4 to {encoder.max_length}", got=window
        )
    ids = encoder.ids([text])[0]
    if len(ids) < 2 * window:
        raise DataError("The corpus is too short", allowed=f"at least {2 * window} tokens", got=len(ids))
    windows = ids[: len(ids) // window * window].reshape(-1, window).copy()
    if encoder.adds_bos and encoder.prefix_token is not None:
        windows[:, 0] = encoder.prefix_token
    return windows


def scored_positions(window: int) -> npt.NDArray[np.int64]:
    """Return the positions of the scored targets in a window: ``window/2 + 1 .. window - 1``."""
    return np.arange(window // 2 + 1, window)


def plan_windows(windows: Windows, *, batch_tokens: int) -> tuple[Plan, Targets]:
    """Plan plain batches of whole windows, in order; every window yields ``window/2 - 1`` rows."""
    n, window = windows.shape
    rows = scored_positions(window) - 1
    per_batch = max(1, batch_tokens // window)
    units = [
        Batch(list(windows[i : i + per_batch]), [rows] * len(windows[i : i + per_batch]))
        for i in range(0, n, per_batch)
    ]
    keys = np.frombuffer(b"".join(k for w in windows for k in prefix_keys(w, rows)), dtype=np.uint8).reshape(-1, 16)
    number = np.arange(n * len(rows))
    plan = Plan(units, keys, list(number.reshape(n, -1)))
    return plan, Targets(number, windows[:, rows + 1].reshape(-1).astype(np.int64))
