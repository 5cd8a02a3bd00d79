"""File names and manifest of a baseline store."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mlflow_compress import files as atomic
from mlflow_compress.errors import StoreError

Keys = npt.NDArray[np.uint8]
FORMAT = 3
MANIFEST = "manifest.json"
HEAD_FILE = "head.safetensors"
SHARD_BYTES = 64 << 20  # of states in one file
STATES, LOG_PROBS = "states", "log_probs"


@dataclass(frozen=True, kw_only=True)
class StoreManifest:
    """Manifest of a baseline store: what it holds, and of which model.

    Attributes
    ----------
    format : int
        Version of the layout.
    kind, reason : str, str or None
        "states" (head inputs), or "log_probs" (float16 log-probabilities) and why states could not be used.
    weights, tokenizer : str
        SHA-256 of the baseline's weights and tokenizer (see `models.identity`).
    head : str or None
        SHA-256 of the head's file; None for log-probabilities.
    dtype, model_dtype, width, vocab_size : str, str, int, int
        Dtype of the stored rows and of the model; width of a stored row and of the logits.
    model_config : dict
        The baseline's configuration, from which the head's own code is rebuilt.
    limits : dict
        Tokens per batch and rows per product with the head; variants use the same.
    rounding : dict
        What decided rounding on the machine that wrote it (see `memory_alignment.rounding_identity`).
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
        """Number of scored positions in the store."""
        return sum(int(s["rows"]) for s in self.shards)


def write_file(path: Path, data: bytes) -> str:
    """Write a file atomically, and return its SHA-256.

    Raises
    ------
    StoreError
        When the file cannot be written, for example because the disk is full; no partial file is left.
    """
    try:
        atomic.write(path, data)
    except OSError as error:
        raise StoreError(f"The file cannot be written: {error}", got=str(path), fix="Free some space") from error
    return hashlib.sha256(data).hexdigest()
