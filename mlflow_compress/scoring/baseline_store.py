"""A baseline's states on disk, from which its logits are computed again for every variant.

For each scored position the store holds the final hidden state (the input of the language-model head) in the model's
own dtype, a digest of all tokens up to this position, and the target. The log-probabilities of the vocabulary would be
30 times as large. The head's weights are stored once. Where the head cannot be rebuilt from them, the store holds
float16 log-probabilities instead, and its manifest says why. A variant's plan finds its rows by the digest; tokens that
the baseline was not scored on are refused.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save

from mlflow_compress import files as atomic
from mlflow_compress.errors import AlignmentError, StoreError, UnsupportedError
from mlflow_compress.files import read_json_object, read_typed
from mlflow_compress.models.identity import IdentifiedModel, tokenizer_hash
from mlflow_compress.scoring.forward.head import Head, LanguageModelHead, rebuild_head

Keys = npt.NDArray[np.uint8]
FORMAT = 3
MANIFEST = "manifest.json"
HEAD_FILE = "head.safetensors"
SHARD_BYTES = 64 << 20  # of states in one file
STATES, LOG_PROBS = "states", "log_probs"
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


@runtime_checkable
class ModelWithHead(Protocol):
    """Interface of a model whose head is in this process: a `LoadedModel`, or one whose body another engine runs."""

    @property
    def model(self) -> Any:
        """The transformers model; its body needs no weights."""

    @property
    def stored_config(self) -> dict[str, Any]:
        """Its configuration, from which the head's own code is rebuilt."""


