"""File format for HQQ weights: packed integers, with a float16 scale and zero point for each group of a row.

The ``hqq`` package saves pickles, and transformers 5.17 can no longer read its safetensors. compressed-tensors has only
integer zero points, and those of HQQ are not integers. So the format is our own, registered in transformers' table of
quantization formats.
"""

from __future__ import annotations

from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.utils.quantization_config import QuantizationConfigMixin

from mlflow_compress.models.architectures.own_format import OwnFormat

QUANT_METHOD = "hqq_packed"
PARTS = ("weight_packed", "weight_scale", "weight_zero")


def pack(levels: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int) -> dict[str, torch.Tensor]:
    """Return the stored tensors of one layer, by the names in `PARTS`.

    Parameters
    ----------
    levels : torch.Tensor
        Whole numbers from 0 to ``2^bits - 1``, shape (out_features, in_features).
    scale, zero : torch.Tensor
        Shape (out_features, groups); rounded to float16.
    bits : int
        1 to 8; 32 neighbouring values of a row take `bits` words of 32 bits.
    """
    signed = (levels.to(torch.int16) - 2 ** (bits - 1)).to(torch.int8)
    return dict(zip(PARTS, (pack_to_int32(signed, bits), scale.half(), zero.half()), strict=True))


def unpack(stored: dict[str, torch.Tensor], bits: int, in_features: int) -> torch.Tensor:
    """Return ``(level - zero) * scale``, float32, shape (out_features, in_features): the inverse of `pack`."""
    packed, scale, zero = (stored[part] for part in PARTS)
    shape = torch.Size((packed.shape[0], in_features))
    levels = unpack_from_int32(packed, bits, shape).float() + 2 ** (bits - 1)
    groups = levels.reshape(*scale.shape, -1)
    weight: torch.Tensor = (groups - zero.float()[..., None]) * scale.float()[..., None]
    return weight.reshape(shape)


class HqqPackedConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """The quantization settings in ``config.json``."""

    def __init__(self, bits: int, **kwargs: Any) -> None:
        super().__init__(QUANT_METHOD)
        self.bits = bits


class UnpackHqq(ConversionOps):  # type: ignore[misc]
    """Unpacks one layer's weight while transformers loads it."""

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def convert(
        self, input_dict: dict[str, Any], *, full_layer_name: str, model: Any, **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        """Return the weight in the dtype that the model is loaded in."""
        stored = {name.rstrip("$"): value[0] for name, value in input_dict.items()}
        expected = model.get_parameter(full_layer_name)
        return {full_layer_name: unpack(stored, self.bits, expected.shape[1]).to(expected.dtype)}


class HqqPackedQuantizer(OwnFormat):
    """Loads packed weights into plain linear layers; a loaded model can compute, but not be saved again."""

    def get_weight_conversions(self) -> list[Any]:
        """Return the only conversion: from three stored tensors to one weight."""
        bits = self.quantization_config.bits
        return [WeightConverter([f"{part}$" for part in PARTS], "weight", [UnpackHqq(bits)])]
