"""Models of a stage: without their weights (`light`), and loaded (`load`)."""

from __future__ import annotations

from mlflow_compress.config import InferenceConfig, SourceConfig
from mlflow_compress.models.light_model import LightModel, open_light
from mlflow_compress.models.loading import LoadConfig, LoadedModel, load_model


def light(path: str, source: SourceConfig, inference: InferenceConfig) -> LightModel:
    """Return a model without its weights: tokenizer, configuration and hashes, with the stage's dtype and device."""
    return open_light(
        LoadConfig(path=path, dtype=inference.dtype, device=source.device, trust_remote_code=source.trust_remote_code)
    )


def load(model: LightModel) -> LoadedModel:
    """Return the model with its weights loaded."""
    return load_model(model.config)