class StoredRows:
    """Turns a model's states into the rows that are stored.

    At the first rows the head is rebuilt from its weights, as a reader does it. If the rebuilt head does not give the
    model's own logits, float16 log-probabilities are stored instead of states.

    `kind` is "states" or "log_probs" (None before the first rows); `reason` says why it is log-probabilities.
    """

    def __init__(self, loaded: ModelWithHead) -> None:
        self._loaded = loaded
        self.kind: str | None = None
        self.reason: str | None = None

    def rows(self, states: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Return the rows to store, on the CPU: shape (n, hidden_size), or (n, vocab_size) for log-probabilities.

        `states` are the head's inputs, shape (n, hidden_size), `logits` the model's logits of them, (n, vocab_size).
        """
        if self.kind is None:
            self.reason = self._reason_for_log_probs(states, logits)
            self.kind = STATES if self.reason is None else LOG_PROBS
            if self.reason is not None:
                logger.warning("The baseline store holds float16 log-probabilities: %s", self.reason)
        rows = states if self.kind == STATES else torch.log_softmax(logits, dim=1).half()
        return rows.detach().cpu()

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


def head_file(loaded: ModelWithHead) -> bytes:
    """Return the content of the file with the weights of a model's head, in safetensors format."""
    return bytes(save(_head_weights(loaded.model.get_output_embeddings())))


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


@dataclass(frozen=True)
class CapturedRows:
    """Consecutive rows of a pass, as they are stored."""

    row: int  # Number of the first row in the pass
    rows: torch.Tensor  # States, or log-probabilities; on the CPU; shape (n, width)
    keys: Keys  # Per row: digest of all tokens up to it, and its first target
    targets: npt.NDArray[np.int32]
    kind: str  # As in `StoredRows`
    reason: str | None


class StateWriter:
    """Writes a baseline's states. Use it as a context manager: the store is readable once the block ends without error.

    What is stored of each row, states or log-probabilities, is chosen at the first rows (see `StoredRows`).

    `folder` is new or empty; an unfinished store in it is overwritten. `shard_bytes` are bytes of states per shard.

    Raises `StoreError` when the folder holds a finished store, or cannot be written.
    """

    def __init__(self, folder: Path, loaded: StoredModel, *, shard_bytes: int = SHARD_BYTES) -> None:
        self.folder = Path(folder)
        self.loaded = loaded
        self.shard_bytes = shard_bytes
        if (self.folder / MANIFEST).exists():
            raise StoreError("The folder holds a finished store", got=str(folder), fix="Give another, or delete it")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._stored = StoredRows(loaded) if isinstance(loaded, ModelWithHead) else None
        self._pending: list[CapturedRows] = []
        self._written: list[dict[str, Any]] = []
        self.shards: list[dict[str, Any]] = []
        self._limits: dict[str, int] = {}
        self._passes: list[dict[str, str]] = []
        self._kind: str | None = None
        self._reason: str | None = None
        self._head_hash: str | None = None

    def __enter__(self) -> Self:
        return self

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
        self, row: int, states: torch.Tensor, logits: torch.Tensor, keys: Keys, targets: npt.NDArray[np.int32]
    ) -> None:
        """Add rows of the model in this process.

        `row` is the number of the first one in the pass. `states` are the head's inputs, shape (n, hidden_size),
        `logits` the model's float32 logits of them, (n, vocab_size). `keys` (n, 16) are digests of all tokens up to a
        row, `targets` (n,) its first target.
        """
        assert self._stored is not None  # a model on workers captures there
        rows = self._stored.rows(states, logits)
        self._pending.append(CapturedRows(row, rows, keys, targets, str(self._stored.kind), self._stored.reason))
        if sum(part.rows.nbytes for part in self._pending) >= self.shard_bytes:
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
        self._know(captured.kind, captured.reason, head)
        self._write([captured])
        return self.take()

    def adopt(self, written: Sequence[Mapping[str, Any]]) -> None:
        """Add to the store what `take` has returned in one pass, now or in an interrupted run, in the order of rows.

        Raises `StoreError` when a file is missing or cut short.
        """
        for part in written:
            for shard in part["shards"]:
                path = self.folder / str(shard["file"])
                if not path.is_file() or path.stat().st_size != shard["bytes"]:
                    raise StoreError(
                        f"{path.name} of the interrupted store is missing or cut short", got=str(self.folder)
                    )
            if self._kind is None:
                self._kind, self._reason, self._head_hash = part["kind"], part["reason"], part["head"]
            self._check_kind(part["kind"], part["reason"])
            self.shards += part["shards"]

    def close(self) -> None:
        """Write the manifest, which makes the store readable, and delete what an interrupted run has left."""
        dtypes, widths = {s["dtype"] for s in self.shards}, {s["width"] for s in self.shards}
        if len(dtypes) != 1 or len(widths) != 1:
            raise StoreError("A store holds rows of one dtype and width", got=f"{sorted(dtypes)}, {sorted(widths)}")
        files = {str(shard["file"]) for shard in self.shards}
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
            model_dtype=str(self.loaded.dtype).removeprefix("torch."),
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
        if self._pending:
            first = self._pending[0]
            assert isinstance(self.loaded, ModelWithHead)
            self._know(first.kind, first.reason, partial(head_file, self.loaded))
            self._write(self._pending)
            self._pending = []

    def _know(self, kind: str, reason: str | None, head: Callable[[], bytes]) -> None:
        """Take over, or check, what is stored of each row; write the head's weights once."""
        if self._kind is None:
            self._kind, self._reason = kind, reason
        self._check_kind(kind, reason)
        if kind == STATES and self._head_hash is None:
            self._head_hash = write_file(self.folder / HEAD_FILE, head())

    def _check_kind(self, kind: str, reason: str | None) -> None:
        if kind != self._kind:
            raise StoreError(
                f"Parts of one pass could not agree on what to store: {self._reason or reason}",
                allowed=str(self._kind),
                got=kind,
                fix="Evaluate the baseline in one process, with engine=local",
            )

    def _write(self, parts: Sequence[CapturedRows]) -> None:
        tensors = {
            "rows": torch.cat([part.rows for part in parts]),
            "keys": torch.from_numpy(np.concatenate([part.keys for part in parts])),
            "targets": torch.from_numpy(np.concatenate([part.targets for part in parts])),
        }
        data = save(tensors)
        name = f"states-{len(self._passes)}-{parts[0].row:09d}.safetensors"
        digest = write_file(self.folder / name, data)
        dtype = str(tensors["rows"].dtype).removeprefix("torch.")
        shard = {"file": name, "rows": len(tensors["rows"]), "bytes": len(data), "sha256": digest, "dtype": dtype}
        self._written.append({**shard, "width": int(tensors["rows"].shape[1])})


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
