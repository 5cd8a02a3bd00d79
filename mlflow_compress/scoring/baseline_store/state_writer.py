"""Write a baseline's head inputs, for `StateStore` to read."""

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
    STATES,
    Keys,
    StoreManifest,
    write_file,
)
from mlflow_compress.scoring.forward.head import rebuild_head

logger = logging.getLogger(__name__)


class StateWriter:
    """Write a baseline's states; use as a context manager: only a block that ends well leaves a readable store.

    At the first rows the head is rebuilt from what is stored, as a reader will do. Where that does not give the model's
    own log-probabilities, float16 log-probabilities are stored instead, and the manifest says why.

    Parameters
    ----------
    folder : Path
        New or empty; a half-written store in it is written over.
    loaded : LoadedModel
        The baseline.
    shard_bytes : int
        States gathered before a shard is written.
    part : str
        Where several processes write one store: what the files of this one are named after; the process that leads has
        none. It alone writes the head and the manifest, with the others' shards in it (see `adopt`).

    Raises
    ------
    StoreError
        When the folder holds a finished store, or cannot be written.
    """

    def __init__(self, folder: Path, loaded: LoadedModel, *, shard_bytes: int = 64 << 20, part: str = "") -> None:
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
        """The baseline's configuration as the manifest keeps it."""
        config = self.loaded.model.config
        raw = {"model_type": config.model_type, **config.to_diff_dict()}
        return dict(json.loads(json.dumps(raw, default=str)))

    def begin(self, limits: dict[str, int], *, label: str, path: str, plan: str) -> None:
        """Note the next pass; all passes that write into one store share their limits."""
        if self._limits not in ({}, limits):
            raise StoreError(
                "Passes into one store must share their limits", allowed=str(self._limits), got=str(limits)
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
            What the model's head made of them.
        keys, targets : ndarray, shapes (n, 16) and (n,)
            Digests of the tokens read, and the first target of each row.
        """
        if self._kind is None:
            self._choose(states, logits)
        rows = states if self._kind == STATES else torch.log_softmax(logits, dim=1).half()
        self._pending.append((rows.detach().cpu(), keys, targets))
        self._pending_bytes += rows.numel() * rows.element_size()
        if self._pending_bytes >= self.shard_bytes:
            self.flush()

    def restore(self, shards: list[dict[str, Any]], *, kind: str, reason: str | None, head: str | None) -> None:
        """Go on after `shards`, which an interrupted run of the same pass had written."""
        for shard in shards:
            path = self.folder / str(shard["file"])
            if not path.is_file() or path.stat().st_size != shard["bytes"]:
                raise StoreError(f"{path.name} of the interrupted store is missing or cut short", got=str(self.folder))
        self.shards, self._pending, self._pending_bytes = list(shards), [], 0
        self._kind, self._reason, self._head_hash = kind, reason, head

    def progress(self) -> dict[str, Any]:
        """Write what is pending, and return what `restore` takes."""
        self.flush()
        return {"shards": self.shards, "kind": self._kind, "reason": self._reason, "head": self._head_hash}

    def part_name(self, share: int) -> str:
        """Return the `part` of the process that captures a share of the pass begun last."""
        return f"{len(self._passes)}-{share}"

    def adopt(self, shards: list[dict[str, Any]], *, kind: str, reason: str | None, head: str | None) -> None:
        """Take in what another process's writer has written of the same pass: the values of its `progress`.

        Raises
        ------
        StoreError
            When it had to store another kind of rows.
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
        """Write what is left and the manifest, which makes the store readable."""
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

    def _choose(self, states: torch.Tensor, logits: torch.Tensor) -> None:
        self._reason = self._store_head(states, logits)
        self._kind = STATES if self._reason is None else LOG_PROBS
        if self._reason is not None:
            logger.warning("The baseline store holds float16 log-probabilities: %s", self._reason)

    def _store_head(self, states: torch.Tensor, logits: torch.Tensor) -> str | None:
        """Write the head's weights; return why a reader could not rebuild the head from them, None if it can."""
        module = self.loaded.model.get_output_embeddings()
        if type(module) is not torch.nn.Linear:
            return f"the head is a {type(module).__name__}, not a plain linear layer"
        if states.shape[1] != module.weight.shape[1]:
            return "the model does not separate its body from its head"
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
