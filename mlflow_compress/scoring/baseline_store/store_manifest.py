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
    """Manifest of a baseline store: what it holds, and of which model."""

    format: int  # Version of the layout
    kind: str  # "states" (head inputs), or "log_probs" (float16 log-probabilities) and why states could not be used
    reason: str | None
    weights: str  # SHA-256 of the baseline's weights and tokenizer (see `models.identity`)
    tokenizer: str
    head: str | None  # SHA-256 of the head's file; None for log-probabilities
    dtype: str  # Dtype of the stored rows and of the model; width of a stored row and of the logits
    model_dtype: str
    width: int
    vocab_size: int
    model_config: dict[str, Any]  # The baseline's configuration, from which the head's own code is rebuilt
    limits: dict[str, int]  # Tokens per batch and rows per product with the head; variants use the same
    # What decided rounding on the machine that wrote it (see `memory_alignment.rounding_identity`)
    rounding: dict[str, str]
    passes: list[dict[str, str]]  # Per pass: label, path ("packed" or "plain"), and the digest of its plan
    shards: list[dict[str, Any]]  # Per file: name, rows, bytes, sha256

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

    Raises `StoreError` when the file cannot be written, for example because the disk is full; no partial file is left.
    """
    try:
        atomic.write(path, data)
    except OSError as error:
        raise StoreError(f"The file cannot be written: {error}", got=str(path), fix="Free some space") from error
    return hashlib.sha256(data).hexdigest()
