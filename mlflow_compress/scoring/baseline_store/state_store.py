"""A baseline's head inputs on disk: written once, compared with every variant.

Per scored position the store holds the head's input in the model's own dtype (not the vocabulary's log-probabilities,
which would be 30 times as large), a digest of the tokens that led there, and the target. The head's weights are stored
once. Where a head cannot be rebuilt that way, the store holds float16 log-probabilities and says so. Any later plan
finds its rows by the digest; other tokens are refused, since they are not in the store.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from mlflow_compress.errors import StoreError
from mlflow_compress.models.identity import KnownModel, tokenizer_hash
from mlflow_compress.scoring.baseline_store.state_writer import StateWriter
from mlflow_compress.scoring.baseline_store.store_manifest import (
    FORMAT,
    HEAD_FILE,
    LOG_PROBS,
    MANIFEST,
    Keys,
    StoreManifest,
)
from mlflow_compress.scoring.forward.head import Head, Logits, rebuild_head

__all__ = ["StateStore", "StateWriter", "StoreManifest"]

_OPEN_SHARDS = 2
_PROBES = 16  # keys that are compared before a whole run of them


class StateStore:
    """A finished store, opened for reading; every file is checked against its digest when it is first read."""

    def __init__(self, folder: Path, manifest: StoreManifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._open: OrderedDict[int, torch.Tensor] = OrderedDict()
        self._index: tuple[npt.NDArray[np.uint64], Keys, npt.NDArray[np.int64]] | None = None
        self._head: Head | None = None

    @classmethod
    def open(cls, folder: Path, *, baseline: KnownModel | None = None) -> StateStore:
        """Open a store.

        Parameters
        ----------
        folder : Path
            What a `StateWriter` left.
        baseline : KnownModel, optional
            When given, the store must belong to this model, tokenizer and dtype.

        Raises
        ------
        StoreError
            When the store is missing, unfinished, truncated, of another format, or another model's.
        """
        folder = Path(folder)
        try:
            raw = dict(json.loads((folder / MANIFEST).read_bytes()))
            if raw.get("format") != FORMAT:
                raise StoreError("The baseline store has another format", allowed=str(FORMAT), got=raw.get("format"))
            manifest = StoreManifest(**raw)
        except FileNotFoundError as error:
            raise StoreError(
                "No finished baseline store", got=str(folder), fix="Evaluate the baseline first"
            ) from error
        except (OSError, ValueError, TypeError) as error:
            raise StoreError(f"The store's manifest cannot be read: {error}", got=str(folder)) from error
        for shard in manifest.shards:
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
        """Scored positions held."""
        return self.manifest.n_rows

    def logits(self, rows: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
        """Return the baseline's float32 logits at store rows, shape (n, vocab_size).

        A store of log-probabilities gives these: they are logits that happen to be normalised, up to their rounding.
        """
        found = self.states(rows).to(device)
        return found.float() if self.manifest.kind == LOG_PROBS else self.head(device).logits(found)

    def head(self, device: torch.device) -> Logits:
        """Return the baseline's head, rebuilt from the stored weights and configuration."""
        if self._head is None:
            weights = self._read(HEAD_FILE, str(self.manifest.head))
            self._head = rebuild_head(self.manifest.model_config, weights)
        return self._head.to(device)

    def find(self, keys: Keys) -> npt.NDArray[np.int64]:
        """Return the store's row of each key, shape (n,); -1 where the baseline never scored those tokens.

        A key may stand in several rows, whose states differ in their last bits: they come from batches of other
        lengths. Where the keys stand in the store in this very order, these rows are returned, so that the same plan
        meets its own states; else each key's first row.
        """
        if self._index is None:
            parts = [self._keys(str(shard["file"])) for shard in self.manifest.shards]
            every = np.concatenate(parts) if parts else np.zeros((0, 16), np.uint8)
            short = np.ascontiguousarray(every[:, :8]).view(np.uint64)[:, 0]
            order = np.argsort(short, kind="stable")
            self._index = (short[order], every, order)
        short, every, order = self._index
        start = _find_run(every, keys)
        if start is not None:
            return np.arange(start, start + len(keys))
        wanted = np.ascontiguousarray(keys[:, :8]).view(np.uint64)[:, 0]
        place = np.searchsorted(short, wanted).clip(max=max(len(short) - 1, 0))
        if not len(short):
            return np.full(len(keys), -1, np.int64)
        rows = order[place]
        return np.where((every[rows] == keys).all(axis=1), rows, -1)

    def states(self, rows: npt.NDArray[np.int64]) -> torch.Tensor:
        """Return what is stored at store rows, shape (n, width), in a tensor of its own."""
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
        """Read the digests of one shard only; the shard is checked whole when its rows are read."""
        try:
            with safe_open(self.folder / name, framework="np") as shard:
                return np.asarray(shard.get_tensor("keys"), dtype=np.uint8)
        except (SafetensorError, OSError) as error:
            raise StoreError(f"{name} of the baseline store is not a safetensors file: {error}") from error

    def _load_shard(self, number: int) -> dict[str, torch.Tensor]:
        shard = self.manifest.shards[number]
        tensors = self._read(str(shard["file"]), str(shard["sha256"]))
        if set(tensors) != {"rows", "keys", "targets"} or len(tensors["rows"]) != shard["rows"]:
            raise StoreError("A shard does not hold what the manifest says", got=str(shard["file"]))
        return tensors

    def _read(self, name: str, sha256: str) -> dict[str, torch.Tensor]:
        try:
            with (self.folder / name).open("rb") as source:
                found = hashlib.file_digest(source, "sha256").hexdigest()
        except OSError as error:
            raise StoreError(f"The baseline store cannot be read: {error}", got=name) from error
        if found != sha256:
            raise StoreError(
                f"{name} of the baseline store was changed after it was written", fix="Evaluate the baseline again"
            )
        try:
            return dict(load_file(self.folder / name))
        except SafetensorError as error:
            raise StoreError(f"{name} of the baseline store is not a safetensors file: {error}") from error


def _find_run(every: Keys, keys: Keys) -> int | None:
    """Return where `keys` stand in `every` one after the other, for the first time."""
    n = len(keys)
    if not 0 < n <= len(every):
        return None
    starts = np.arange(len(every) - n + 1)
    for probe in np.unique(np.linspace(0, n - 1, _PROBES, dtype=np.int64)):  # many texts begin with the same token
        starts = starts[(every[starts + probe] == keys[probe]).all(axis=1)]
    return next((s for s in starts.tolist() if np.array_equal(every[s : s + n], keys)), None)


def _check_owner(manifest: StoreManifest, baseline: KnownModel) -> None:
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
