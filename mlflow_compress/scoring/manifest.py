"""What a baseline store is made of: its files, and the manifest that says whose it is."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mlflow_compress.errors import StoreError

Keys = npt.NDArray[np.uint8]
FORMAT = 1
MANIFEST = "manifest.json"
HEAD_FILE = "head.safetensors"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a store holds and whose it is.

    Attributes
    ----------
    format : int
        Version of the layout.
    weights, tokenizer, head : str
        SHA-256 of the baseline's weights and tokenizer (see `loading`), and of the head file.
    dtype, model_dtype, hidden_size, vocab_size : str, str, int, int
        Of the stored states, of the model, and the widths of states and logits.
    model_config : dict
        The baseline's configuration, from which the head's own code is rebuilt.
    limits : dict
        What fixes how work is cut (tokens a batch, rows a head product); a variant uses the same.
    passes : list of dict
        Per pass: label, path ("packed" or "plain"), and the digest of its plan.
    shards : list of dict
        Per file: name, rows, bytes, sha256.
    """

    format: int
    weights: str
    tokenizer: str
    head: str
    dtype: str
    model_dtype: str
    hidden_size: int
    vocab_size: int
    model_config: dict[str, Any]
    limits: dict[str, int]
    passes: list[dict[str, str]]
    shards: list[dict[str, Any]]

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
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as sink:
            sink.write(data)
            sink.flush()
            os.fsync(sink.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise StoreError(f"The file cannot be written: {error}", got=str(path), fix="Free some space") from error
    return hashlib.sha256(data).hexdigest()
