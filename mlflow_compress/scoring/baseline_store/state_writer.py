"""Writes a baseline's states, which `StateStore` reads."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save

from mlflow_compress.errors import StoreError, UnsupportedError
from mlflow_compress.models.loading import LoadedModel, tokenizer_hash
from mlflow_compress.models.memory_alignment import rounding_identity
from mlflow_compress.scoring.baseline_store.store_manifest import (
    FORMAT,
    HEAD_FILE,
    LOG_PROBS,
    MANIFEST,
    SHARD_BYTES,
    STATES,
    Keys,
    StoreManifest,
    write_file,
)
from mlflow_compress.scoring.forward.head import rebuild_head

logger = logging.getLogger(__name__)


class StateWriter:
    """Writes a baseline's states. Use it as a context manager: the store is readable once the block ends without error.

    At the first rows the head is rebuilt from its stored weights, as a reader does it. If the rebuilt head does not
    give the model's own logits, float16 log-probabilities are stored instead, and the manifest says why.

    Parameters
    ----------
    folder : Path
        New or empty. An unfinished store in it is overwritten.
    loaded : LoadedModel
        The baseline.
    shard_bytes : int
        Bytes of states per shard.
    part : str
        Used when several processes write one store: goes into the names of this process's files. It is empty for the
        leading process, which writes the head and the manifest, and adds the others' shards (see `adopt`).

    Raises
    ------
    StoreError
        When the folder holds a finished store, or cannot be written.
    """

    def __init__(self, folder: Path, loaded: LoadedModel, *, shard_bytes: int = SHARD_BYTES, part: str = "") -> None:
        self.folder = Path(folder)
        self.loaded = loaded
        self.shard_bytes = shard_bytes
        self._part = part
        if (self.folder / MANIFEST).exists():
            raise StoreError("The folder holds a finished store", got=str(folder), fix="Give another, or delete it")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._pending: list[tuple[torch.Tensor, Keys, npt.NDArray[np.int32]]] = []
        self._pending_bytes = 0
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

    @property
    def model_config(self) -> dict[str, Any]:
        """The baseline's configuration as the manifest stores it."""
        config = self.loaded.model.config
        raw = {"model_type": config.model_type, **config.to_diff_dict()}
        return dict(json.loads(json.dumps(raw, default=str)))

    def begin(self, limits: dict[str, int], *, label: str, path: str, plan: str) -> None:
        """Record the next pass in the manifest; all passes into one store must have the same limits."""
        if self._limits not in ({}, limits):
            raise StoreError(
                "Passes into one store must have the same limits", allowed=str(self._limits), got=str(limits)
            )
        self._limits = dict(limits)
        self._passes.append({"label": label, "path": path, "plan": plan})

    def append(self, states: torch.Tensor, logits: torch.Tensor, keys: Keys, targets: npt.NDArray[np.int32]) -> None:
        """Add rows.

        Parameters
        ----------
        states : Tensor, shape (n, hidden_size)
            The head's inputs.
        logits : Tensor of float32, shape (n, vocab_size)
            The model's logits of these states.
        keys, targets : ndarray, shapes (n, 16) and (n,)
            Per row: digest of all tokens up to it, and its first target.
        """
        if self._kind is None:
            self._choose_kind(states, logits)
        rows = states if self._kind == STATES else torch.log_softmax(logits, dim=1).half()
        self._pending.append((rows.detach().cpu(), keys, targets))
        self._pending_bytes += rows.numel() * rows.element_size()
        if self._pending_bytes >= self.shard_bytes:
            self.flush()

    def restore(self, shards: list[dict[str, Any]], *, kind: str, reason: str | None, head: str | None) -> None:
        """Continue after `shards`, which an interrupted run of the same pass has written."""
        for shard in shards:
            path = self.folder / str(shard["file"])
            if not path.is_file() or path.stat().st_size != shard["bytes"]:
                raise StoreError(f"{path.name} of the interrupted store is missing or cut short", got=str(self.folder))
        self.shards, self._pending, self._pending_bytes = list(shards), [], 0
        self._kind, self._reason, self._head_hash = kind, reason, head

    def progress(self) -> dict[str, Any]:
        """Write pending rows, and return the arguments of `restore`."""
        self.flush()
        return {"shards": self.shards, "kind": self._kind, "reason": self._reason, "head": self._head_hash}

    def part_name(self, share: int) -> str:
        """Return the `part` of the process that captures this share of the last begun pass."""
        return f"{len(self._passes)}-{share}"

    def adopt(self, shards: list[dict[str, Any]], *, kind: str, reason: str | None, head: str | None) -> None:
        """Add the shards that another process has written of the same pass; the arguments are its `progress`.

        Raises
        ------
        StoreError
            When the other process stored another kind of rows.
        """
        self.flush()
        if (kind, head) != (self._kind, self._head_hash):
            raise StoreError(
                f"The processes could not agree on what to store: {self._reason or reason}",
                allowed=str(self._kind),
                got=kind,
                fix="Evaluate the baseline with one process",
            )
        self.shards += shards

    def flush(self) -> None:
        """Write pending rows as a shard."""
        if not self._pending:
            return
        rows, keys, targets = zip(*self._pending, strict=True)
        tensors = {
            "rows": torch.cat(rows),
            "keys": torch.from_numpy(np.concatenate(keys)),
            "targets": torch.from_numpy(np.concatenate(targets)),
        }
        data = save(tensors)
        name = "-".join(["states", *filter(None, [self._part]), f"{len(self.shards):05d}"]) + ".safetensors"
        digest = write_file(self.folder / name, data)
        dtype = str(tensors["rows"].dtype).removeprefix("torch.")
        shard = {"file": name, "rows": len(tensors["rows"]), "bytes": len(data), "sha256": digest, "dtype": dtype}
        self.shards.append({**shard, "width": int(tensors["rows"].shape[1])})
        self._pending, self._pending_bytes = [], 0

    def close(self) -> None:
        """Write pending rows and the manifest, which makes the store readable."""
        self.flush()
        dtypes, widths = {s["dtype"] for s in self.shards}, {s["width"] for s in self.shards}
        if len(dtypes) != 1 or len(widths) != 1:
            raise StoreError("A store holds rows of one dtype and width", got=f"{sorted(dtypes)}, {sorted(widths)}")
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
            model_config=self.model_config,
            limits=self._limits,
            rounding=rounding_identity(self.loaded.device),
            passes=self._passes,
            shards=self.shards,
        )
        write_file(self.folder / MANIFEST, (json.dumps(asdict(manifest), indent=1) + "\n").encode())

    def _choose_kind(self, states: torch.Tensor, logits: torch.Tensor) -> None:
        self._reason = self._store_head(states, logits)
        self._kind = STATES if self._reason is None else LOG_PROBS
        if self._reason is not None:
            logger.warning("The baseline store holds float16 log-probabilities: %s", self._reason)

    def _store_head(self, states: torch.Tensor, logits: torch.Tensor) -> str | None:
        """Write the head's weights, and return None; or return why a reader could not rebuild the head from them."""
        module = self.loaded.model.get_output_embeddings()
        if type(module) is not torch.nn.Linear:
            return f"the head is a {type(module).__name__}, not a plain linear layer"
        if states.shape[1] != module.weight.shape[1]:
            return "the model's body and head cannot be run separately"
        weights = {name: p.detach().cpu().contiguous() for name, p in module.state_dict().items()}
        try:
            rebuilt = rebuild_head(self.model_config, weights).to(states.device).logits(states).to(logits.device)
        except (UnsupportedError, ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
            return f"the head's code cannot be rebuilt from the configuration ({type(error).__name__}: {error})"
        if not torch.equal(rebuilt, logits):
            worst = float((rebuilt - logits).abs().max())
            return f"the rebuilt head's logits differ from the model's by up to {worst:.1e}"
        data = save(weights)
        self._head_hash = hashlib.sha256(data).hexdigest() if self._part else write_file(self.folder / HEAD_FILE, data)
        return None
