"""Wanda: prunes by weight magnitude times the norm of the input activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlflow_compress.compression.backends import llmcompressor_backend as backend
from mlflow_compress.compression.method import CompressionJob, register
from mlflow_compress.compression.pruning import (
    CalibratedPruningConfig,
    PruningMethod,
    modifier_options,
    require_pruned,
)

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class WandaConfig(CalibratedPruningConfig):
    """Settings of `wanda`."""


@register
class Wanda(PruningMethod):
    """Sets the weights with the smallest score ``|W_ij| * ||x_j||_2`` in each output row to zero."""

    name = "wanda"
    description = "Wanda pruning: weight times activation norm, row by row"
    reference = "Sun et al. 2024, https://arxiv.org/abs/2306.11695 (llm-compressor WandaPruningModifier)"
    Config = WandaConfig
    needs_calibration = True
    requires = ("llmcompressor",)

    def takes_experts(self, config: Any) -> bool:
        """Return True."""
        return True

    def compress(self, job: CompressionJob) -> torch.Tensor:
        """Prune layer by layer, each on the outputs of the pruned layers before it."""

        def recipe() -> list[object]:
            from llmcompressor.modifiers.pruning import WandaPruningModifier

            return [WandaPruningModifier(**modifier_options(job))]

        logits = backend.run_oneshot(job, recipe)
        require_pruned(job)
        return logits
