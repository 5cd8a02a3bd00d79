"""A model in a folder, whichever engine runs it: states are stored, and compared exactly."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from mlflow_compress.engines.interface import Abilities, ModelRequest, OwnKernels
from mlflow_compress.models import checkpoint_config
from mlflow_compress.models.identity import end_tokens, rendering_hash, tokenizer_hash
from mlflow_compress.models.loading import LightModel, LoadConfig, LoadedModel, open_light
from mlflow_compress.scoring.baseline_store import MANIFEST, StateStore, StateWriter
from mlflow_compress.scoring.child_process import processes_per_pass
from mlflow_compress.scoring.engine import RunsElsewhere, Scorer, ScoringConfig
from mlflow_compress.scoring.engine_identity import engine_identity


@dataclass(frozen=True)
class FileModel(LightModel):
    """An `EngineModel` of a checkpoint. A subclass says how it is loaded, or (`execution`, `decode`) where it runs."""

    abilities: ClassVar[Abilities]
    at_server: ClassVar[None] = None
    answer_identity: ClassVar[dict[str, object]] = {}

    @classmethod
    def of(cls, light: LightModel, **more: Any) -> Self:
        """Return the model with the fields of `light`, and these."""
        return cls(**{one.name: getattr(light, one.name) for one in fields(LightModel)}, **more)

    @property
    def own_kernels(self) -> OwnKernels | None:
        """Return None: transformers computes it, and has loaded it again after it was compressed."""
        return None

    @property
    def identity(self) -> dict[str, object]:
        return {
            "weights": self.weights,
            "tokenizer": tokenizer_hash(self.tokenizer),
            "chat_template": rendering_hash(self.tokenizer),
            "eos_token_id": end_tokens(self.path),
            "max_length": self.max_length,
            "dtype": str(self.dtype),
            "device": self.device.type,
            **engine_identity(self.path),
            **self.engine,
        }

    def scorer(self, loaded: LoadedModel | RunsElsewhere, *, after: StateStore | None = None) -> Scorer:
        """Return what scores with it; `after` a stored pass with batches of half the size."""
        half = None if after is None else int(after.manifest.limits["batch_tokens"]) // 2
        return Scorer(loaded, ScoringConfig(batch_tokens=half, processes=processes_per_pass()))

    def capture(self, folder: Path, loaded: LoadedModel | RunsElsewhere) -> StateWriter:
        (folder / MANIFEST).unlink(missing_ok=True)
        return StateWriter(folder, loaded)

    def stored(self, folder: Path) -> StateStore:
        return StateStore.open(folder, baseline=self)

    def comparable_with(self, stored: object) -> StateStore | None:
        """Return stored states; None of a server's lists: there only answers compare."""
        return stored if isinstance(stored, StateStore) else None

    def notice(self) -> str:
        """Return which files of the folder are no part of the model."""
        unused = checkpoint_config.unused_weights(self.path)
        return f"Not loaded, and not counted: {', '.join(unused)} in {self.path}" if unused else ""


def open_request(request: ModelRequest, *, device: str | None = None, computes_on: str | None = None) -> LightModel:
    """Return the model of a request without its weights, with the dtype and the device that are asked for.

    Dtype "auto" is the checkpoint's own, but float32 on CPUs. `computes_on` is the type of device where that is not
    the one on which the model is opened.
    """
    source, dtype = request.source, request.inference.dtype
    model = open_light(
        LoadConfig(
            path=request.address,
            dtype=dtype,
            device=device or source.device,
            max_memory=source.max_memory,
            offload_dir=source.offload_dir,
            trust_remote_code=source.trust_remote_code,
        )
    )
    if dtype != "auto":
        return model
    kind = torch.float32 if (computes_on or model.device.type) == "cpu" else model.dtype
    return replace(model, dtype=kind, config=replace(model.config, dtype=str(kind).removeprefix("torch.")))
