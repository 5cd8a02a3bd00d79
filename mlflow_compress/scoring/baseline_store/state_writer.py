"""The files of a baseline store, and how a baseline's states are written; `StateStore` reads them."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save

from mlflow_compress import files as atomic
from mlflow_compress.errors import StoreError, UnsupportedError
from mlflow_compress.models.identity import IdentifiedModel, tokenizer_hash
from mlflow_compress.scoring.forward.head import rebuild_head

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


logger = logging.getLogger(__name__)


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
