"""A part of a baseline store that is sent to a worker: the rows that one shard of a pass needs, and the head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mlflow_compress.scoring.baseline_store.state_store import StateStore
from mlflow_compress.scoring.baseline_store.store_manifest import LOG_PROBS, Keys
from mlflow_compress.scoring.forward.head import Head, rebuild_head


@dataclass(frozen=True)
class SentHead:
    """What the baseline's head is rebuilt from: its weights as bytes, and the model's configuration.

    Attributes
    ----------
    digest : str
        Of the store's manifest.
    kind : str
        "states" or "log_probs", see `StoreManifest`. There is no head for log-probabilities.
    dtype : str
        Dtype of the stored rows.
    weights : mapping of str to ndarray of uint8
        Each with the tensor's dtype and shape.
    model_config : dict
    """

    digest: str
    kind: str
    dtype: str
    weights: Mapping[str, tuple[npt.NDArray[np.uint8], str, tuple[int, ...]]]
    model_config: dict[str, Any]

    @classmethod
    def of(cls, store: StateStore) -> SentHead:
        """Return the head of a store."""
        weights = {
            name: (as_bytes(tensor), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for name, tensor in store.head_weights().items()
        }
        manifest = store.manifest
        return cls(
            digest=manifest.digest,
            kind=manifest.kind,
            dtype=manifest.dtype,
            weights=weights,
            model_config=manifest.model_config,
        )

    @cached_property
    def rebuilt(self) -> Head:
        """The head, as `StateStore.head` rebuilds it."""
        weights = {name: from_bytes(*parts) for name, parts in self.weights.items()}
        return rebuild_head(self.model_config, weights)


@dataclass(frozen=True)
class SentStates:
    """Stored rows of one shard, in the order of its plan: what a `StateStore` is in one process.

    Attributes
    ----------
    head : SentHead
    rows : ndarray of uint8, shape (n, bytes of a row)
    """

    head: SentHead
    rows: npt.NDArray[np.uint8]

    def rows_of(self, keys: Keys) -> npt.NDArray[np.int64]:
        """Return the number of each row: the sender has put them into the order of the keys."""
        return np.arange(len(keys), dtype=np.int64)

    def logits(self, rows: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
        """Return the baseline's float32 logits, as `StateStore.logits` does."""
        states = from_bytes(self.rows[rows], self.head.dtype, (len(rows), -1)).to(device)
        return states.float() if self.head.kind == LOG_PROBS else self.head.rebuilt.to(device).logits(states)


def as_bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Return the bytes of a tensor, one row per row of the tensor: numpy and Arrow have no bfloat16."""
    flat = tensor.contiguous().view(torch.uint8).numpy()
    return flat.reshape(len(tensor), -1)


def from_bytes(raw: npt.NDArray[np.uint8], dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the tensor of these bytes, in memory of its own."""
    return torch.from_numpy(np.array(raw).reshape(-1)).view(getattr(torch, dtype)).reshape(shape)
