"""The head of a model whose body runs in vLLM: read from the checkpoint, computed here as for every other model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from safetensors import safe_open

from mlflow_compress.errors import UnsupportedError
from mlflow_compress.models import architectures
from mlflow_compress.models.identity import stored_config
from mlflow_compress.models.light_model import LightModel
from mlflow_compress.models.loading import load_model
from mlflow_compress.scoring.forward.head import Head, empty_model, rebuild_head


def read_head(model: LightModel) -> Head:
    """Return the model's head. Its weights alone are read, unless they are quantized: then the model is loaded for it.

    Raises
    ------
    UnsupportedError
        The head is not a plain linear layer.
    """
    config = stored_config(model.model_config)
    weights = _stored(model, config)
    if weights is None:
        module = load_model(model.config).model.get_output_embeddings()
        if type(module) is not torch.nn.Linear:
            raise UnsupportedError(
                f"engine=vllm needs a head that is a plain linear layer, and this is a {type(module).__name__}",
                got=str(model.path),
            )
        weights = dict(module.state_dict())
    return rebuild_head(config, {name: weight.detach().to("cpu", model.dtype) for name, weight in weights.items()})


def _stored(model: LightModel, config: Mapping[str, Any]) -> dict[str, torch.Tensor] | None:
    """Return the head's weights as the files hold them; None where they are stored in another way."""
    shell = empty_model(config)
    by_module = {module: name for name, module in shell.named_modules()}
    names = [by_module[shell.get_output_embeddings()]]
    if model.model_config.get_text_config(decoder=True).tie_word_embeddings:
        names.append(by_module[shell.get_input_embeddings()])
    files = [file for file in architectures.weight_files(model.path) if file.suffix == ".safetensors"]
    for name in names:
        found = {}
        for file in files:
            with safe_open(file, framework="pt") as tensors:
                for part in {f"{name}.weight", f"{name}.bias"}.intersection(tensors.keys()):
                    found[part.rpartition(".")[2]] = tensors.get_tensor(part)
        weight = found.get("weight")
        if weight is not None and weight.dtype in (torch.float32, torch.bfloat16, torch.float16):
            return found
    return None
