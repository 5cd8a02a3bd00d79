"""Models of a stage: without their weights (`light`), and loaded (`load`)."""

from __future__ import annotations

import gc

from mlflow_compress.config import InferenceConfig, SourceConfig
from mlflow_compress.models.light_model import LightModel, open_light
from mlflow_compress.models.loading import LoadConfig, LoadedModel, load_model


def light(path: str, source: SourceConfig, inference: InferenceConfig) -> LightModel:
    """Return a model without its weights: tokenizer, configuration and hashes, with the stage's dtype and device."""
    return open_light(
        LoadConfig(
            path=path,
            dtype=inference.dtype,
            device=source.device,
            max_memory=source.max_memory,
            offload_dir=source.offload_dir,
            trust_remote_code=source.trust_remote_code,
        )
    )


def load(model: LightModel) -> LoadedModel:
    """Return the model with its weights loaded."""
    return load_model(model.config)


class OneLoaded:
    """Loads models, one at a time: the last one stays in memory until another is asked for, or until `free`."""

    def __init__(self) -> None:
        self._loaded: LoadedModel | None = None
        self._config: LoadConfig | None = None

    def __call__(self, model: LightModel) -> LoadedModel:
        """Return the model with its weights loaded; without loading it again where it is the last one."""
        if self._loaded is None or self._config != model.config:
            self.free()
            self._loaded, self._config = load(model), model.config
        return self._loaded

    def free(self) -> None:
        """Let go of the model."""
        self._loaded = None
        gc.collect()  # modules have reference cycles: without this, two models would be in memory
