"""Packed layers of GPTQ and AWQ files, and of 4-bit bitsandbytes on a CPU, are replaced by their dequantized weights.

By default, transformers uses the kernel that gptqmodel prefers on a device, and most of these kernels round activations
to 16 bits. bitsandbytes 0.50 has two CPU kernels for its 4-bit layers, and the processor decides which one runs. The
AVX512-BF16 kernel rounds activations to bfloat16, fails for some shapes, and has crashed with SIGFPE. On import,
bitsandbytes also looks for a third kernel on a hub. So the checkpoint itself is measured here, and not a kernel.
bitsandbytes' layers on a GPU stay as they are.
"""

import contextlib
import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mlflow_compress.errors import CheckpointError
from mlflow_compress.models.checkpoint_config import read_settings
from mlflow_compress.models.stored_weights import read_headers, read_tensors
from mlflow_compress.replaced import replaced

if TYPE_CHECKING:
    import torch

BITSANDBYTES = "bitsandbytes"
"""Its ``quant_method``."""

KERNELS = {"gptq": "torch", "awq": "torch_awq"}
"""Transformers' name of the plain kernel, by ``quant_method``."""

GPTQMODEL_EXTRA = "gptqmodel"
GPTQMODEL_PACKAGES = ("gptqmodel", "optimum")

_READ = "compressed-tensors 0.19"  # the versions whose functions are replaced here


def cast_floats(model: Any, dtype: "torch.dtype") -> None:
    """Cast the parameters that are not quantized: quantized ones are integers, or tensors of a library's own class."""
    import torch

    for parameter in model.parameters():
        if type(parameter.data) is torch.Tensor and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


_LARGEST_DIFFERENCE = 0.01
"""Of a layer's weights from those that its files stand for, as a share of their size (root mean square).

Rounding to bfloat16 changes them by 0.2 %, a zero point of 1 at 8 bits by about 3 %."""


def decompress(model: Any) -> bool:
    """Replace the packed weights of compressed-tensors by plain ones in the model's dtype; return if it has any."""
    compressor = getattr(getattr(model, "hf_quantizer", None), "compressor", None)
    if compressor is None:
        return False
    base = importlib.import_module("compressed_tensors.compressors.base")  # other modules of it have this name too
    store, dtype = base.replace_direct_state_dict, model.dtype

    def store_in_dtype(module: Any, tensors: dict[str, Any]) -> None:
        store(module, {**tensors, "weight": tensors["weight"].to(dtype)})

    packed = importlib.import_module("compressed_tensors.compressors.pack_quantized.base")
    rounding = importlib.import_module("compressed_tensors.quantization.lifecycle.forward_helpers")
    quick = partial(unpacked, others=packed.unpack_from_int32)
    with (
        _fp4_in_float32(),
        replaced(packed, "unpack_from_int32", quick, of=_READ),
        replaced(rounding, "_dequantize", dequantized, of=_READ),
        replaced(base, "replace_direct_state_dict", store_in_dtype, of=_READ),
    ):
        compressor.decompress_model(model=model)
    return True


_ROWS = 64  # that are unpacked at once: what lies between stays in the processor's cache


