"""Device placement of a model: on a CPU, a GPU, or all GPUs."""

from __future__ import annotations

import os
from typing import Any

import torch

from mlflow_compress.errors import ConfigError, UnsupportedError
from mlflow_compress.scoring.processes import team


def placement(device: str) -> dict[str, Any]:
    """Return the `device_map` argument of `from_pretrained` for a device (see `loading.LoadConfig`).

    Raises
    ------
    ConfigError
        For an unknown device, and for "balanced" with several processes.
    """
    if device == "balanced":
        if team.n_processes() > 1:
            raise ConfigError("'balanced' spreads one model over all GPUs", fix="Start one process, or use 'auto'")
        return {"device_map": "auto"}
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UnsupportedError("torch finds no GPU on this machine", got=device, fix="Use 'auto' or 'cpu'")
    if device == "cuda":
        device = f"cuda:{_own_gpu()}"
    try:
        return {"device_map": {"": torch.device(device)}}
    except RuntimeError as error:
        raise ConfigError("Unknown device", allowed="auto, balanced, cpu, cuda, cuda:0, ...", got=device) from error


def _own_gpu() -> int:
    """Return the number of this process's GPU (its LOCAL_RANK), and make it torch's current device."""
    number = int(os.environ.get("LOCAL_RANK", "0"))
    if number:  # not the only process, and not the first
        n_gpus = torch.cuda.device_count()
        if number >= n_gpus:
            allowed = f"at most {n_gpus} on this machine, one per GPU"
            raise ConfigError("There are more processes than GPUs", allowed=allowed, got=f"process {number + 1}")
        torch.cuda.set_device(number)  # kernels that are compiled in this process run on the current device
    return number
