"""A model without its weights in memory: everything that a stored baseline is compared with, read from the files."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from mlflow_compress.errors import CheckpointError, MissingDependencyError
from mlflow_compress.models import architectures, checkpoint_config
from mlflow_compress.models.loading import LoadConfig, OpenedModel, model_folder, open_tokenizer
from mlflow_compress.models.placement import placement


@dataclass(frozen=True)
class LightModel(OpenedModel):
    """The identity of a model, as a `LoadedModel` has it, without weights in memory; it cannot score."""

    model_config: Any
    tokenizer: Any
    path: Path  # The local folder (for a hub id, its local snapshot)
    dtype: torch.dtype  # Dtype that parameters which are not quantized would have
    device: torch.device  # Device on which the embeddings would be
    config: LoadConfig  # With which `load_model` loads the model

    def configuration(self) -> Any:
        return self.model_config


def open_light(config: LoadConfig) -> LightModel:
    """Open a model without its weights, from its configuration, its tokenizer and the headers of its weight files."""
    from transformers import AutoConfig

    folder = model_folder(config.path)
    trusted = config.trust_remote_code
    device = placement(config.device, config.max_memory)["device_map"]
    try:
        options = architectures.loading_options(folder, trust_remote_code=trusted)
        model_config = options.get("config")
        if model_config is None:
            model_config = AutoConfig.from_pretrained(folder, trust_remote_code=trusted, local_files_only=True)
        tokenizer = open_tokenizer(folder, trust_remote_code=trusted)
        dtype = _stored_dtype(model_config, folder) if config.dtype == "auto" else getattr(torch, config.dtype)
    except ImportError as error:
        raise MissingDependencyError(f"The checkpoint's format needs a package: {error}", got=str(folder)) from error
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"The checkpoint cannot be read: {error}", got=str(folder)) from error
    # Where `from_pretrained` would put the embeddings; "auto" fills the first GPU first.
    first = "cuda:0" if torch.cuda.is_available() else "cpu"
    first = device[""] if isinstance(device, dict) else first
    return LightModel(model_config, tokenizer, folder, dtype, torch.device(first), config)


def _stored_dtype(model_config: Any, folder: Path) -> torch.dtype:
    """Return the dtype that transformers uses for "auto": the configuration's, else that of the first stored float."""
    named = getattr(model_config, "dtype", None)
    if named is not None:
        named_dtype: torch.dtype = named if isinstance(named, torch.dtype) else getattr(torch, str(named))
        return named_dtype
    for file in checkpoint_config.weight_files(folder):
        if file.suffix == ".gguf":
            return torch.get_default_dtype()  # its weights are expanded to floats
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                tensor: torch.Tensor = tensors.get_tensor(name)  # memory-mapped: its bytes are not read
                if tensor.is_floating_point():
                    return tensor.dtype
    raise CheckpointError("The checkpoint holds no floating-point weights", got=str(folder))
