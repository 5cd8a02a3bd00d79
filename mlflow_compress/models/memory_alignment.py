"""Memory alignment of weights, and the identity of a machine's rounding.

On a CPU the last bit of a matrix product can depend on more than its numbers. MKL chooses its loops by memory address,
which changes products of few rows. The number of threads and the processor change products of any size. The first is
prevented here: operands begin at multiples of `ALIGNMENT`. The second is recorded with a stored baseline.
"""

import os
from typing import Any

import torch

ALIGNMENT = 64
"""In bytes: a cache line, the widest vector register, and the alignment of PyTorch's own allocator."""

_SWITCHES = ("MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR", "MKL_NUM_THREADS", "MKL_DYNAMIC")


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy, contiguous and beginning at a multiple of `ALIGNMENT`.

    Tensors on other devices are returned as they are: their allocators align them.
    """
    if tensor.device.type != "cpu" or (tensor.data_ptr() % ALIGNMENT == 0 and tensor.is_contiguous()):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def align_weights(model: torch.nn.Module) -> None:
    """Copy a model's floating-point parameters and buffers that are not `aligned`, in place.

    Weights that are memory-mapped from a file begin where its header ends. Packed weights (integers, and tensors of a
    library's own class) are not copied: products of integers are exact.
    """
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if _is_plain(parameter.data):
                parameter.data = aligned(parameter.data)
        for name, buffer in module.named_buffers(recurse=False):
            if _is_plain(buffer):
                module._buffers[name] = aligned(buffer)


def rounding_identity(device: torch.device) -> dict[str, str]:
    """Return what decides the last bits of a model's numbers on this machine; equal identities give equal bits.

    On a CPU ``processor`` (its family), ``instructions`` (those that PyTorch uses), ``threads``, and the environment
    variables of MKL that are set; on a GPU its name.
    """
    if device.type == "cuda":
        return {"processor": torch.cuda.get_device_name(device)}
    if device.type != "cpu":
        return {"processor": device.type}
    from llvmlite import binding

    return {
        "processor": str(binding.get_host_cpu_name()),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        **{name: os.environ[name] for name in _SWITCHES if os.environ.get(name)},
    }


def _is_plain(tensor: Any) -> bool:
    return type(tensor) is torch.Tensor and tensor.is_floating_point()