def unpacked(
    packed: "torch.Tensor",
    num_bits: int,
    shape: "torch.Size",
    packed_dim: int = 1,
    *,
    others: "Callable[..., torch.Tensor]",
) -> "torch.Tensor":
    """Return the int8 values, shape (rows, columns), of packed int32 words, byte by byte where values fill whole bytes.

    Equal to compressed-tensors' own function, `others`, which gathers a word for each value: about an eighth of its
    seconds. It unpacks what does not fill whole bytes.
    """
    import torch

    if 8 % num_bits or packed.ndim != 2 or packed_dim != 1 or sys.byteorder != "little":
        return others(packed, num_bits, shape, packed_dim)
    octets, mask, zero = packed.contiguous().view(torch.uint8), (1 << num_bits) - 1, 1 << (num_bits - 1)
    values = torch.empty((*octets.shape, 8 // num_bits), dtype=torch.uint8, device=packed.device)
    for some, rows in zip(torch.split(values, _ROWS), torch.split(octets, _ROWS), strict=True):
        for place in range(8 // num_bits):  # below 0 a byte wraps, to what int8 reads as negative
            torch.sub((rows >> num_bits * place) & mask, zero, out=some[..., place])
    return values.view(len(packed), -1)[:, : shape[1]].view(torch.int8)


def dequantized(
    x_q: "torch.Tensor",
    scale: "torch.Tensor",
    zero_point: "torch.Tensor | None" = None,
    dtype: "torch.dtype | None" = None,
    global_scale: "torch.Tensor | None" = None,
) -> "torch.Tensor":
    """Return ``(x_q - zero_point) * scale``, equal to compressed-tensors' own `_dequantize`.

    One new tensor in place of two or three: most of a large tensor's seconds are those of getting its memory.
    """
    if global_scale is not None:
        scale = scale / global_scale
    values = x_q.to(scale.dtype, copy=True)
    if zero_point is not None:
        values -= zero_point.to(scale.dtype)
    values *= scale
    return values if dtype is None else values.to(dtype)


def _fp4_in_float32() -> contextlib.AbstractContextManager[object]:
    """Within this block, compressed-tensors computes 4-bit floats times their scales in float32.

    It would round them to bfloat16, also in a model of another dtype, which then cannot multiply them.
    """
    import torch

    fp4 = importlib.import_module("compressed_tensors.compressors.nvfp4.base")
    in_float32 = partial(fp4.unpack_fp4_from_uint8, dtype=torch.float32)
    return replaced(fp4, "unpack_fp4_from_uint8", in_float32, of=_READ)


def check_decompressed(model: Any, folder: Path) -> None:
    """Compare weights of a compressed-tensors checkpoint with what its files stand for; raise an error if they differ.

    A model's loader goes by the label in ``config.json``, this check by the tensors in the files. Compared are, of the
    smallest layers of every scheme and stored dtype, the first and the last, so that its time does not grow with the
    model.
    """
    import torch

    schemes = {name: getattr(module, "quantization_scheme", None) for name, module in model.named_modules()}
    schemes = {name: scheme for name, scheme in schemes.items() if scheme is not None and scheme.weights is not None}
    if not schemes:
        return
    stored = read_headers(folder)
    alike: dict[tuple[int, str], list[str]] = {}
    for name, scheme in schemes.items():
        tensor = stored.get(f"{name}.weight_packed") or stored.get(f"{name}.weight")
        if tensor is not None:  # transformers gives the layers of some architectures other names than the files do
            alike.setdefault((id(scheme), tensor.dtype), []).append(name)
    sample = set()
    for names in alike.values():
        sizes = [model.get_submodule(name).weight.numel() for name in names]
        smallest = [name for name, size in zip(names, sizes, strict=True) if size == min(sizes)]
        sample |= {smallest[0], smallest[-1]}
    tensors = read_tensors(folder, sample.__contains__)
    for name in sorted(sample):
        own = {key.rpartition(".")[2]: tensor for key, tensor in tensors.items() if key.rpartition(".")[0] == name}
        layer = model.get_submodule(name)
        expected, used = _stored_weight(own, layer, name, folder), _used_weight(layer)
        if used.dtype == expected.dtype and torch.equal(used, expected):
            continue
        expected, used = expected.double(), used.double()
        differ = (used != expected) & ~(used.isnan() & expected.isnan())  # a code may stand for no number
        share = float((used - expected)[differ].norm() / expected.nan_to_num().norm()) if differ.any() else 0.0
        if not share <= _LARGEST_DIFFERENCE:
            status = (read_settings(folder).get("quantization_config") or {}).get("quantization_status")
            raise CheckpointError(
                f"Layer {name} was loaded with weights that differ from those in its tensors: by "
                f"{100 * share:.3g} % of their size",
                allowed=f"at most {100 * _LARGEST_DIFFERENCE:.0f} %",
                got=f"quantization_status {status!r}, and "
                f"{', '.join(f'{key} ({tensor.dtype})' for key, tensor in sorted(own.items()))} in {folder}",
                fix="Correct quantization_config in config.json: status, format, symmetric and type have to fit the "
                "tensors",
            )


def _stored_weight(tensors: dict[str, Any], layer: Any, name: str, folder: Path) -> "torch.Tensor":
    """Return the weight for which a layer's stored tensors stand, by compressed-tensors' own functions.

    They compute in the dtypes of the layer: in half precision, floats may be rounded to other levels than in float32.
    """
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.config import CompressionFormat
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from torch import nn

    floats = {key for key, tensor in tensors.items() if tensor.is_floating_point() and tensor.element_size() > 1}
    tensors |= {key: tensors[key].to(getattr(layer, key, layer.weight).dtype) for key in floats}
    scheme = layer.quantization_scheme
    kind = CompressionFormat(scheme.format or infer_module_format(nn.Linear, scheme)).value
    try:
        if "weight" in floats:
            zero_point, global_scale = (tensors.get(f"weight_{part}") for part in ("zero_point", "global_scale"))
            weight = fake_quantize(
                tensors["weight"], tensors["weight_scale"], zero_point, scheme.weights, global_scale=global_scale
            )
        else:
            with _fp4_in_float32():
                weight = BaseCompressor.get_value_from_registry(kind).decompress(tensors, scheme)["weight"]
    except (KeyError, RuntimeError, ValueError, AssertionError) as error:
        raise CheckpointError(
            f"Layer {name} is not stored as its format says: {type(error).__name__}: {error}",
            allowed=f"tensors of {kind}",
            got=f"{', '.join(sorted(tensors))} in {folder}",
            fix="Correct `format` in the quantization_config of config.json",
        ) from error
    return cast("torch.Tensor", weight)


def _used_weight(layer: Any) -> "torch.Tensor":
    """Return the weight with which a loaded layer computes: it may round it at each call."""
    from accelerate.utils import align_module_device
    from compressed_tensors.quantization.lifecycle.forward import forward_quantize

    with align_module_device(layer):  # it may be offloaded
        weight = forward_quantize(layer, layer.weight.detach(), "weight", layer.quantization_scheme.weights)
        return cast("torch.Tensor", weight.cpu())


def expand(model: Any) -> None:
    """Replace each packed layer by a plain one with its dequantized weights, in the model's dtype.

    Everything else stays as it is. Save a model before: expanded layers are not stored packed.
    """
    from torch import nn

    kinds: list[tuple[type[Any], Any]] = []
    if "gptqmodel" in sys.modules:  # a model with such layers has imported it; importing it patches transformers
        from gptqmodel.nn_modules.qlinear import BaseQuantLinear

        kinds.append((BaseQuantLinear, _gptq_awq_weight))
    if "bitsandbytes" in sys.modules:
        from bitsandbytes.nn import Linear4bit

        kinds.append((Linear4bit, lambda packed: bnb_4bit_weight(packed.weight)))
    for name, packed in list(model.named_modules()) if kinds else ():
        dequantized = next((weight for kind, weight in kinds if isinstance(packed, kind)), None)
        if dequantized is None or (dequantized is not _gptq_awq_weight and packed.weight.device.type != "cpu"):
            continue
        weight, bias = dequantized(packed), packed.bias
        plain = nn.Linear(packed.in_features, packed.out_features, bias=bias is not None, device="meta")
        plain.weight = nn.Parameter(weight.to(model.dtype), requires_grad=False)
        if bias is not None:
            plain.bias = nn.Parameter(bias.detach().to(model.dtype), requires_grad=False)
        model.set_submodule(name, plain.train(packed.training))


def _gptq_awq_weight(packed: Any) -> "torch.Tensor":
    """Return ``scale * (level - zero)`` in float32 from the stored scale, shape (out_features, in_features)."""
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


def import_offline() -> None:
    """Import bitsandbytes without its search for a kernel on a hub and the warning about it.

    Later imports use the loaded package. If it is already loaded, nothing happens.
    """
    if "bitsandbytes" in sys.modules:
        return
    with _hidden("kernels"), replaced(logging.getLogger("bitsandbytes.backends.cpu.ops"), "disabled", True):
        importlib.import_module("bitsandbytes")


def bnb_4bit_weight(weight: Any) -> "torch.Tensor":
    """Return a dequantized 4-bit weight: ``code[level] * scale``, one float32 product per value.

    Computed here in torch, because bitsandbytes' own function depends on the processor. With AVX-512 it gave wrong
    values where a row is shorter than a block (48 and 64), and for odd row lengths it first compiles a kernel.

    The `weight` is one that no forward pass has repacked yet. The result has the dtype from which it was quantized.
    """
    import torch

    state = weight.quant_state
    assert not getattr(state, "packing_format_for_cpu", False), "a forward pass has repacked this weight"
    packed = weight.data.view(torch.uint8).reshape(-1)
    levels = torch.stack([packed >> 4, packed & 15], dim=1).reshape(-1)[: prod(state.shape)]
    scales = state.absmax
    if state.nested:
        inner = state.state2
        scales = _scale_blocks(inner.code.float()[scales.long()], inner.absmax, inner.blocksize) + state.offset
    values = _scale_blocks(state.code.float()[levels.long()], scales, state.blocksize)
    return values.reshape(state.shape).to(state.dtype)


def _scale_blocks(numbers: "torch.Tensor", scales: "torch.Tensor", blocksize: int) -> "torch.Tensor":
    """Return the flat `numbers`, each times the scale of its block of `blocksize`; the last block may be shorter."""
    return numbers * scales.float().repeat_interleave(blocksize)[: len(numbers)]


@contextlib.contextmanager
def _hidden(package: str) -> Iterator[None]:
    """Within this block, importing the package fails as if it were not installed."""
    loaded = {name: module for name, module in sys.modules.items() if name.split(".")[0] == package}
    for name in loaded:
        del sys.modules[name]
    sys.modules[package] = None  # type: ignore[assignment]  # Python's mark for a module that cannot be imported
    try:
        yield
    finally:
        del sys.modules[package]
        sys.modules.update(loaded)
