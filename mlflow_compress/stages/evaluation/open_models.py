"""Models of a stage: without their weights (`light`), and loaded here or on workers (`load`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from mlflow_compress.config import EngineConfig, InferenceConfig, SourceConfig
from mlflow_compress.models.light_model import LightModel, open_light
from mlflow_compress.models.loading import LoadConfig, LoadedModel, load_model
from mlflow_compress.scoring.cluster.remote_model import RemoteModel
from mlflow_compress.scoring.cluster.workers import current, started

HERE = EngineConfig()


@contextmanager
def engine_started(running: EngineConfig, source: SourceConfig) -> Iterator[None]:
    """Within this block, the workers of ``engine=ray`` are there. Blocks within blocks share them."""
    on_gpu = {"auto": None, "cpu": False, "cuda": True}[source.device]
    with started(running, on_gpu=on_gpu) if running.engine == "ray" else nullcontext():
        yield


def light(path: str, source: SourceConfig, inference: InferenceConfig, running: EngineConfig = HERE) -> LightModel:
    """Return a model without its weights: tokenizer, configuration and hashes, with the stage's dtype and device.

    With ``engine=ray`` its device is that of the workers (see `engine_started`), and they load it.
    """
    device = "cpu" if running.engine == "ray" else source.device
    model = open_light(
        LoadConfig(path=path, dtype=inference.dtype, device=device, trust_remote_code=source.trust_remote_code)
    )
    return RemoteModel.of(model, current()) if running.engine == "ray" else model


def load(model: LightModel) -> LoadedModel | RemoteModel:
    """Return the model with its weights loaded, here or, when they are first needed, on the workers."""
    return model if isinstance(model, RemoteModel) else load_model(model.config)
