"""Layer dropping: removes the last layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlflow_compress.compression.method import CompressionJob, register
from mlflow_compress.compression.shared.layer_removal import LayerRemovalConfig, LayerRemovalMethod, drop_and_save

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class LayerDropConfig(LayerRemovalConfig):
    """Settings of `layer-drop`."""


@register
class LayerDrop(LayerRemovalMethod):
    """Remove the last decoder layers, as in the pruning curve of "Accuracy is Not All You Need"."""

    name = "layer-drop"
    description = "Removes the last decoder layers"
    reference = "Dutta et al. 2024, https://arxiv.org/abs/2407.09141"
    Config = LayerDropConfig

    def compress(self, job: CompressionJob) -> torch.Tensor:
        """Remove the last ``layers`` layers."""
        depth = job.source.layers
        return drop_and_save(job, job.source.load(job.device), range(depth - job.config.layers, depth))
