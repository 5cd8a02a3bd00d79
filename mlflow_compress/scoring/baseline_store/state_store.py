"""A baseline's states on disk, from which its logits are computed again for every variant.

For each scored position the store holds the final hidden state (the input of the language-model head) in the model's
own dtype, a digest of all tokens up to this position, and the target. The log-probabilities of the vocabulary would be
30 times as large. The head's weights are stored once. Where the head cannot be rebuilt from them, the store holds
float16 log-probabilities instead, and its manifest says why. A variant's plan finds its rows by the digest; tokens that
the baseline was not scored on are refused.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from mlflow_compress.errors import AlignmentError, StoreError
from mlflow_compress.files import read_json_object, read_typed
from mlflow_compress.models.identity import IdentifiedModel, tokenizer_hash
from mlflow_compress.scoring.baseline_store.state_writer import (
    FORMAT,
    HEAD_FILE,
    LOG_PROBS,
    MANIFEST,
    Keys,
    StateWriter,
    StoreManifest,
)
from mlflow_compress.scoring.forward.head import Head, LanguageModelHead, rebuild_head

__all__ = ["StateStore", "StateWriter"]

_OPEN_SHARDS = 2
_PROBES = 16  # keys that are compared before the complete sequence of keys


class StateStore:
    """A finished store, opened for reading. Every file is checked against its SHA-256 when it is first read."""

    def __init__(self, folder: Path, manifest: StoreManifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._open: OrderedDict[int, torch.Tensor] = OrderedDict()
        self._index: tuple[npt.NDArray[np.uint64], Keys, npt.NDArray[np.int64]] | None = None
        self._head: Head | None = None

    @classmethod
    def open(cls, folder: Path, *, baseline: IdentifiedModel | None = None) -> StateStore:
        """Open a store.

        With a `baseline`, the store must belong to this model, tokenizer and dtype.

        Raises `StoreError` when the store is missing, unfinished, truncated, of another format, or of another model.
        """
        folder = Path(folder)
        if not (folder / MANIFEST).is_file():
            raise StoreError("No finished baseline store", got=str(folder), fix="Evaluate the baseline first")
        found = read_json_object(folder / MANIFEST, error=StoreError).get("format")
        if found != FORMAT:
            raise StoreError("The baseline store has another format", allowed=str(FORMAT), got=found)
        manifest = read_typed(folder / MANIFEST, StoreManifest, error=StoreError, fix="Evaluate the baseline again")
        kinds = {"file": str, "rows": int, "bytes": int, "sha256": str}
        for shard in manifest.shards:
            if not all(isinstance(shard.get(name), kind) for name, kind in kinds.items()):
                raise StoreError("The store's manifest is broken: a shard lacks its file, rows, bytes or sha256")
            path = folder / str(shard["file"])
            size = path.stat().st_size if path.is_file() else 0
            if size != shard["bytes"]:
                raise StoreError(
                    f"{path.name} of the baseline store is missing or cut short",
                    allowed=f"{shard['bytes']} bytes",
                    got=size,
                    fix="Evaluate the baseline again",
                )
        if baseline is not None:
            _check_owner(manifest, baseline)
        return cls(folder, manifest)

    @property
    def n_rows(self) -> int:
        """Number of scored positions in the store."""
        return self.manifest.n_rows

    def logits(self, rows: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
        """Return the baseline's float32 logits at store rows, shape (n, vocab_size).

        A store of log-probabilities returns these: they are normalised logits, rounded to float16.
        """
        states = self.states(rows).to(device)
        return states.float() if self.manifest.kind == LOG_PROBS else self.head(device).logits(states)

    def head(self, device: torch.device) -> LanguageModelHead:
        """Return the baseline's head, rebuilt from the stored weights and configuration."""
        if self._head is None:
            self._head = rebuild_head(self.manifest.model_config, self.head_weights())
        return self._head.to(device)

    def head_weights(self) -> dict[str, torch.Tensor]:
        """Return the stored weights of the baseline's head; none where log-probabilities are stored."""
        return self._read(HEAD_FILE, self.manifest.head) if self.manifest.head is not None else {}

    def find(self, keys: Keys) -> npt.NDArray[np.int64]:
        """Return the store's row of each key, shape (n,); -1 where the baseline was not scored on those tokens.

        A key may occur in several rows, whose states differ by rounding because their batches had other lengths. If the
        store holds all keys in the given order, those rows are returned, so that the same plan finds the states of the
        same batches. Otherwise the first row of each key is returned.
        """
        if self._index is None:
            parts = [self._keys(str(shard["file"])) for shard in self.manifest.shards]
            stored = np.concatenate(parts) if parts else np.zeros((0, 16), np.uint8)
            short = np.ascontiguousarray(stored[:, :8]).view(np.uint64)[:, 0]
            order = np.argsort(short, kind="stable")
            self._index = (short[order], stored, order)
        short, stored, order = self._index
        start = _find_sequence(stored, keys)
        if start is not None:
            return np.arange(start, start + len(keys))
        wanted = np.ascontiguousarray(keys[:, :8]).view(np.uint64)[:, 0]
        place = np.searchsorted(short, wanted).clip(max=max(len(short) - 1, 0))
        if not len(short):
            return np.full(len(keys), -1, np.int64)
        rows = order[place]
        return np.where((stored[rows] == keys).all(axis=1), rows, -1)

    def rows_of(self, keys: Keys) -> npt.NDArray[np.int64]:
        """Return the store's row of each key, as `find` does.

        Raises `AlignmentError` when the baseline was not scored on some of those tokens.
        """
        rows = self.find(keys)
        if (rows < 0).any():
            raise AlignmentError(
                f"The baseline store lacks {int((rows < 0).sum())} of the {len(rows)} scored positions",
                fix="Evaluate baseline and variant on the same tasks, limit and seed, with the same tokenizer",
            )
        return rows

    def states(self, rows: npt.NDArray[np.int64]) -> torch.Tensor:
        """Return the stored states (or log-probabilities) at store rows, shape (n, width), in a new tensor."""
        starts = np.cumsum([0, *(int(s["rows"]) for s in self.manifest.shards)])
        shard_of = np.searchsorted(starts, rows, side="right") - 1
        dtype = getattr(torch, self.manifest.dtype)
        out = torch.empty((len(rows), self.manifest.width), dtype=dtype)
        for number in np.unique(shard_of).tolist():
            here = np.flatnonzero(shard_of == number)
            out[torch.from_numpy(here)] = self._shard_states(number)[torch.from_numpy(rows[here] - starts[number])]
        return out

    def _shard_states(self, number: int) -> torch.Tensor:
        if number not in self._open:
            self._open[number] = self._load_shard(number)["rows"]
            while len(self._open) > _OPEN_SHARDS:
                self._open.popitem(last=False)
        self._open.move_to_end(number)
        return self._open[number]

    def _keys(self, name: str) -> Keys:
        """Return the digests of one shard. Its SHA-256 is checked later, when its states are read."""
        try:
            with safe_open(self.folder / name, framework="np") as shard:
                return np.asarray(shard.get_tensor("keys"), dtype=np.uint8)
        except (SafetensorError, OSError) as error:
            raise StoreError(f"{name} of the baseline store is not a safetensors file: {error}") from error

    def _load_shard(self, number: int) -> dict[str, torch.Tensor]:
        shard = self.manifest.shards[number]
        tensors = self._read(str(shard["file"]), str(shard["sha256"]))
        if set(tensors) != {"rows", "keys", "targets"} or len(tensors["rows"]) != shard["rows"]:
            raise StoreError("A shard does not match the manifest", got=str(shard["file"]))
        return tensors

    def _read(self, name: str, sha256: str) -> dict[str, torch.Tensor]:
        try:
            with (self.folder / name).open("rb") as source:
                digest = hashlib.file_digest(source, "sha256").hexdigest()
        except OSError as error:
            raise StoreError(f"The baseline store cannot be read: {error}", got=name) from error
        if digest != sha256:
            raise StoreError(
                f"{name} of the baseline store was changed after it was written", fix="Evaluate the baseline again"
            )
        try:
            return dict(load_file(self.folder / name))
        except SafetensorError as error:
            raise StoreError(f"{name} of the baseline store is not a safetensors file: {error}") from error


