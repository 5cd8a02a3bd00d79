"""Models of a stage: without their weights (`light`), and loaded here or on workers (`load`)."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from mlflow_compress.config import EngineConfig, InferenceConfig, SourceConfig
from mlflow_compress.errors import ConfigError
from mlflow_compress.models.light_model import LightModel, open_light
from mlflow_compress.models.loading import LoadConfig, LoadedModel, load_model
from mlflow_compress.models.placement import BALANCED
from mlflow_compress.scoring.cluster.cluster_worker import ClusterWorker
from mlflow_compress.scoring.cluster.remote_model import RemoteModel
from mlflow_compress.scoring.cluster.started_workers import current, started
from mlflow_compress.scoring.cluster.workers import Workers

HERE = EngineConfig()


@contextmanager
def engine_started(
    running: EngineConfig, source: SourceConfig, kind: type[ClusterWorker] = ClusterWorker
) -> Iterator[Workers | None]:
    """Yield the workers of ``engine=ray``, which are there within the block. Blocks within blocks share them."""
    on_gpu = {"auto": None, "cpu": False, "cuda": True}.get(source.device)
    if running.engine == "ray" and source.device == BALANCED:
        raise ConfigError("A worker of engine=ray holds a whole model", got="device=balanced", fix="Use engine=local")
    with started(running, on_gpu=on_gpu, kind=kind) if running.engine == "ray" else nullcontext() as workers:
        yield workers


def light(path: str, source: SourceConfig, inference: InferenceConfig, running: EngineConfig = HERE) -> LightModel:
    """Return a model without its weights: tokenizer, configuration and hashes, with the stage's dtype and device.

    With ``engine=ray`` its device is that of the workers (see `engine_started`), and they load it.
    """
    device = "cpu" if running.engine == "ray" else source.device
    model = open_light(
        LoadConfig(
            path=path,
            dtype=inference.dtype,
            device=device,
            max_memory=source.max_memory,
            offload_dir=source.offload_dir,
            trust_remote_code=source.trust_remote_code,
        )
    )
    return RemoteModel.of(model, current()) if running.engine == "ray" else model


def load(model: LightModel) -> LoadedModel | RemoteModel:
    """Return the model with its weights loaded, here or, when they are first needed, on the workers."""
    return model if isinstance(model, RemoteModel) else load_model(model.config)


class OneLoaded:
    """Loads models, one at a time: the last one stays in memory until another is asked for, or until `free`."""

    def __init__(self) -> None:
        self._loaded: LoadedModel | RemoteModel | None = None
        self._config: LoadConfig | None = None

    def __call__(self, model: LightModel) -> LoadedModel | RemoteModel:
        """Return the model with its weights loaded; without loading it again where it is the last one."""
        if self._loaded is None or self._config != model.config:
            self.free()
            self._loaded, self._config = load(model), model.config
        return self._loaded

    def free(self) -> None:
        """Let go of the model."""
        self._loaded = None
        gc.collect()  # modules have reference cycles: without this, two models would be in memory
