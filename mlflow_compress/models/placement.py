"""Device placement of a model: on a CPU, a GPU, or all GPUs."""

from __future__ import annotations

from typing import Any

import torch

from mlflow_compress.errors import ConfigError, UnsupportedError


def placement(device: str) -> dict[str, Any]:
    """Return the `device_map` argument of `from_pretrained` for a device (see `loading.LoadConfig`).

    Raises
    ------
    ConfigError
        For an unknown device.
    UnsupportedError
        For a GPU where there is none.
    """
    if device == "balanced":
        return {"device_map": "auto"}
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UnsupportedError("torch finds no GPU on this machine", got=device, fix="Use 'auto' or 'cpu'")
    if device == "cuda":
        device = "cuda:0"
    try:
        return {"device_map": {"": torch.device(device)}}
    except RuntimeError as error:
        raise ConfigError("Unknown device", allowed="auto, balanced, cpu, cuda, cuda:0, ...", got=device) from error