def _find_sequence(stored: Keys, keys: Keys) -> int | None:
    """Return where `stored` first holds all `keys`, in order and without a gap; None where it does not."""
    n = len(keys)
    if not 0 < n <= len(stored):
        return None
    starts = np.arange(len(stored) - n + 1)
    for probe in np.unique(np.linspace(0, n - 1, _PROBES, dtype=np.int64)):  # many texts begin with the same token
        starts = starts[(stored[starts + probe] == keys[probe]).all(axis=1)]
    return next((s for s in starts.tolist() if np.array_equal(stored[s : s + n], keys)), None)


def _check_owner(manifest: StoreManifest, baseline: IdentifiedModel) -> None:
    wanted: Sequence[tuple[str, str, str]] = (
        ("weights", manifest.weights, baseline.weights),
        ("tokenizer", manifest.tokenizer, tokenizer_hash(baseline.tokenizer)),
        ("dtype", manifest.model_dtype, str(baseline.dtype).removeprefix("torch.")),
    )
    for what, stored, now in wanted:
        if stored != now:
            raise StoreError(
                f"The baseline store was written with other {what}",
                allowed=stored[:16],
                got=now[:16],
                fix="Evaluate the baseline again",
            )


@dataclass(frozen=True)
class SentHead:
    """What the baseline's head is rebuilt from: its weights as bytes, and the model's configuration."""

    digest: str  # Of the store's manifest
    kind: str  # "states" or "log_probs", see `StoreManifest`. There is no head for log-probabilities.
    dtype: str  # Dtype of the stored rows
    weights: Mapping[str, tuple[npt.NDArray[np.uint8], str, tuple[int, ...]]]  # Each with the tensor's dtype and shape
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
    """Stored rows of one shard, in the order of its plan: what a `StateStore` is in one process."""

    head: SentHead
    rows: npt.NDArray[np.uint8]  # shape (n, bytes of a row)

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
