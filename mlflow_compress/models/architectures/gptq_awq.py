"""GPTQ and AWQ files (of GPTQModel, AutoGPTQ or AutoAWQ): read by gptqmodel, then dequantized.

By default, transformers uses the kernel that gptqmodel prefers on a device, and most of these kernels round activations
to 16 bits. We request the plain torch kernel and replace each layer by its dequantized weights. So the checkpoint
itself is measured, and not a kernel, on every device.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlflow_compress.errors import MissingDependencyError

if TYPE_CHECKING:
    import torch

KERNELS = {"gptq": "torch", "awq": "torch_awq"}
"""Transformers' name of the plain kernel, by ``quant_method``."""

EXTRA = "gptqmodel"
PACKAGES = ("gptqmodel", "optimum")


def require_packages(folder: Path) -> None:
    """Raise `MissingDependencyError` naming the extra where one of `PACKAGES` is not installed."""
    missing = [package for package in PACKAGES if importlib.util.find_spec(package) is None]
    if missing:
        raise MissingDependencyError(
            f"GPTQ and AWQ checkpoints need packages that are not installed: {', '.join(missing)}",
            got=str(folder),
            fix=f"Run: pip install -e '.[{EXTRA}]' (in the project's folder)",
        )


def loading_options(folder: Path, quant_method: str | None, *, trust_remote_code: bool) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that choose the plain kernel; empty for other formats."""
    if quant_method not in KERNELS:
        return {}
    require_packages(folder)
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    config.quantization_config["backend"] = KERNELS[quant_method]
    return {"config": config}


def expand(model: Any) -> None:
    """Replace each packed layer by a plain one with its dequantized weights, in the model's dtype.

    A weight is ``scale * (level - zero)``, multiplied in float32 from the stored scale. Other models stay as they are.
    """
    if "gptqmodel" not in sys.modules:  # a model with such layers has imported it; importing it patches transformers
        return
    from gptqmodel.nn_modules.qlinear import BaseQuantLinear
    from torch import nn

    for name, packed in list(model.named_modules()):
        if isinstance(packed, BaseQuantLinear):
            weight, bias = _weight(packed), packed.bias
            plain = nn.Linear(packed.in_features, packed.out_features, bias=bias is not None, device="meta")
            plain.weight = nn.Parameter(weight.to(model.dtype), requires_grad=False)
            if bias is not None:
                plain.bias = nn.Parameter(bias.to(model.dtype), requires_grad=False)
            model.set_submodule(name, plain)


def _weight(packed: Any) -> torch.Tensor:
    """Return a layer's weight, float32, shape (out_features, in_features)."""
    import torch
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    scales = packed.scales.float()
    if isinstance(packed, AwqTorchLinear):
        weight = dequantize_gemm(packed.qweight, packed.qzeros, scales, packed.bits, packed.group_size)
    else:
        assert type(packed) is TorchLinear, type(packed)
        if packed.qzero_format() == 1:  # zero points minus one, as in files; the loader has already added one
            convert_gptq_v1_to_v2_format_module(packed, packed.bits, packed.pack_dtype)
        packed.scales = scales
        weight = TorchLinear.dequantize_weight(packed)  # the class's function: the instance's would be compiled first
    weight = weight.detach().T.contiguous()
    assert isinstance(weight, torch.Tensor)
    return weight
