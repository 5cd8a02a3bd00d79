"""Models of a stage: what is known of one from its files, and the loaded model itself."""

from __future__ import annotations

from mlflow_compress.config import InferenceConfig, SourceConfig
from mlflow_compress.models.light_model import LightModel, open_light
from mlflow_compress.models.loading import LoadConfig, LoadedModel, load_model


def light(path: str, source: SourceConfig, inference: InferenceConfig) -> LightModel:
    """Return what is known of a model without loading its weights, opened as the parameters say."""
    return open_light(
        LoadConfig(path=path, dtype=inference.dtype, device=source.device, trust_remote_code=source.trust_remote_code)
    )


def load(model: LightModel) -> LoadedModel:
    """Load the weights of a model that is known from its files, and read text with the tokenizer known so far."""
    return load_model(model.config)
