"""Casts to the two 16-bit floating types: what halving a float32 model alone does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlflow_compress.compression.method import CompressionJob, Method, MethodConfig
from mlflow_compress.compression.shared.dense import save_and_measure
from mlflow_compress.errors import UnsupportedError
from mlflow_compress.models.source_model import SourceModel

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class CastConfig(MethodConfig):
    """A cast has no settings."""


class Cast(Method):
    """Store every weight in another floating type.

    Only the stored weights are rounded. Evaluation computes in the type that ``-P dtype=`` names, for this variant as
    for any other: give ``dtype=bfloat16`` to see the type's arithmetic too.
    """

    stored: str
    """Element type as torch names it."""
    format = "safetensors"
    Config = CastConfig
    runs_in = ("vLLM", "llama.cpp")
    linear_only = False

    def check(self, config: Any, source: SourceModel) -> None:
        """Refuse a cast that would change nothing."""
        if source.dtype == self.stored:
            raise UnsupportedError(
                f"The model is stored in {self.stored} already: the cast would change nothing",
                got=source.name,
                fix="Use method=none for the control",
            )

    def compress(self, job: CompressionJob) -> torch.Tensor:
        """Cast, and refuse values that the type cannot hold."""
        import torch

        wanted = getattr(torch, self.stored)
        model = job.source.load(job.device, dtype=job.source.torch_dtype)
        largest = torch.finfo(wanted).max
        for name, parameter in model.named_parameters():
            if parameter.numel() and float(parameter.abs().max()) > largest:
                raise UnsupportedError(
                    f"The weights of {name} do not fit into {self.stored}",
                    allowed=f"magnitudes up to {largest:g}",
                    got=f"{float(parameter.abs().max()):g}",
                    fix="Use method=bf16",
                )
        return save_and_measure(job, model, wanted)
