"""GPTQ: quantizes column by column, and corrects each column's error in the columns that follow."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

from pydantic import Field, model_validator

from mlflow_compress.compression.backends import gptqmodel_backend
from mlflow_compress.compression.backends import llmcompressor_backend as backend
from mlflow_compress.compression.method import register
from mlflow_compress.errors import UnsupportedError
from mlflow_compress.models.source_model import SourceModel
from mlflow_compress.replaced import replaced


class _GptqConfig(gptqmodel_backend.TwoBackendConfig):
    """Settings of `gptq`."""

    symmetric: bool = True
    """Use a grid around zero, without zero point, instead of one between the group's minimum and maximum."""
    damping: float = Field(0.01, gt=0, lt=1)  # Added to the Hessian's diagonal, as a fraction of its mean
    act_order: bool = True  # Quantize the columns with the largest activations first; the groups are not reordered

    @model_validator(mode="after")
    def _require_supported(self) -> Self:
        if self.backend == gptqmodel_backend.BACKEND_NAME and not self.symmetric:
            raise UnsupportedError(
                "gptqmodel's asymmetric GPTQ did not pass our tests",
                got="symmetric=false",
                fix="Use backend=llmcompressor",
            )
        return self


@register
class Gptq(gptqmodel_backend.TwoBackendMethod[_GptqConfig]):
    """Weight-only quantization with second-order error correction."""

    name = "gptq"
    description = "GPTQ, weight only: repairs each column's rounding error in the columns that follow"
    reference = "Frantar et al. 2023, https://arxiv.org/abs/2210.17323 (llm-compressor GPTQModifier)"
    format = "compressed-tensors (pack-quantized)"
    Config = _GptqConfig
    runs_in = ("vLLM (8 and 4 bit)",)
    supported_bits = (8, 4, 3, 2)
    from_disk = True
    needs_calibration = True
    other_format = "gptq"

    def quantize_config(self, config: _GptqConfig) -> dict[str, Any]:
        grouped = not isinstance(config.group_size, str)
        return {
            **super().quantize_config(config),
            "sym": True,
            "format": "gptq",
            "desc_act": config.act_order,
            "static_groups": config.act_order and grouped,  # columns are reordered, groups are not
            "act_group_aware": False,
            "damp_percent": config.damping,
            "damp_auto_increment": 0.0,  # a larger damping than asked for is an error, not a retry
        }

    def modifiers(
        self, config: _GptqConfig, source: SourceModel, schemes: Mapping[str, dict[str, Any]], ignored: Sequence[str]
    ) -> list[object]:
        from llmcompressor.modifiers.gptq import GPTQModifier

        return [
            GPTQModifier(
                config_groups=dict(schemes),
                ignore=list(ignored),
                dampening_frac=config.damping,
                actorder="weight" if config.act_order else None,
            )
        ]

    def guarded(self) -> AbstractContextManager[object]:
        """Make llm-compressor's silent fallback to round-to-nearest an error."""
        backend.load_for_llmcompressor()
        from llmcompressor.modifiers.gptq import GPTQModifier

        def refuse(self: Any) -> None:
            names = self._rtn_fallback_module_names
            if names:
                raise UnsupportedError(
                    f"GPTQ's Hessian cannot be inverted for {len(names)} layers, the first being {names[0]}",
                    fix="Raise damping or give more calibration samples",
                )

        return replaced(GPTQModifier, "_log_rtn_fallback_summary", refuse, of="llmcompressor 0.14")
