"""What a baseline store is made of: its files, and the manifest that says whose it is."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mlflow_compress import atomic
from mlflow_compress.errors import StoreError

Keys = npt.NDArray[np.uint8]
FORMAT = 3
MANIFEST = "manifest.json"
HEAD_FILE = "head.safetensors"
STATES, LOG_PROBS = "states", "log_probs"


@dataclass(frozen=True, kw_only=True)
class StoreManifest:
    """What a store holds and whose it is.

    Attributes
    ----------
    format : int
        Version of the layout.
    kind, reason : str, str or None
        "states" (head inputs), or "log_probs" (float16 log-probabilities) and why the states would not do.
    weights, tokenizer : str
        SHA-256 of the baseline's weights and tokenizer (see `loading`).
    head : str or None
        SHA-256 of the head's file; None for log-probabilities.
    dtype, model_dtype, width, vocab_size : str, str, int, int
        Of what is stored and of the model; width of a stored row, and of the logits.
    model_config : dict
        The baseline's configuration, from which the head's own code is rebuilt.
    limits : dict
        What fixes how work is cut (tokens a batch, rows a head product); a variant uses the same.
    rounding : dict
        What decided the last bits on the machine that wrote it (see `rounding.rounding_identity`).
    passes : list of dict
        Per pass: label, path ("packed" or "plain"), and the digest of its plan.
    shards : list of dict
        Per file: name, rows, bytes, sha256.
    """

    format: int
    kind: str
    reason: str | None
    weights: str
    tokenizer: str
    head: str | None
    dtype: str
    model_dtype: str
    width: int
    vocab_size: int
    model_config: dict[str, Any]
    limits: dict[str, int]
    rounding: dict[str, str]
    passes: list[dict[str, str]]
    shards: list[dict[str, Any]]

    @property
    def digest(self) -> str:
        """SHA-256 of everything that the manifest says."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    @property
    def n_rows(self) -> int:
        """Scored positions held."""
        return sum(int(s["rows"]) for s in self.shards)


def write_file(path: Path, data: bytes) -> str:
    """Write a file so that it is there whole or not at all, and return its SHA-256.

    Raises
    ------
    StoreError
        When the disk refuses, for example because it is full; nothing is left behind.
    """
    try:
        atomic.write(path, data)
    except OSError as error:
        raise StoreError(f"The file cannot be written: {error}", got=str(path), fix="Free some space") from error
    return hashlib.sha256(data).hexdigest()
