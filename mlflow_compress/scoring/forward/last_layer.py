"""The feed-forward part of a model's last layer, at scored positions only: what it adds elsewhere, nobody reads."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

Tensor = torch.Tensor
NAME = "mlp"


def find_last_layer(base: torch.nn.Module, n_layers: int) -> torch.nn.Module | None:
    """Return a model's last layer, if its feed-forward part is found: a module `mlp` that takes nothing but states."""
    for module in base.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == n_layers:
            part = module[-1]._modules.get(NAME)
            alone = part is not None and len(inspect.signature(part.forward).parameters) == 1
            return module[-1] if alone else None
    return None


class _AtRows(torch.nn.Module):
    """Stands in for the part, and gives 0 at all other positions."""

    def __init__(self, part: torch.nn.Module, where: tuple[Tensor, Tensor]) -> None:
        super().__init__()
        self.part, self.where = part, where

    def forward(self, states: Tensor) -> Any:
        """Return what the part gives, shape (n_rows, n_tokens, hidden_size)."""
        where = tuple(index.to(states.device) for index in self.where)
        found = self.part(states[where][None])
        if not isinstance(found, Tensor):  # a router's choices, of every position
            return self.part(states)
        out = found.new_zeros((*states.shape[:-1], found.shape[-1]))
        out[where] = found[0]
        return out


@contextmanager
def at_rows(layer: torch.nn.Module | None, where: tuple[Tensor, Tensor]) -> Iterator[None]:
    """Within this block, compute the part at the positions `where` (batch rows and places, each (k,)) only."""
    if layer is None:
        yield
        return
    part = layer._modules[NAME]
    assert part is not None
    layer._modules[NAME] = _AtRows(part, where)
    try:
        yield
    finally:
        layer._modules[NAME] = part
