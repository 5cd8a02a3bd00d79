"""Models of a stage: what is known of one from its files, and the loaded model itself."""

from __future__ import annotations

from typing import Protocol

from mlflow_compress.models.light_model import LightModel, open_light
from mlflow_compress.models.loading import LoadConfig, LoadedModel, load_model


class LoadSettings(Protocol):
    """The part of a stage's configuration that says how a model is opened."""

    @property
    def dtype(self) -> str:
        """See `LoadConfig`."""

    @property
    def device(self) -> str:
        """See `LoadConfig`."""

    @property
    def trust_remote_code(self) -> bool:
        """See `LoadConfig`."""


def light(path: str, config: LoadSettings) -> LightModel:
    """Return what is known of a model without loading its weights, opened as the stage's configuration says."""
    return open_light(
        LoadConfig(path=path, dtype=config.dtype, device=config.device, trust_remote_code=config.trust_remote_code)
    )


def load(model: LightModel) -> LoadedModel:
    """Load the weights of a model that is known from its files, and read text with the tokenizer known so far."""
    return load_model(model.config)
