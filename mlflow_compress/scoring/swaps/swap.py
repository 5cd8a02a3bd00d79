"""A swap: modules of a baseline replaced by others, as long as a block lasts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from mlflow_compress.models.weight_groups import WeightGroup

NO_SWAP, ALL = "none", "all"


@dataclass(frozen=True)
class Swap:
    """Modules that replace those of the same names in a baseline.

    Attributes
    ----------
    name : str
        Unique among the swaps that are measured together.
    modules : mapping of str to Module
        By their names in `model.named_modules()`. Each is called in place of the baseline's, with its own activation
        quantization. Empty: nothing is replaced.
    """

    name: str
    modules: Mapping[str, torch.nn.Module] = field(repr=False)

    @classmethod
    def of(cls, group: WeightGroup, variant: Any, name: str | None = None) -> Swap:
        """Return the swap of one group of weights; `name` is the group's where it is not given."""
        return cls(name or group.name, {module: variant.get_submodule(module) for module in group.modules})

    @classmethod
    def together(cls, name: str, swaps: list[Swap]) -> Swap:
        """Return all swaps at once."""
        return cls(name, {path: module for swap in swaps for path, module in swap.modules.items()})


@contextmanager
def swapped(model: Any, swap: Swap) -> Iterator[None]:
    """Within this block the model has the modules of the swap."""
    before: list[tuple[torch.nn.Module, str, torch.nn.Module]] = []
    try:
        for path, module in swap.modules.items():
            parent_path, _, leaf = path.rpartition(".")
            parent = model.get_submodule(parent_path)
            before.append((parent, leaf, parent.get_submodule(leaf)))
            parent._modules[leaf] = module
        yield
    finally:
        for parent, leaf, module in before:
            parent._modules[leaf] = module
