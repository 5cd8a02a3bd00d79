"""SmoothQuant: move the activations' outliers into the weights, then quantize both to 8 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlflow_compress.compression.backends import llmcompressor_backend as backend
from mlflow_compress.compression.method import CalibratedConfig, CompressionJob, Method, register, require_bits
from mlflow_compress.errors import ConfigError
from mlflow_compress.models.source_model import SourceModel

if TYPE_CHECKING:
    import torch

BITS = (8,)
_GEMMA = [
    [["re:.*q_proj", "re:.*k_proj", "re:.*v_proj"], "re:.*input_layernorm"],
    [["re:.*gate_proj", "re:.*up_proj"], "re:.*pre_feedforward_layernorm"],
]
MAPPINGS = {"Gemma2ForCausalLM": _GEMMA, "Gemma3ForCausalLM": _GEMMA}
"""Layers and the norm that feeds them, where llm-compressor names another norm (that behind the attention)."""


@dataclass(frozen=True, kw_only=True)
class SmoothQuantConfig(CalibratedConfig):
    """Settings of `smoothquant`."""

    bits: int = 8
    """Bits of a weight and of an activation: always 8."""
    alpha: float = 0.5
    """How much of the activations' range moves into the weights: 0 nothing, 1 all."""

    def __post_init__(self) -> None:
        """Refuse other bits, and an alpha outside [0, 1]."""
        super().__post_init__()
        require_bits("smoothquant", self.bits, BITS)
        if not 0 <= self.alpha <= 1:
            raise ConfigError("alpha is out of range", allowed="0 to 1", got=self.alpha)


@register
class SmoothQuant(Method):
    """Scale the inputs of attention and MLP down and their weights up, channel by channel, then W8A8.

    The norm before the layer is divided by ``s_j = max|x_j|^alpha / max|W_j|^(1 - alpha)``, with the maxima over the
    calibration set and over the layers that it feeds. llm-compressor's own factor has the channel's range over the
    calibration set in place of ``max|x_j|``, which leaves channels that keep one sign too loud.
    """

    name = "smoothquant"
    description = "SmoothQuant, 8-bit weights and activations: outliers move from activations into weights"
    reference = "Xiao et al. 2023, https://arxiv.org/abs/2211.10438 (llm-compressor SmoothQuantModifier)"
    format = "compressed-tensors (int-quantized)"
    Config = SmoothQuantConfig
    runs_in = ("vLLM",)
    supported_bits = BITS
    by_class = True
    rounds_activations = True
    needs_calibration = True
    requires = ("llmcompressor",)

    def label(self, config: Any) -> str:
        """Return ``smoothquant-a0.5``."""
        return f"{self.name}-a{config.alpha:g}"

    def check(self, config: Any, source: SourceModel) -> None:
        """Refuse an architecture whose norms and layers are not known: nothing would be smoothed, without a word."""
        backend.load()
        from llmcompressor.modifiers.transform.smoothquant.dynamic_mappings import SMOOTHQUANT_DYNAMIC_MAPPING_REGISTRY
        from llmcompressor.modifiers.transform.smoothquant.utils import MAPPINGS_REGISTRY

        backend.require_known(
            source,
            (*MAPPINGS_REGISTRY, *SMOOTHQUANT_DYNAMIC_MAPPING_REGISTRY),
            unknown="SmoothQuant does not know which norm feeds which layers of this architecture",
            instead="w8a8",
        )

    def compress(self, job: CompressionJob) -> torch.Tensor:
        """Smooth layer by layer on the calibration set, then round."""

        def recipe() -> list[object]:
            from llmcompressor.modifiers.quantization import QuantizationModifier

            return [
                _paper_modifier()(smoothing_strength=job.config.alpha, mappings=MAPPINGS.get(job.source.architecture)),
                QuantizationModifier(config_groups=backend.activation_scheme("int"), ignore=job.source.ignored),
            ]

        return backend.run_oneshot(job, recipe, rescales=True)


def _paper_modifier() -> Any:
    """Return llm-compressor's modifier with the paper's factor."""
    import torch
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

    class PaperSmoothQuantModifier(SmoothQuantModifier):  # type: ignore[misc]
        """Takes the largest magnitude of a channel where the parent takes its largest value less its smallest."""

        def _apply_smoothing(self, model: Any) -> None:
            for seen in self.scales_.values():
                largest = torch.maximum(seen.max_channel_vals, -seen.min_channel_vals)
                seen.min_channel_vals, seen.max_channel_vals = torch.zeros_like(largest), largest
            super()._apply_smoothing(model)

        def _calculate_smoothing_scales(self, balance_layers: Any, activation_scales: torch.Tensor) -> torch.Tensor:
            # The parent doubles the largest weight, to go with the range.
            factor: torch.Tensor = super()._calculate_smoothing_scales(balance_layers, activation_scales)
            factor *= 2 ** (1 - self.smoothing_strength)
            return factor

    return PaperSmoothQuantModifier
