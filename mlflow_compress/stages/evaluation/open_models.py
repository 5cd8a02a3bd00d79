"""Models of a stage: without their weights (`light`), and loaded here or on workers (`load`)."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from mlflow_compress.config import EngineConfig, InferenceConfig, SourceConfig
from mlflow_compress.errors import ConfigError
from mlflow_compress.models.light_model import LightModel, open_light
from mlflow_compress.models.loading import LoadConfig, LoadedModel, load_model
from mlflow_compress.models.placement import BALANCED
from mlflow_compress.scoring.cluster.cluster_worker import ClusterWorker
from mlflow_compress.scoring.cluster.remote_model import RemoteModel
from mlflow_compress.scoring.cluster.started_workers import current, started
from mlflow_compress.scoring.cluster.workers import Workers
from mlflow_compress.scoring.vllm import engines
from mlflow_compress.scoring.vllm.vllm_model import VllmModel

HERE = EngineConfig()
RunningModel = LoadedModel | RemoteModel | VllmModel


@contextmanager
def engine_started(
    running: EngineConfig, source: SourceConfig, kind: type[ClusterWorker] = ClusterWorker
) -> Iterator[Workers | None]:
    """Within this block, the workers of ``engine=ray``, or vLLM, are there; workers are yielded. Blocks share them."""
    on_gpu = {"auto": None, "cpu": False, "cuda": True}.get(source.device)
    if running.engine != "local" and source.device == BALANCED:
        raise ConfigError(
            f"Models are placed by engine={running.engine} itself", got="device=balanced", fix="Use engine=local"
        )
    with ExitStack() as stack:
        workers = None
        if running.engine == "ray":
            workers = stack.enter_context(started(running, on_gpu=on_gpu, kind=kind))
        elif running.engine == "vllm":
            stack.enter_context(engines.started(running))
        yield workers


def light(path: str, source: SourceConfig, inference: InferenceConfig, running: EngineConfig = HERE) -> LightModel:
    """Return a model without its weights: tokenizer, configuration and hashes, with the stage's dtype and device.

    With ``engine=ray`` its device is that of the workers (see `engine_started`), and they load it. With
    ``engine=vllm`` its body runs in vLLM, and its head on this device.
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
    if running.engine == "ray":
        return RemoteModel.of(model, current())
    return VllmModel.of(model, engines.current()) if running.engine == "vllm" else model


def load(model: LightModel) -> RunningModel:
    """Return the model with its weights loaded, here or, when they are first needed, where it runs."""
    return model if isinstance(model, RemoteModel | VllmModel) else load_model(model.config)


class OneLoaded:
    """Loads models, one at a time: the last one stays in memory until another is asked for, or until `free`."""

    def __init__(self) -> None:
        self._loaded: RunningModel | None = None
        self._config: LoadConfig | None = None

    def __call__(self, model: LightModel) -> RunningModel:
        """Return the model with its weights loaded; without loading it again where it is the last one."""
        if self._loaded is None or self._config != model.config:
            self.free()
            self._loaded, self._config = load(model), model.config
        return self._loaded

    def free(self) -> None:
        """Let go of the model."""
        self._loaded = None
        gc.collect()  # modules have reference cycles: without this, two models would be in memory
