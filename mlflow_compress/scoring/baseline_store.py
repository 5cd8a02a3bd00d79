"""A baseline's states on disk, from which its logits are computed again for every variant.

For each scored position the store holds the final hidden state (the input of the language-model head) in the model's
own dtype, a digest of all tokens up to this position, and the target. The log-probabilities of the vocabulary would be
30 times as large. The head's weights are stored once. Where the head cannot be rebuilt from them, the store holds
float16 log-probabilities instead, and its manifest says why. A variant's plan finds its rows by the digest; tokens that
the baseline was not scored on are refused.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, load_file, save

from mlflow_compress import files as atomic
from mlflow_compress.errors import AlignmentError, StoreError, UnsupportedError
from mlflow_compress.files import dataclass_of, read_json_object
from mlflow_compress.hashes import sha256_file
from mlflow_compress.models.identity import IdentifiedModel, tokenizer_hash
from mlflow_compress.models.placement import sent_to
from mlflow_compress.scoring.forward.head import Head, rebuild_head

StateKeys = npt.NDArray[np.uint8]
FORMAT = 3
MANIFEST = "manifest.json"
HEAD_FILE = "head.safetensors"
SHARD_BYTES = 64 << 20  # of states in one file
_STATES, _LOG_PROBS = "states", "log_probs"
_OPEN_SHARDS = 2
_PROBES = 16  # keys that are compared before the complete sequence of keys

logger = logging.getLogger(__name__)


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


def write_file(path: Path, data: bytes) -> str:
    """Write a file atomically, and return its SHA-256; a full disk is a `StoreError` and leaves no partial file."""
    try:
        atomic.write(path, data)
    except OSError as error:
        raise StoreError(f"The file cannot be written: {error}", got=str(path), fix="Free some space") from error
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class CapturedRows:
    """Consecutive rows of a pass, as they are stored."""

    row: int  # Number of the first row in the pass
    rows: torch.Tensor  # States, or log-probabilities; on the CPU; shape (n, width)
    keys: StateKeys  # Per row: digest of all tokens up to it, and its first target
    targets: npt.NDArray[np.int32]
    kind: str  # As in `StoreManifest`
    reason: str | None


class CapturedStates:
    """Turns a model's states into the rows that are stored, and collects them in `parts`.

    At the first rows the head is rebuilt from its weights, as a reader does it. If the rebuilt head does not give the
    model's own logits, float16 log-probabilities are stored instead of states.
    """

    def __init__(self, loaded: Any) -> None:
        self.parts: list[CapturedRows] = []
        self._loaded = loaded  # has `model`, of which the head is here, and `stored_config`
        self._kind: str | None = None
        self._reason: str | None = None

    def append(
        self, row: int, states: torch.Tensor, logits: torch.Tensor, keys: StateKeys, targets: npt.NDArray[np.int32]
    ) -> None:
        """Add rows; `row` is the number of the first one in the pass.

        `states` are the head's inputs, shape (n, hidden_size), `logits` the model's float32 logits of them,
        (n, vocab_size). `keys` (n, 16) are digests of all tokens up to a row, `targets` (n,) its first target.
        """
        if self._kind is None:
            self._reason = self._reason_for_log_probs(states, logits)
            self._kind = _STATES if self._reason is None else _LOG_PROBS
            if self._reason is not None:
                logger.warning("The baseline store holds float16 log-probabilities: %s", self._reason)
        rows = states if self._kind == _STATES else torch.log_softmax(logits, dim=1).half()
        self.parts.append(CapturedRows(row, rows.detach().cpu(), keys, targets, self._kind, self._reason))

    def _reason_for_log_probs(self, states: torch.Tensor, logits: torch.Tensor) -> str | None:
        """Return why a reader could not rebuild the head from its weights; None where it can."""
        module = self._loaded.model.get_output_embeddings()
        if type(module) is not torch.nn.Linear:
            return f"the head is a {type(module).__name__}, not a plain linear layer"
        if states.shape[1] != module.weight.shape[1]:
            return "the model's body and head cannot be run separately"
        try:
            rebuilt = rebuild_head(self._loaded.stored_config, _head_weights(module))
            again = rebuilt.to(states.device).logits(states).to(logits.device)
        except (UnsupportedError, ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
            return f"the head's code cannot be rebuilt from the configuration ({type(error).__name__}: {error})"
        if not torch.equal(again, logits):
            return (
                f"the rebuilt head's logits differ from the model's by up to {float((again - logits).abs().max()):.1e}"
            )
        return None


def head_file(model: Any) -> bytes:
    """Return the content of the file with the weights of a model's head, in safetensors format."""
    return bytes(save(_head_weights(model.get_output_embeddings())))


