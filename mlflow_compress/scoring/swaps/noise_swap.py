"""A control: Gaussian noise of the size of a group's own change, in place of that change."""

from __future__ import annotations

import copy
import hashlib
from typing import Any

import torch

from mlflow_compress.models.swappable_groups import Differences, restored_weight
from mlflow_compress.models.weight_groups import WeightGroup
from mlflow_compress.scoring.swaps.swap import Swap

Tensor = torch.Tensor


def noise_swap(
    group: WeightGroup, name: str, baseline: Any, variant: Any, found: Differences, *, seed: int
) -> Swap | str:
    """Return a swap in which every matrix is the baseline's plus Gaussian noise, or why there is none.

    The noise of a matrix has the Frobenius norm of what the variant has changed in it, after scales that were moved
    between neighbours are moved back. Norms stay the baseline's. The same seed gives the same noise.

    Parameters
    ----------
    group : WeightGroup
        One of `found.groups`.
    name : str
        Of the swap.
    baseline, variant : transformers.PreTrainedModel
    found : Differences
        What `find_differences` found in the two.
    seed : int
    """
    modules: dict[str, torch.nn.Module] = {}
    weights: dict[int, torch.nn.Parameter] = {}  # tied weights get one noise
    for path in group.modules:
        module = baseline.get_submodule(path)
        matrices = {part: p for part, p in module.named_parameters() if p.ndim > 1}
        if not matrices:
            continue
        noisy = copy.deepcopy(module)
        for part, old in matrices.items():
            new = restored_weight(variant, path, found) if part == "weight" else _parameter(variant, path, part)
            if new is None or new.shape != old.shape:
                return f"{path}.{part} is not stored as floating-point numbers of the baseline's shape"
            owner, _, leaf = part.rpartition(".")
            if id(old) not in weights:
                size = (new.to(old.device) - old.float()).norm()
                noise = _with_noise(old, size, f"{seed} {path} {part}")
                weights[id(old)] = torch.nn.Parameter(noise, requires_grad=False)
            noisy.get_submodule(owner)._parameters[leaf] = weights[id(old)]
        modules[path] = noisy.eval()
    return Swap(name, modules) if modules else "the group has no matrix"


def _parameter(variant: Any, path: str, part: str) -> Tensor | None:
    parameter = dict(variant.get_submodule(path).named_parameters()).get(part)
    return parameter.data.float() if parameter is not None and parameter.is_floating_point() else None


def _with_noise(weight: Tensor, size: Tensor, key: str) -> Tensor:
    """Return a weight plus noise of a Frobenius norm; the key decides the noise, on every device."""
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") >> 1)
    noise = torch.randn(weight.shape, generator=generator).to(weight.device)
    noisy: Tensor = weight.data.float() + noise * (size / noise.norm())
    return noisy.to(weight.dtype)
