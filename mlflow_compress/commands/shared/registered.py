"""The registered model of a baseline, looked up without evaluating or writing anything."""

from __future__ import annotations

from pathlib import Path

from mlflow_compress.commands.shared.model_names import model_label, model_path
from mlflow_compress.config import EMBEDDED
from mlflow_compress.errors import ConfigError
from mlflow_compress.kept import kept
from mlflow_compress.models.source_model import resolve as resolve_source
from mlflow_compress.models.stored_weights import hash_weights
from mlflow_compress.tracking.model_registry import registered_models
from mlflow_compress.tracking.tracker import Tracker


def weights_of(model: str) -> str:
    """Return the hash of a baseline's weights, which promotions of its variants share; of a hub id too."""
    source = resolve_source(model_path(model))
    return kept(("weights", source.folder), lambda: hash_weights(source.folder)[1])


def base_weights(model: str) -> str | None:
    """Return the hash of the weights in a folder (or of the demo); None for a name."""
    if model == EMBEDDED or Path(model).is_dir():
        return hash_weights(Path(model_path(model)))[1]
    return None


def registered_model_of(tracker: Tracker, model: str) -> str:
    """Return the registered model of a baseline, given by its folder or by a name that only one model has.

    Raises
    ------
    ConfigError
        Nothing of this baseline is registered, or several models have this name.
    """
    label, weights = model_label(model), base_weights(model)
    every = registered_models(tracker, label)
    found = [name for name, owner in every.items() if weights in (None, owner)]
    if len(found) != 1:
        what = "Nothing was promoted of this model" if not found else f"'{label}' is the name of {len(found)} models"
        fix = "Promote a variant first" if not found else "Give the model's folder"
        raise ConfigError(what, allowed=sorted(every) or None, got=model, fix=fix)
    return found[0]