def _head_weights(module: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().cpu().contiguous() for name, p in module.state_dict().items()}


class StoredModel(IdentifiedModel, Protocol):
    """Interface of a model whose states are stored: a `LoadedModel`, or a model on the workers of a cluster."""

    @property
    def stored_config(self) -> dict[str, Any]:
        """Its configuration, from which the head's own code is rebuilt."""

    @property
    def rounding(self) -> dict[str, str]:
        """What decides the last bits of its numbers (see `memory_alignment.rounding_identity`)."""


class StateWriter(AbstractContextManager["StateWriter"]):
    """Writes a baseline's states. Use it as a context manager: the store is readable once the block ends without error.

    `folder` is new or empty; an unfinished store in it is overwritten. `shard_bytes` are bytes of states per shard.
    """

    def __init__(self, folder: Path, loaded: StoredModel, *, shard_bytes: int = SHARD_BYTES) -> None:
        self.folder = Path(folder)
        self.loaded = loaded
        self.shard_bytes = shard_bytes
        if (self.folder / MANIFEST).exists():
            raise StoreError("The folder holds a finished store", got=str(folder), fix="Give another, or delete it")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.shards: list[dict[str, Any]] = []
        self._captured = CapturedStates(loaded)
        self._written: list[dict[str, Any]] = []
        self._limits: dict[str, int] = {}
        self._passes: list[dict[str, str]] = []
        self._kind: str | None = None
        self._reason: str | None = None
        self._head_hash: str | None = None

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.close()

    def begin(self, limits: dict[str, int], *, label: str, path: str, plan: str) -> None:
        """Record the next pass in the manifest; all passes into one store must have the same limits."""
        if self._limits not in ({}, limits):
            raise StoreError(
                "Passes into one store must have the same limits", allowed=str(self._limits), got=str(limits)
            )
        self._limits = dict(limits)
        self._passes.append({"label": label, "path": path, "plan": plan})

    def append(
        self, row: int, states: torch.Tensor, logits: torch.Tensor, keys: StateKeys, targets: npt.NDArray[np.int32]
    ) -> None:
        """Add rows of the model in this process, as `CapturedStates.append` does."""
        self._captured.append(row, states, logits, keys, targets)
        if sum(part.rows.nbytes for part in self._captured.parts) >= self.shard_bytes:
            self._flush()

    def take(self) -> dict[str, Any]:
        """Write pending rows, and return what was written since the last call: the argument of `adopt`."""
        self._flush()
        shards, self._written = self._written, []
        return {"shards": shards, "kind": self._kind, "reason": self._reason, "head": self._head_hash}

    def write(self, captured: CapturedRows, head: Callable[[], bytes]) -> dict[str, Any]:
        """Write the rows that a worker has captured as one shard, and return the argument of `adopt`.

        `head` returns the head's file; it is asked for once per store.
        """
        self._write([captured], head)
        return self.take()

    def adopt(self, written: Sequence[Mapping[str, Any]]) -> None:
        """Add to the store what `take` has returned in one pass, now or in an interrupted run, in the order of rows."""
        for part in written:
            for shard in part["shards"]:
                path = self.folder / shard["file"]
                if not path.is_file() or path.stat().st_size != shard["bytes"]:
                    raise StoreError(
                        f"{path.name} of the interrupted store is missing or cut short", got=str(self.folder)
                    )
            self._agree_on(part["kind"], part["reason"])
            self._head_hash = self._head_hash or part["head"]
            self.shards += part["shards"]

    def close(self) -> None:
        """Write the manifest, which makes the store readable, and delete what an interrupted run has left."""
        dtypes, widths = {s["dtype"] for s in self.shards}, {s["width"] for s in self.shards}
        if len(dtypes) != 1 or len(widths) != 1:
            raise StoreError("A store holds rows of one dtype and width", got=f"{sorted(dtypes)}, {sorted(widths)}")
        files = {shard["file"] for shard in self.shards}
        for path in self.folder.glob("states-*.safetensors"):
            if path.name not in files:
                path.unlink()
        manifest = StoreManifest(
            format=FORMAT,
            kind=str(self._kind),
            reason=self._reason,
            weights=self.loaded.weights,
            tokenizer=tokenizer_hash(self.loaded.tokenizer),
            head=self._head_hash,
            dtype=dtypes.pop(),
            model_dtype=_name(self.loaded.dtype),
            width=widths.pop(),
            vocab_size=self.loaded.vocab_size,
            model_config=self.loaded.stored_config,
            limits=self._limits,
            rounding=self.loaded.rounding,
            passes=self._passes,
            shards=self.shards,
        )
        write_file(self.folder / MANIFEST, (json.dumps(asdict(manifest), indent=1) + "\n").encode())

    def _flush(self) -> None:
        parts = self._captured.parts
        if parts:
            self._write(parts, lambda: head_file(self.loaded.model))  # type: ignore[attr-defined]
            parts.clear()

    def _write(self, parts: Sequence[CapturedRows], head: Callable[[], bytes]) -> None:
        """Write rows as one shard, and the head's file once."""
        self._agree_on(parts[0].kind, parts[0].reason)
        if self._kind == _STATES and self._head_hash is None:
            self._head_hash = write_file(self.folder / HEAD_FILE, head())
        rows = torch.cat([part.rows for part in parts])
        keys, targets = (np.concatenate([getattr(part, name) for part in parts]) for name in ("keys", "targets"))
        data = save({"rows": rows, "keys": torch.from_numpy(keys), "targets": torch.from_numpy(targets)})
        name = f"states-{len(self._passes)}-{parts[0].row:09d}.safetensors"
        shard = {
            "file": name,
            "rows": len(rows),
            "bytes": len(data),
            "sha256": write_file(self.folder / name, data),
            "dtype": _name(rows.dtype),
            "width": rows.shape[1],
        }
        self._written.append(shard)

    def _agree_on(self, kind: str, reason: str | None) -> None:
        """Take over what is stored of each row from the first part, and refuse later ones that store something else."""
        if self._kind is None:
            self._kind, self._reason = kind, reason
        if kind != self._kind:
            raise StoreError(
                f"Parts of one pass could not agree on what to store: {self._reason or reason}",
                allowed=str(self._kind),
                got=kind,
                fix="Evaluate the baseline in one process, with engine=local",
            )


