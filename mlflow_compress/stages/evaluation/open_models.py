"""Models of a stage: without their weights (`light`), and loaded here or on workers (`load`)."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import overload

from mlflow_compress.config import (
    EngineConfig,
    EvaluateConfig,
    InferenceConfig,
    JudgeConfig,
    SourceConfig,
    is_endpoint,
)
from mlflow_compress.errors import ConfigError
from mlflow_compress.models.light_model import LightModel, open_light
from mlflow_compress.models.loading import LoadConfig, LoadedModel, load_model
from mlflow_compress.models.placement import BALANCED
from mlflow_compress.scoring.cluster.cluster_worker import ClusterWorker
from mlflow_compress.scoring.cluster.remote_model import RemoteModel
from mlflow_compress.scoring.cluster.started_workers import current, started
from mlflow_compress.scoring.cluster.workers import Workers
from mlflow_compress.scoring.endpoint.served_model import ServedModel
from mlflow_compress.scoring.vllm import engines
from mlflow_compress.scoring.vllm.vllm_model import VllmModel
from mlflow_compress.stages.evaluation.served import open_served
from mlflow_compress.stages.model_names import baseline_label, folder_or_hub, model_path

HERE = EngineConfig()
RunningModel = LoadedModel | RemoteModel | VllmModel

OpenModel = LightModel | ServedModel
"""A model that a stage knows: without its weights, or with a server that has them."""


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


def open_baseline(config: EvaluateConfig | JudgeConfig) -> OpenModel:
    """Return a stage's baseline without its weights; of a served one, what its server can is found out."""
    if is_endpoint(config.source.model):
        names = {"parameter": "model", "model_parameter": "baseline_served_model"}
        return open_served(config.source.model, baseline_label(config), config.served, _reader(config), **names)
    with folder_or_hub("model", model_path(config.source.model)):
        return light(model_path(config.source.model), config.source, config.inference, config.running)


def open_variant(config: EvaluateConfig | JudgeConfig, base: OpenModel) -> OpenModel:
    """Return a stage's variant without its weights; a served one has the baseline's tokenizer, or the one given."""
    if not is_endpoint(config.checkpoint):
        return light(str(config.checkpoint), config.source, config.inference, config.running)
    reader = base if config.served.tokenizer is None else _reader(config)
    names = {"parameter": "checkpoint", "model_parameter": "served_model"}
    return open_served(str(config.checkpoint), str(config.served.served_model), config.served, reader, **names)


def _reader(config: EvaluateConfig | JudgeConfig) -> LightModel:
    """Return the model whose tokenizer served models have."""
    if config.served.tokenizer is None:
        raise ConfigError("Parameter 'tokenizer' must be given with a served baseline", allowed="a folder or a hub id")
    with folder_or_hub("tokenizer", config.served.tokenizer):
        # Its weights are not read: any dtype will do.
        return light(config.served.tokenizer, config.source, config.inference.model_copy(update={"dtype": "float32"}))


@overload
def load(model: LightModel) -> RunningModel: ...


@overload
def load(model: OpenModel) -> RunningModel | ServedModel: ...


def load(model: OpenModel) -> RunningModel | ServedModel:
    """Return the model with its weights loaded, here or, when they are first needed, on the workers."""
    return model if isinstance(model, RemoteModel | VllmModel | ServedModel) else load_model(model.config)


class OneLoaded:
    """Loads models, one at a time: the last one stays in memory until another is asked for, or until `free`."""

    def __init__(self) -> None:
        self._loaded: RunningModel | None = None
        self._config: LoadConfig | None = None

    @overload
    def __call__(self, model: LightModel) -> RunningModel: ...

    @overload
    def __call__(self, model: OpenModel) -> RunningModel | ServedModel: ...

    def __call__(self, model: OpenModel) -> RunningModel | ServedModel:
        """Return the model with its weights loaded; without loading it again where it is the last one."""
        if isinstance(model, ServedModel):
            return model
        if self._loaded is None or self._config != model.config:
            self.free()
            self._loaded, self._config = load(model), model.config
        return self._loaded

    def free(self) -> None:
        """Let go of the model."""
        self._loaded = None
        gc.collect()  # modules have reference cycles: without this, two models would be in memory
