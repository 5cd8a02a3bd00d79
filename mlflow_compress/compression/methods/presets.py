"""Round-to-nearest weights and activations in the formats of `schemes.SCHEMES`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mlflow_compress.compression.layers import ForLayers
from mlflow_compress.compression.method import CalibratedConfig, CompressionJob, Logits, MethodConfig, S, register
from mlflow_compress.compression.schemes import SCHEMES
from mlflow_compress.errors import UnsupportedError
from mlflow_compress.models.source_model import SourceModel


class _FourBitFormatConfig(MethodConfig):
    """Settings of a format with 4 bits per weight."""

    bits: int = 4  # Always 4
    activations: bool = True  # Round the inputs of the layers too, as the format's kernels do


class _CalibratedFourBitConfig(CalibratedConfig, _FourBitFormatConfig):
    """The same where calibration text gives the scale of the activations."""

    calibration_samples: int = 32


class _EightBitFormatConfig(MethodConfig):
    """Settings of a format with 8 bits per weight."""

    bits: int = 8  # Always 8
    activations: bool = True  # Round the inputs of the layers too, as the format's kernels do


class _PresetMethod(ForLayers[S]):
    """A method whose name is that of its scheme."""

    reference = "https://github.com/vllm-project/compressed-tensors (quant_scheme.py); llm-compressor rounds"
    runs_in = ("vLLM",)
    from_disk = True
    rounds_activations = True

    def __init_subclass__(cls) -> None:
        scheme = SCHEMES[cls.name]
        cls.format = f"compressed-tensors ({scheme.format})"
        cls.supported_bits = (scheme.bits,)

    def label(self, config: Any) -> str:
        return self.name if config.activations else f"{self.name}-weights"

    def rounds(self, config: Any) -> bool:
        return bool(config.activations)

    def stored_bits(self, config: Any) -> float:
        return SCHEMES[self.name].stored_bits

    def scheme(self, config: Any, targets: Sequence[str]) -> dict[str, Any]:
        return SCHEMES[self.name].config_group(targets, activations=config.activations)

    def packed(
        self, config: Any, layers: Mapping[str, tuple[int, int]]
    ) -> list[tuple[int, int | str, Mapping[str, tuple[int, int]]]]:
        return [(config.bits, SCHEMES[self.name].group_size, layers)]

    def check(self, config: Any, source: SourceModel) -> None:
        size = SCHEMES[self.name].group_size
        for layer, (_, inputs) in source.matrices.items():
            if inputs % size:
                raise UnsupportedError(
                    f"Method {self.name!r} rounds groups of {size} inputs, and {layer} has {inputs}",
                    got=source.architecture,
                    fix="Use rtn, whose group_size is free, or fp8",
                )

    def compress(self, job: CompressionJob[Any]) -> Logits:
        # Weights alone need no pass over the text.
        return super().compress(job if job.config.activations else replace(job, calibration=None))


@register
class NvFp4(_PresetMethod[_CalibratedFourBitConfig]):
    """E2M1 values in groups of 16; a group has an E4M3 scale, a tensor one in float32."""

    name = "nvfp4"
    description = "NVIDIA's FP4 (e2m1, one e4m3 scale per 16 values), weights and activations"
    Config = _CalibratedFourBitConfig
    needs_calibration = True


@register
class MxFp4(_PresetMethod[_FourBitFormatConfig]):
    """E2M1 values in groups of 32 with a power of two (E8M0) as their scale."""

    name = "mxfp4"
    description = "OCP's MXFP4 (e2m1, one power-of-two scale per 32 values), weights and activations"
    Config = _FourBitFormatConfig


@register
class MxFp8(_PresetMethod[_EightBitFormatConfig]):
    """E4M3 values in groups of 32 with a power of two (E8M0) as their scale."""

    name = "mxfp8"
    description = "OCP's MXFP8 (e4m3, one power-of-two scale per 32 values), weights and activations"
    Config = _EightBitFormatConfig


@register
class W4A8(_PresetMethod[_FourBitFormatConfig]):
    """4-bit integers in groups of 128, activations as 8-bit integers with a scale per token."""

    name = "w4a8"
    description = "4-bit integer weights, 8-bit integer activations"
    Config = _FourBitFormatConfig


@register
class W4AFp8(_PresetMethod[_FourBitFormatConfig]):
    """4-bit integers in groups of 128, activations as e4m3 with a scale per token."""

    name = "w4afp8"
    description = "4-bit integer weights, 8-bit floating-point (e4m3) activations"
    Config = _FourBitFormatConfig


@register
class Fp8Block(_PresetMethod[_EightBitFormatConfig]):
    """e4m3 weights with a scale per 128 x 128 block, e4m3 activations with a scale per 128 values of a token."""

    name = "fp8-block"
    description = "8-bit floating-point (e4m3) weights in 128 x 128 blocks, activations in groups of 128"
    Config = _EightBitFormatConfig
