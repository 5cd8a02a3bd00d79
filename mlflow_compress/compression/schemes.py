"""Formats of compressed-tensors with activations: what a value, its scale and the group that shares it are."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class _Scheme:
    """A preset of compressed-tensors, which has weights and activations."""

    preset: str  # Its name there
    bits: int  # Bits per weight
    group_size: int  # Neighbouring weights of a row that share a scale
    stored_bits: float  # Bits per weight in the file, with the scales of 16-bit bases
    format: str  # How the weights are stored

    def config_group(self, targets: Sequence[str], *, activations: bool = True) -> dict[str, Any]:
        """Return llm-compressor's config group for layers; without `activations` these stay as they are."""
        from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES

        parts = {part: arguments.model_dump() for part, arguments in PRESET_SCHEMES[self.preset].items()}
        if not activations:
            del parts["input_activations"]
        return {"targets": list(targets), "format": self.format, **parts}

    def as_settings(self) -> dict[str, int | bool]:
        """Return the settings of an integer method that a scheme decides."""
        return {"bits": self.bits, "group_size": self.group_size, "symmetric": True}


SCHEMES = {
    "nvfp4": _Scheme(
        preset="NVFP4",
        bits=4,
        group_size=16,
        stored_bits=4 + 8 / 16,
        format="nvfp4-pack-quantized",
    ),
    "mxfp4": _Scheme(preset="MXFP4", bits=4, group_size=32, stored_bits=4 + 8 / 32, format="mxfp4-pack-quantized"),
    "mxfp8": _Scheme(preset="MXFP8", bits=8, group_size=32, stored_bits=8 + 8 / 32, format="mxfp8-quantized"),
    "w4a8": _Scheme(preset="W4A8", bits=4, group_size=128, stored_bits=4 + 16 / 128, format="pack-quantized"),
    "w4afp8": _Scheme(preset="W4AFP8", bits=4, group_size=128, stored_bits=4 + 16 / 128, format="pack-quantized"),
    "fp8-block": _Scheme(
        preset="FP8_BLOCK", bits=8, group_size=128, stored_bits=8 + 16 / 128**2, format="float-quantized"
    ),
}
