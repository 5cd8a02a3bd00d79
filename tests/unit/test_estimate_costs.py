"""Estimates of costs on random models: near the measured KL of small changes, and in their order."""

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mlflow_compress.commands.search.measured_costs import estimates, fisher_costs
from mlflow_compress.errors import UnsupportedError
from mlflow_compress.models.loading import LoadedModel
from mlflow_compress.models.weight_groups import WeightGroup, weight_groups
from mlflow_compress.scoring.plan.corpus_windows import Windows
from mlflow_compress.scoring.swap_meter import Swap, SwapMeter
from tests.unit.scoring_models import VOCAB, load_random

TEXTS = [np.random.default_rng(i).integers(2, VOCAB, size=24).astype(np.int32) for i in range(16)]
WINDOWS = Windows(TEXTS, [np.arange(1, 24)] * len(TEXTS))


@pytest.fixture(scope="module")
def base() -> LoadedModel:
    return load_random("llama")


def groups_of(base: LoadedModel) -> list[WeightGroup]:
    return [one for one in weight_groups(base.model) if one.layer is not None and one.kind != "norm"]


def changed(base: LoadedModel, size: float) -> LoadedModel:
    """The model with noise in its matrices, of another size in every group."""
    model = copy.deepcopy(base.model)
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for number, group in enumerate(groups_of(base)):
            for name in group.modules:
                weight = model.get_submodule(name).weight
                weight += size * 1.5 ** (number % 5) * weight.std() * torch.randn(weight.shape, generator=random)
    return LoadedModel(model, base.tokenizer, base.path, base.dtype, base.device)


def measured(base: LoadedModel, variant: LoadedModel) -> np.ndarray[Any, Any]:
    groups = groups_of(base)
    found = SwapMeter(base, progress=False).measure("t", WINDOWS, [Swap.of(g, variant.model) for g in groups])
    return np.array([found.where(swap=group.name).column("kl").mean() for group in groups])


def test_fisher_is_near_the_measured_kl_of_small_changes(base: LoadedModel) -> None:
    variant = changed(base, 0.02)
    before = {name: (p.requires_grad, p.clone()) for name, p in base.model.named_parameters()}
    found = fisher_costs(base.model, variant.model, groups_of(base), WINDOWS, seed=0)
    truth = measured(base, variant)
    assert (found > 0.2 * truth).all() and (found < 5 * truth).all()
    assert np.corrcoef(np.log(found), np.log(truth))[0, 1] > 0.9
    assert (found == fisher_costs(base.model, variant.model, groups_of(base), WINDOWS, seed=0)).all()
    assert (fisher_costs(base.model, base.model, groups_of(base), WINDOWS, seed=0) == 0).all()
    for name, parameter in base.model.named_parameters():
        assert (parameter.requires_grad, parameter.grad) == (before[name][0], None)
        assert torch.equal(parameter, before[name][1])


def costs_of(base: LoadedModel, variant: LoadedModel, groups: list[WeightGroup]) -> Any:
    config = SimpleNamespace(source=SimpleNamespace(seed=0))
    opened = {None: base, "variant": variant}
    return SimpleNamespace(open=opened.__getitem__, groups=groups, config=config, text=SimpleNamespace(windows=WINDOWS))


def test_kept_layers_cost_nothing(base: LoadedModel) -> None:
    variant, groups = changed(base, 0.02), groups_of(base)
    found = estimates(costs_of(base, variant, groups), {"x:4": "variant", "none": None})
    assert (found[:, 0] == fisher_costs(base.model, variant.model, groups, WINDOWS, seed=0)).all()
    assert (found[:, 1] == 0).all() and found.shape == (len(groups), 2)


def test_groups_with_norms_cannot_be_estimated(base: LoadedModel) -> None:
    """As `awq` has them, whose scales were moved into the norms."""
    group = WeightGroup("layers.0.qkv", "qkv", 0, ("model.layers.0.input_layernorm", "model.layers.0.self_attn.q_proj"))
    with pytest.raises(UnsupportedError, match="holds other modules than linear layers"):
        estimates(costs_of(base, base, [group]), {"x:4": "variant"})
