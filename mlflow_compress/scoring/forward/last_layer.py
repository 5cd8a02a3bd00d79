"""The feed-forward part of the last layer, computed at the scored positions only: its other outputs are never read."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

Tensor = torch.Tensor
NAME = "mlp"


def find_last_layer(base: torch.nn.Module, n_layers: int) -> torch.nn.Module | None:
    """Return a model's last layer, or None where it has no module `mlp` that takes hidden states and nothing else."""
    for module in base.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == n_layers:
            mlp = module[-1]._modules.get(NAME)
            takes_states_only = mlp is not None and len(inspect.signature(mlp.forward).parameters) == 1
            return module[-1] if takes_states_only else None
    return None


class _MlpAtRows(torch.nn.Module):
    """Replaces the feed-forward part: computes it at some positions, and returns 0 at all others."""

    def __init__(self, mlp: torch.nn.Module, where: tuple[Tensor, Tensor]) -> None:
        super().__init__()
        self.mlp, self.where = mlp, where

    def forward(self, states: Tensor) -> Any:
        """Return the outputs of the feed-forward part, shape (n_rows, n_tokens, hidden_size)."""
        where = tuple(index.to(states.device) for index in self.where)
        computed = self.mlp(states[where][None])
        if not isinstance(computed, Tensor):  # a mixture of experts returns its router's choices too
            return self.mlp(states)
        out = computed.new_zeros((*states.shape[:-1], computed.shape[-1]))
        out[where] = computed[0]
        return out


@contextmanager
def mlp_at_rows(layer: torch.nn.Module | None, where: tuple[Tensor, Tensor]) -> Iterator[None]:
    """Within this block, compute the layer's feed-forward part at the positions `where` only.

    Parameters
    ----------
    layer : Module or None
        From `find_last_layer`; None changes nothing.
    where : two Tensors of int64, each shape (k,)
        Batch row and position of each scored token.
    """
    if layer is None:
        yield
        return
    mlp = layer._modules[NAME]
    assert mlp is not None
    layer._modules[NAME] = _MlpAtRows(mlp, where)
    try:
        yield
    finally:
        layer._modules[NAME] = mlp
