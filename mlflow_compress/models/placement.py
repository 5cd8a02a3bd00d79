"""Device placement of a model: on a CPU, a GPU, or spread over GPUs, the host and the disk."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlflow_compress.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    import torch

BALANCED = "balanced"


@dataclass(frozen=True, kw_only=True)
class Offload:
    """Memory that a model's weights may take, and where the rest of them is kept."""

    # Most memory for weights by device, such as {"cpu": "2GiB", "0": "70GiB"}; empty: what is free
    max_memory: Mapping[str, str] = field(default_factory=dict)
    folder: str | None = None  # None: the system's folder for temporary files


def placement(device: str, max_memory: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the arguments `device_map` and `max_memory` of `from_pretrained` (see `loading.LoadConfig`)."""
    import torch  # not above: whoever needs a name of this module need not wait for it

    if device == BALANCED:
        return {"device_map": "auto", **({"max_memory": _sizes(max_memory)} if max_memory else {})}
    if max_memory:
        raise ConfigError("Parameter 'max_memory' is for device=balanced", got=f"device={device}")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise no_gpu(device)
    if device == "cuda":
        device = "cuda:0"
    try:
        return {"device_map": {"": torch.device(device)}}
    except RuntimeError as error:
        raise ConfigError("Unknown device", allowed="auto, balanced, cpu, cuda, cuda:0, ...", got=device) from error


def room_for_states(max_memory: Mapping[str, str]) -> int:
    """Return the bytes that hidden states may take between two layers: a quarter of what models may take of the host's
    memory, or of what is free now."""
    from accelerate.utils import get_max_memory

    return int(_sizes(max_memory).get("cpu") or get_max_memory()["cpu"]) // 4


_GPU_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # of NVIDIA's driver, of AMD's, and of either under WSL


def no_gpu(device: str) -> UnsupportedError:
    """Return the error of a machine without the GPU that is asked for."""
    return UnsupportedError("torch finds no GPU on this machine", got=device, fix="Use 'auto' or 'cpu'")


def certainly_without_gpu() -> bool:
    """Return whether torch certainly finds no GPU here, without importing it."""
    return sys.platform == "linux" and not any(Path(file).exists() for file in _GPU_FILES)


def certainly_on_cpu(device: str) -> bool:
    """Return whether models of this device parameter certainly run on a CPU, without importing torch."""
    return device == "cpu" or (device == "auto" and certainly_without_gpu())


def sent_to(device: "torch.device", tensor: "torch.Tensor") -> "torch.Tensor":
    """Return a tensor of this process on a device. A GPU gets it while it computes: nothing waits for the copy."""
    host = tensor.pin_memory() if device.type == "cuda" and tensor.device.type == "cpu" else tensor
    return host.to(device, non_blocking=True)


def _sizes(max_memory: Mapping[str, str]) -> dict[int | str, int]:
    """Return bytes by device, as accelerate reads them: "cpu", and the numbers of GPUs."""
    from accelerate.utils import convert_file_size_to_int

    sizes: dict[int | str, int] = {}
    for place, size in max_memory.items():
        if place != "cpu" and not place.isdecimal():
            raise ConfigError("Unknown device in 'max_memory'", allowed="cpu, or the number of a GPU", got=place)
        try:
            sizes[int(place) if place.isdecimal() else place] = int(convert_file_size_to_int(size))
        except ValueError as error:
            raise ConfigError("A size in 'max_memory' cannot be read", allowed="2GiB, 500MB", got=size) from error
    return sizes
