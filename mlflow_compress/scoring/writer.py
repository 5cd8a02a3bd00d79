"""Write a baseline's head inputs, for `StateStore` to read."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save

from mlflow_compress.errors import StoreError, UnsupportedError
from mlflow_compress.scoring.loading import LoadedModel, tokenizer_hash, weights_hash
from mlflow_compress.scoring.manifest import FORMAT, HEAD_FILE, MANIFEST, Keys, Manifest, write_file


class StateWriter:
    """Write a baseline's states; use as a context manager: only a block that ends well leaves a readable store.

    Parameters
    ----------
    folder : Path
        New or empty; a half-written store in it is written over.
    loaded : LoadedModel
        The baseline.
    shard_bytes : int
        States gathered before a shard is written.

    Raises
    ------
    UnsupportedError
        When the baseline's head is not a plain linear layer.
    StoreError
        When the folder holds a finished store, or cannot be written.
    """

    def __init__(self, folder: Path, loaded: LoadedModel, *, shard_bytes: int = 64 << 20) -> None:
        self.folder = Path(folder)
        self.loaded = loaded
        if (self.folder / MANIFEST).exists():
            raise StoreError(
                "The folder holds a finished store", got=str(folder), fix="Give another folder, or delete it"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        module = loaded.model.get_output_embeddings()
        if type(module) is not torch.nn.Linear:
            raise UnsupportedError(
                "The baseline's head is not a plain linear layer, its states cannot be stored",
                got=type(module).__name__,
                fix="Take the uncompressed model as the baseline",
            )
        weights = {name: p.detach().cpu().contiguous() for name, p in module.state_dict().items()}
        self._head_hash = write_file(self.folder / HEAD_FILE, save(weights))
        self._shard_bytes = shard_bytes
        self._pending: list[tuple[torch.Tensor, Keys, npt.NDArray[np.int32]]] = []
        self._pending_bytes = 0
        self._shards: list[dict[str, Any]] = []
        self._limits: dict[str, int] = {}
        self._passes: list[dict[str, str]] = []
        self._dtype: torch.dtype | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.close()

    def begin(self, limits: dict[str, int], *, label: str, path: str, plan: str) -> None:
        """Note the next pass; all passes that write into one store share their limits."""
        if self._limits not in ({}, limits):
            raise StoreError(
                "Passes into one store must share their limits", allowed=str(self._limits), got=str(limits)
            )
        self._limits = dict(limits)
        self._passes.append({"label": label, "path": path, "plan": plan})

    def append(self, states: torch.Tensor, keys: Keys, targets: npt.NDArray[np.int32]) -> None:
        """Add rows: states (n, hidden_size), keys (n, 16), the first target of each row (n,)."""
        if self._dtype not in (None, states.dtype):
            raise StoreError("The states changed their dtype", allowed=str(self._dtype), got=str(states.dtype))
        self._dtype = states.dtype
        self._pending.append((states.detach().cpu(), keys, targets))
        self._pending_bytes += states.numel() * states.element_size()
        if self._pending_bytes >= self._shard_bytes:
            self._flush()

    def close(self) -> None:
        """Write what is left and the manifest, which makes the store readable."""
        self._flush()
        model = self.loaded.model
        manifest = Manifest(
            format=FORMAT,
            weights=weights_hash(self.loaded.path),
            tokenizer=tokenizer_hash(self.loaded.tokenizer),
            head=self._head_hash,
            dtype=str(self._dtype).removeprefix("torch."),
            model_dtype=str(self.loaded.dtype).removeprefix("torch."),
            hidden_size=int(model.get_output_embeddings().weight.shape[1]),
            vocab_size=self.loaded.vocab_size,
            model_config={"model_type": model.config.model_type, **model.config.to_diff_dict()},
            limits=self._limits,
            passes=self._passes,
            shards=self._shards,
        )
        write_file(self.folder / MANIFEST, (json.dumps(asdict(manifest), indent=1, default=str) + "\n").encode())

    def _flush(self) -> None:
        if not self._pending:
            return
        states, keys, targets = zip(*self._pending, strict=True)
        tensors = {
            "states": torch.cat(states),
            "keys": torch.from_numpy(np.concatenate(keys)),
            "targets": torch.from_numpy(np.concatenate(targets)),
        }
        data = save(tensors)
        name = f"states-{len(self._shards):05d}.safetensors"
        digest = write_file(self.folder / name, data)
        self._shards.append({"file": name, "rows": len(tensors["states"]), "bytes": len(data), "sha256": digest})
        self._pending, self._pending_bytes = [], 0
