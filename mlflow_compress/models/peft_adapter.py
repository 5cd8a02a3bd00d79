"""The files of a fine-tuned adapter (LoRA, DoRA, ...), and how peft merges them into a model."""

import warnings
from pathlib import Path
from typing import Any

from mlflow_compress.errors import CheckpointError, UnsupportedError
from mlflow_compress.files import read_json_object
from mlflow_compress.paths import started_in

ADAPTER = "adapter_config.json"
ADAPTER_FILES = (ADAPTER, "adapter_model.safetensors")
"""What peft's ``save_pretrained`` writes: settings, and weights in safetensors."""
BASE_FIELD = "base_model_name_or_path"
"""Entry of the settings: the model that was trained."""


def require_adapter(folder: Path) -> None:
    """Refuse a folder that lacks one of an adapter's `ADAPTER_FILES`."""
    missing = [name for name in ADAPTER_FILES if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            "The folder holds no adapter that can be read",
            allowed=f"{' and '.join(ADAPTER_FILES)}, as peft's save_pretrained writes them (no pickles)",
            got=f"{folder} without {' and '.join(missing)}",
        )


def base_of(folder: Path) -> str:
    """Return the folder or hub id of the model that an adapter names as its base."""
    base = read_json_object(folder / ADAPTER, error=CheckpointError).get(BASE_FIELD)
    if not isinstance(base, str) or not base:
        raise CheckpointError(
            "The adapter names no base",
            allowed=f"a folder or a hub id as {BASE_FIELD}",
            got=f"{base} in {folder / ADAPTER}",
            fix="Add it there",
        )
    beside = Path(started_in()) / base  # stages run in other folders
    return str(beside) if beside.is_dir() else base


def merge(model: Any, folder: Path) -> Any:
    """Return a model with an adapter merged into it, in the dtype that the model is loaded in; it is changed in place.

    An adapter that does not fit the model is an `UnsupportedError`. peft itself passes over tensors that the model has
    no place for, leaves layers as they are that the adapter has no tensors for, and merges into an embedding that is
    the head too what was trained for one of the two.
    """
    import torch
    from peft import PeftModel

    try:
        with torch.random.fork_rng(), warnings.catch_warnings():  # peft draws a random adapter before it reads this one
            for only_warned_of in ("Found missing adapter keys", "Model with `tie_word_embeddings=True` and the"):
                warnings.filterwarnings("error", only_warned_of)
            tuned = PeftModel.from_pretrained(model, str(folder), use_safetensors=True)
            if without_place := tuned.load_adapter(str(folder), "default").unexpected_keys:
                raise ValueError(f"the base has no place for {without_place[0]}")
            return tuned.merge_and_unload()
    except (AttributeError, KeyError, RuntimeError, TypeError, UserWarning, ValueError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise UnsupportedError(
            f"peft cannot merge the adapter: {type(error).__name__}: {reason}", got=str(folder)
        ) from error
