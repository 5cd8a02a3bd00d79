"""What stages must know of a variant before a model is loaded: paths, names, its manifest."""

from __future__ import annotations

from pathlib import Path

from mlflow_compress import demo
from mlflow_compress.compress.manifest import Manifest
from mlflow_compress.config import EMBEDDED
from mlflow_compress.errors import ConfigError


def model_path(model: str) -> str:
    """Return where the baseline lies: the embedded folder for 'demo', otherwise what was given (folder or hub id)."""
    return str(demo.MODEL_DIR) if model == EMBEDDED else model


def model_label(model: str) -> str:
    """Return the baseline's short name for run names and the registry."""
    return Path(model).name if Path(model).is_dir() else model


def read_manifest(checkpoint: str) -> Manifest:
    """Return the manifest of a compressed checkpoint; a folder without a whole one is refused."""
    if not checkpoint:
        raise ConfigError("Parameter 'checkpoint' must be given", allowed="the folder that quantize wrote")
    return Manifest.read(Path(checkpoint))
