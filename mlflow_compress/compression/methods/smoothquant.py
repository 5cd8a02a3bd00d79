"""SmoothQuant: moves the outliers of activations into the weights, then quantizes both to 8 bits."""

from typing import TYPE_CHECKING, Any

from pydantic import Field

from mlflow_compress.compression.backends import llmcompressor_backend as backend
from mlflow_compress.compression.method import CalibratedConfig, CompressionJob, Logits, Method, register
from mlflow_compress.models.source_model import SourceModel

if TYPE_CHECKING:
    import torch

_GEMMA = [
    [["re:.*q_proj", "re:.*k_proj", "re:.*v_proj"], "re:.*input_layernorm"],
    [["re:.*gate_proj", "re:.*up_proj"], "re:.*pre_feedforward_layernorm"],
]
_MAPPINGS = {"Gemma2ForCausalLM": _GEMMA, "Gemma3ForCausalLM": _GEMMA}
"""Layers and the norm before them, for architectures where llm-compressor uses another norm (after the attention)."""


class _SmoothQuantConfig(CalibratedConfig):
    """Settings of `smoothquant`."""

    bits: int = 8  # Bits per weight and per activation: always 8
    alpha: float = Field(0.5, ge=0, le=1)
    """Share of the activations' range that is moved into the weights: 0 none, 1 all."""


@register
class SmoothQuant(Method[_SmoothQuantConfig]):
    """Scales the inputs of attention and MLP down and their weights up, channel by channel; then W8A8.

    The norm before the layer is divided by ``s_j = max|x_j|^alpha / max|W_j|^(1 - alpha)``, with the maxima over the
    calibration set and over the layers after the norm. llm-compressor's own factor uses the channel's range over the
    calibration set instead of ``max|x_j|``, which is too small for channels with values of one sign.
    """

    name = "smoothquant"
    description = "SmoothQuant, 8-bit weights and activations: outliers move from activations into weights"
    reference = "Xiao et al. 2023, https://arxiv.org/abs/2211.10438 (llm-compressor SmoothQuantModifier)"
    format = "compressed-tensors (int-quantized)"
    Config = _SmoothQuantConfig
    runs_in = ("vLLM",)
    supported_bits = (8,)
    by_class = True
    rounds_activations = True
    needs_calibration = True
    requires = ("llmcompressor",)

    def label(self, config: _SmoothQuantConfig) -> str:
        return f"{self.name}-a{config.alpha:g}"

    def check(self, config: _SmoothQuantConfig, source: SourceModel) -> None:
        """Raise `UnsupportedError` for an architecture without mappings: smoothing would silently do nothing."""
        backend.load_for_llmcompressor()
        from llmcompressor.modifiers.transform.smoothquant.dynamic_mappings import SMOOTHQUANT_DYNAMIC_MAPPING_REGISTRY
        from llmcompressor.modifiers.transform.smoothquant.utils import MAPPINGS_REGISTRY

        backend.require_known(
            source,
            (*MAPPINGS_REGISTRY, *SMOOTHQUANT_DYNAMIC_MAPPING_REGISTRY),
            unknown="SmoothQuant does not know which norm feeds which layers of this architecture",
            instead="w8a8",
        )

    def compress(self, job: CompressionJob[_SmoothQuantConfig]) -> Logits:
        def recipe() -> list[object]:
            from llmcompressor.modifiers.quantization import QuantizationModifier

            smooth = _paper_modifier()(
                smoothing_strength=job.config.alpha, mappings=_MAPPINGS.get(job.source.architecture)
            )
            schemes = {"group_0": backend.activation_scheme("int", ["Linear"])}
            return [smooth, QuantizationModifier(config_groups=schemes, ignore=job.source.ignored)]

        return backend.run_oneshot(job, recipe, rescales=True)


def _paper_modifier() -> Any:
    import torch
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

    class PaperSmoothQuantModifier(SmoothQuantModifier):  # type: ignore[misc]
        """Uses the largest magnitude of a channel; the parent uses the difference of its largest and smallest value."""

        def _apply_smoothing(self, model: Any) -> None:
            for seen in self.scales_.values():
                largest = torch.maximum(seen.max_channel_vals, -seen.min_channel_vals)
                seen.min_channel_vals, seen.max_channel_vals = torch.zeros_like(largest), largest
            super()._apply_smoothing(model)

        def _calculate_smoothing_scales(self, balance_layers: Any, activation_scales: "torch.Tensor") -> "torch.Tensor":
            # The parent doubles the largest weight, which fits its use of the range.
            factor: torch.Tensor = super()._calculate_smoothing_scales(balance_layers, activation_scales)
            factor *= 2 ** (1 - self.smoothing_strength)
            return factor

    return PaperSmoothQuantModifier
