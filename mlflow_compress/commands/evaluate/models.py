"""Models of a stage: without their weights (`light`), and loaded here or on workers (`load`)."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import overload

from mlflow_compress import files as atomic
from mlflow_compress.commands.evaluate.parameters import EvaluateConfig
from mlflow_compress.commands.judge.parameters import JudgeConfig
from mlflow_compress.commands.shared.model_names import baseline_label, folder_or_hub, model_path
from mlflow_compress.config import ENDPOINT, EngineConfig, InferenceConfig, ServedConfig, SourceConfig, is_endpoint
from mlflow_compress.engines.endpoint.served_model import ServedModel
from mlflow_compress.engines.endpoint.server_probe import SAME, open_served_model
from mlflow_compress.engines.ray.cluster_worker import ClusterWorker
from mlflow_compress.engines.ray.remote_model import RemoteModel
from mlflow_compress.engines.ray.started_workers import current_workers, started_workers
from mlflow_compress.engines.ray.workers import Workers
from mlflow_compress.engines.vllm import vllm_process as engines
from mlflow_compress.engines.vllm.vllm_model import VllmModel
from mlflow_compress.errors import AlignmentError, ConfigError, EndpointError
from mlflow_compress.files import read_json_object
from mlflow_compress.models.identity import IdentifiedModel
from mlflow_compress.models.light_model import LightModel, open_light
from mlflow_compress.models.loading import LoadConfig, LoadedModel, load_model
from mlflow_compress.models.placement import BALANCED
from mlflow_compress.tracking.run_names import FACTS
from mlflow_compress.transport.addresses import SERVED_VARIABLE, check_served_address
from mlflow_compress.transport.endpoint import EndpointConfig, shown_url

KEY_VARIABLE = "ENDPOINT_API_KEY"
_NO_KEY = "none"  # what a server that asks for no key is sent


def endpoint_of(address: str, served: ServedConfig, *, parameter: str, model_parameter: str) -> EndpointConfig:
    """Return where and how a served model is called. `address` is the value of the parameter.

    Raises
    ------
    ConfigError
        The address is none, or holds a user, a password or a query, which would be recorded.
    """
    given = address.removeprefix(ENDPOINT)
    check_served_address(parameter, given)
    whole = os.environ.get(SERVED_VARIABLE, "").strip()
    return EndpointConfig(
        base_url=whole if whole and shown_url(whole) == given else given,
        key=os.environ.get(KEY_VARIABLE, "").strip() or _NO_KEY,
        timeout=served.endpoint_timeout,
        max_retries=served.endpoint_max_retries,
        concurrency=served.endpoint_concurrency,
        what="server of models",
        url_parameter=parameter,
        model_parameter=model_parameter,
        key_variable=KEY_VARIABLE,
        error=EndpointError,
    )


def open_served(
    address: str, name: str, served: ServedConfig, reader: IdentifiedModel, *, parameter: str, model_parameter: str
) -> ServedModel:
    """Return a served model, after its server was asked what it can. `reader` is the model whose tokenizer it has."""
    endpoint = endpoint_of(address, served, parameter=parameter, model_parameter=model_parameter)
    return open_served_model(endpoint, name, reader, chat=served.endpoint_chat)


def facts(model: ServedModel) -> dict[str, object]:
    """Return what the server can, and who it is, for a run: no address, no key."""
    return {"served_model": model.name, "weights": model.weights, **asdict(model.can)}


def recognise(model: ServedModel, earlier: object) -> None:
    """Refuse a server that answers a fixed text otherwise than it did: another model has its name.

    Parameters
    ----------
    model : ServedModel
    earlier : object
        What `facts` returned then.

    Raises
    ------
    AlignmentError
    """
    check_same_model(facts(model), earlier)


def check_same_model(now: Mapping[str, object], earlier: object) -> None:
    """Refuse what `recognise` refuses, from what `facts` returned now and then."""
    then = earlier.get("probe") if isinstance(earlier, dict) else None
    probe = now["probe"]
    assert isinstance(probe, list | tuple)
    if not isinstance(then, list | tuple) or len(then) != len(probe):
        return
    if any(abs(float(a) - b) > SAME for a, b in zip(then, probe, strict=True)):
        raise AlignmentError(
            f"The served model {now['served_model']!r} answers otherwise than when it was evaluated under this name",
            allowed=", ".join(f"{float(value):.2f}" for value in then),
            got=", ".join(f"{value:.2f}" for value in probe),
            fix="Serve each variant under a name of its own, and give it as served_model",
        )


def recognised_in(folder: Path, model: ServedModel) -> None:
    """Write down who answers into a folder of unfinished work, or check that the same still answers."""
    file = folder / f"{model.weights[:16]}-{FACTS}"
    if file.is_file():
        recognise(model, read_json_object(file))
        return
    atomic.write(file, json.dumps(facts(model)).encode())


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
            workers = stack.enter_context(started_workers(running, on_gpu=on_gpu, kind=kind))
        elif running.engine == "vllm":
            stack.enter_context(engines.started_engine(running))
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
        return RemoteModel.of(model, current_workers())
    return VllmModel.of(model, engines.current_engine()) if running.engine == "vllm" else model


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
