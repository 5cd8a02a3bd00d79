"""Magnitude pruning: sets the smallest weights of each layer to zero, independent of activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlflow_compress.compression.layers import save_and_measure
from mlflow_compress.compression.method import CompressionJob, register
from mlflow_compress.compression.pruning import GROUP, ZEROS, PruningConfig, PruningMethod

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class MagnitudeConfig(PruningConfig):
    """Settings of `magnitude`."""


@register
class Magnitude(PruningMethod):
    """Sets the smallest weights of each layer to zero: the control for the other pruning methods."""

    name = "magnitude"
    description = "Magnitude pruning, layer by layer: the control of the pruning methods"
    reference = "Han et al. 2015, https://arxiv.org/abs/1506.02626"
    Config = MagnitudeConfig

    def compress(self, job: CompressionJob) -> torch.Tensor:
        """Prune each linear layer separately."""
        model = job.source.load(job.device)
        for name in job.source.linear:
            weight = model.get_submodule(name).weight.data
            if job.config.pattern == "2:4":
                groups = weight.view(-1, GROUP)
                groups.scatter_(1, groups.abs().topk(ZEROS, dim=1, largest=False).indices, 0.0)
            else:
                prune_smallest(weight, job.config.sparsity)
        return save_and_measure(job, model)


def prune_smallest(weight: torch.Tensor, sparsity: float) -> None:
    """Set the floor(sparsity * n) entries of smallest magnitude to zero, in place; of equal entries, the first."""
    flat = weight.view(-1)
    order = flat.abs().sort(stable=True).indices
    flat[order[: int(flat.numel() * sparsity)]] = 0.0