class StateStore:
    """A finished store, opened for reading. Every file is checked against its SHA-256 when it is first read."""

    def __init__(self, folder: Path, manifest: StoreManifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._starts = np.cumsum([0, *(shard["rows"] for shard in manifest.shards)])
        self._open: dict[int, torch.Tensor] = {}  # rows by shard, those that were used last at the end

    @classmethod
    def open(cls, folder: Path, *, baseline: IdentifiedModel | None = None) -> "StateStore":
        """Open a store. With a `baseline`, it must belong to this model, tokenizer and dtype."""
        folder = Path(folder)
        if not (folder / MANIFEST).is_file():
            raise StoreError("No finished baseline store", got=str(folder), fix="Evaluate the baseline first")
        path, again = folder / MANIFEST, "Evaluate the baseline again"
        stored = read_json_object(path, error=StoreError)
        if stored.get("format") != FORMAT:
            raise StoreError("The baseline store has another format", allowed=str(FORMAT), got=stored.get("format"))
        manifest = dataclass_of(stored, path, StoreManifest, error=StoreError, fix=again)
        kinds = {"file": str, "rows": int, "bytes": int, "sha256": str}
        for shard in manifest.shards:
            if not all(isinstance(shard.get(name), kind) for name, kind in kinds.items()):
                raise StoreError("The store's manifest is broken: a shard lacks its file, rows, bytes or sha256")
            path = folder / shard["file"]
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
        return int(self._starts[-1])

    def logits(self, rows: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
        """Return the baseline's float32 logits at store rows, shape (n, vocab_size).

        A store of log-probabilities returns these: they are normalised logits, rounded to float16.
        """
        states = sent_to(device, self.states(rows))
        return states.float() if self.manifest.kind == _LOG_PROBS else self._head.to(device).logits(states)

    @cached_property
    def _head(self) -> Head:
        return rebuild_head(self.manifest.model_config, self.head_weights())

    def head_weights(self) -> dict[str, torch.Tensor]:
        """Return the stored weights of the baseline's head; there are none where log-probabilities are stored."""
        return self._read(HEAD_FILE, str(self.manifest.head))

    def rows_of(self, keys: StateKeys) -> npt.NDArray[np.int64]:
        """Return the store's row of each key, shape (n,).

        A key may occur in several rows, whose states differ by rounding because their batches had other lengths. If the
        store holds all keys in the given order, those rows are returned, so that the same plan finds the states of the
        same batches. Otherwise the first row of each key is returned.
        """
        short, stored, order = self._index
        start = _find_sequence(stored, keys)
        if start is not None:
            return np.arange(start, start + len(keys))
        rows = np.zeros(len(keys), np.int64)
        missing = len(keys)
        if len(short):
            rows = order[np.searchsorted(short, _beginnings(keys)).clip(max=len(short) - 1)]
            missing = int((stored[rows] != keys).any(axis=1).sum())
        if missing:
            raise AlignmentError(
                f"The baseline store lacks {missing} of the {len(rows)} scored positions",
                fix="Evaluate baseline and variant on the same tasks, limit and seed, with the same tokenizer",
            )
        return rows

    @cached_property
    def _index(self) -> tuple[npt.NDArray[np.uint64], StateKeys, npt.NDArray[np.int64]]:
        """The beginnings of all keys in ascending order, all keys by row, and the row of each beginning."""
        stored = np.concatenate([np.zeros((0, 16), np.uint8), *(self._keys(s["file"]) for s in self.manifest.shards)])
        short = _beginnings(stored)
        order = np.argsort(short, kind="stable")
        return short[order], stored, order

    def states(self, rows: npt.NDArray[np.int64]) -> torch.Tensor:
        """Return the stored states (or log-probabilities) at store rows, shape (n, width), in a new tensor."""
        shard_of = np.searchsorted(self._starts, rows, side="right") - 1
        dtype = getattr(torch, self.manifest.dtype)
        out = torch.empty((len(rows), self.manifest.width), dtype=dtype)
        for number in np.unique(shard_of).tolist():
            here = np.flatnonzero(shard_of == number)
            within = torch.from_numpy(rows[here] - self._starts[number])
            out[torch.from_numpy(here)] = self._shard_states(number)[within]
        return out

    def _shard_states(self, number: int) -> torch.Tensor:
        states = self._open.pop(number, None)
        if states is None:
            shard = self.manifest.shards[number]
            tensors = self._read(shard["file"], shard["sha256"])
            if set(tensors) != {"rows", "keys", "targets"} or len(tensors["rows"]) != shard["rows"]:
                raise StoreError("A shard does not match the manifest", got=shard["file"])
            states = tensors["rows"]
        self._open[number] = states
        if len(self._open) > _OPEN_SHARDS:
            del self._open[next(iter(self._open))]
        return states

    def _keys(self, name: str) -> StateKeys:
        """Return the digests of one shard. Its SHA-256 is checked later, when its states are read."""
        try:
            with safe_open(self.folder / name, framework="np") as shard:
                return np.asarray(shard.get_tensor("keys"), dtype=np.uint8)
        except (SafetensorError, OSError) as error:
            raise StoreError(f"{name} of the baseline store is not a safetensors file: {error}") from error

    def _read(self, name: str, sha256: str) -> dict[str, torch.Tensor]:
        try:
            digest = sha256_file(self.folder / name)
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


def _beginnings(keys: StateKeys) -> npt.NDArray[np.uint64]:
    """Return the first half of each key as a number."""
    return np.ascontiguousarray(keys[:, :8]).view(np.uint64)[:, 0]


def _find_sequence(stored: StateKeys, keys: StateKeys) -> int | None:
    """Return where `stored` first holds all `keys`, in order and without a gap; None where it does not."""
    n = len(keys)
    if not 0 < n <= len(stored):
        return None
    starts = np.arange(len(stored) - n + 1)
    for probe in np.unique(np.linspace(0, n - 1, _PROBES, dtype=np.int64)):  # many texts begin with the same token
        starts = starts[(stored[starts + probe] == keys[probe]).all(axis=1)]
    return next((s for s in starts.tolist() if np.array_equal(stored[s : s + n], keys)), None)


def _check_owner(manifest: StoreManifest, baseline: IdentifiedModel) -> None:
    for what, stored, now in (
        ("weights", manifest.weights, baseline.weights),
        ("tokenizer", manifest.tokenizer, tokenizer_hash(baseline.tokenizer)),
        ("dtype", manifest.model_dtype, _name(baseline.dtype)),
    ):
        if stored != now:
            raise StoreError(
                f"The baseline store was written with other {what}",
                allowed=stored[:16],
                got=now[:16],
                fix="Evaluate the baseline again",
            )


@dataclass(frozen=True)
class SentHead:
    """What the baseline's head is rebuilt from, as a process sends it to others."""

    manifest: StoreManifest
    file: bytes  # The weights in safetensors format; empty for log-probabilities

    @classmethod
    def of(cls, store: StateStore) -> "SentHead":
        return cls(store.manifest, save(store.head_weights()) if store.manifest.head is not None else b"")

    @cached_property
    def rebuilt(self) -> Head:
        return rebuild_head(self.manifest.model_config, load(self.file))


@dataclass(frozen=True)
class SentStates:
    """Stored rows of one shard, in the order of its plan: what a `StateStore` is in one process."""

    head: SentHead
    rows: npt.NDArray[np.uint8]  # shape (n, bytes of a row)

    def rows_of(self, keys: StateKeys) -> npt.NDArray[np.int64]:
        """Return the number of each row: the sender has put them into the order of the keys."""
        return np.arange(len(keys), dtype=np.int64)

    def logits(self, rows: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
        manifest = self.head.manifest
        states = sent_to(device, from_bytes(self.rows[rows], manifest.dtype, (len(rows), -1)))
        return states.float() if manifest.kind == _LOG_PROBS else self.head.rebuilt.to(device).logits(states)


def as_bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Return the bytes of a tensor, one row per row of the tensor: numpy and Arrow have no bfloat16."""
    flat = tensor.contiguous().view(torch.uint8).numpy()
    return flat.reshape(len(tensor), -1)


def from_bytes(raw: npt.NDArray[np.uint8], dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the tensor of these bytes, in memory of its own."""
    return torch.from_numpy(np.array(raw).reshape(-1)).view(getattr(torch, dtype)).reshape(shape)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
