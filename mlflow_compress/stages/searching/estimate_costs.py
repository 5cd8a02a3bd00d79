"""Estimates the costs of formats from the baseline and the checkpoints, without a swap."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

from mlflow_compress.decide.cost_estimate import (
    EstimateKind,
    Estimation,
    estimated_table,
    fisher_cost,
    relative_l2_error,
)
from mlflow_compress.decide.cost_table import CostTable, Limit, StoredSizes
from mlflow_compress.errors import UnsupportedError
from mlflow_compress.metrics.stats.arrays import Float
from mlflow_compress.models.swappable_groups import Differences, restored_weight
from mlflow_compress.models.weight_groups import WeightGroup
from mlflow_compress.scoring.plan.corpus_windows import Windows
from mlflow_compress.stages.searching.swap_costs import SwapCosts

Tensor = torch.Tensor
Calls = dict[str, list[tuple[Tensor, Tensor]]]  # by layer, inputs and outputs


def estimates(kind: EstimateKind, costs: SwapCosts, folders: Mapping[str, str | None]) -> Float:
    """Return the estimate of every format in every group, shape (n_groups, n_formats); 0 for layers that stay.

    One variant is in memory at a time, beside the baseline. "fisher" needs a pass forward and a pass backward of the
    baseline for each format, and the variant's layers on the baseline's inputs. "linearity" needs the weights only.

    Raises
    ------
    UnsupportedError
        A group holds other modules than linear layers, or weights that are not stored as floating-point numbers.
    """
    baseline = costs.open(None).model
    for group in costs.groups:
        if others := [name for name in group.modules if not isinstance(baseline.get_submodule(name), torch.nn.Linear)]:
            raise UnsupportedError(
                f"Costs of group {group.name} cannot be estimated: it holds other modules than linear layers",
                got=others[0],
                fix="Give estimate=none",
            )
    columns: list[Float] = []
    for folder in folders.values():
        if folder is None:
            columns.append(np.zeros(len(costs.groups)))
            continue
        variant = costs.open(folder).model
        if kind == "linearity":
            columns.append(np.array([_relative_error(group, baseline, variant) for group in costs.groups]))
        else:
            seed = costs.config.source.seed
            columns.append(fisher_costs(baseline, variant, costs.groups, costs.text.windows, seed))
    return np.stack(columns, axis=1)


def first_estimated_table(
    kind: EstimateKind,
    costs: SwapCosts,
    folders: Mapping[str, str | None],
    sizes: StoredSizes,
    limits: Sequence[Limit],
    most: int,
) -> tuple[CostTable, Estimation]:
    """Return the costs in the baseline, measured where the limits choose and estimated elsewhere.

    Arguments as `estimates` and `estimated_table` have them.
    """
    paths = list(folders.values())

    def measure(column: int, groups: Sequence[int]) -> Float:
        folder = paths[column]
        assert folder is not None  # `known`
        return costs.alone(folder, groups)

    return estimated_table(
        kind,
        estimates(kind, costs, folders),
        limits,
        sizes,
        measure,
        n_windows=len(costs.text.windows.ids),
        known=[column for column, folder in enumerate(paths) if folder is None],
        most=most,
    )


def fisher_costs(baseline: Any, variant: Any, groups: Sequence[WeightGroup], windows: Windows, seed: int) -> Float:
    """Return the estimated KL of each group per scored token, shape (n_groups,).

    Parameters
    ----------
    baseline, variant : transformers.PreTrainedModel
    groups : sequence of WeightGroup
        Of linear layers.
    windows : Windows
        Texts with their scored positions.
    seed : int
        Of the tokens that are drawn from the baseline's distributions.
    """
    layers = [name for group in groups for name in group.modules]
    n_scored = sum(map(len, windows.scored))
    total = dict.fromkeys(layers, 0.0)
    device = baseline.get_input_embeddings().weight.device
    generator = torch.Generator().manual_seed(seed)
    for ids, scored in zip(windows.ids, windows.scored, strict=True):
        with torch.enable_grad(), _noted(baseline, layers) as calls:
            logits = baseline(input_ids=torch.from_numpy(ids.astype(np.int64))[None].to(device), use_cache=False).logits
            rows = torch.log_softmax(logits[0, torch.from_numpy(scored - 1).to(logits.device)].float(), dim=-1)
            drawn = torch.multinomial(rows.detach().exp().cpu(), 1, generator=generator).to(rows.device)
            outputs = [output for layer in layers for _, output in calls[layer]]
            gradients = iter(torch.autograd.grad(rows.gather(1, drawn).sum(), outputs))
        with torch.inference_mode():
            for layer in layers:
                module = variant.get_submodule(layer)
                for given, output in calls[layer]:
                    errors = module(given) - output.detach()
                    g, e = (x.flatten(0, -2).float().cpu().numpy() for x in (next(gradients), errors))
                    total[layer] += fisher_cost(g, e, n_scored)
    return np.array([sum(total[name] for name in group.modules) for group in groups])


def _relative_error(group: WeightGroup, baseline: Any, variant: Any) -> float:
    pairs = []
    for name in group.modules:
        old = baseline.get_submodule(name).weight.detach().float()
        new = restored_weight(variant, name, Differences([], [], {}))
        if new is None or new.shape != old.shape:
            raise UnsupportedError(
                "A weight is not stored as floating-point numbers of the baseline's shape, so its error is not known",
                got=name,
                fix="Give estimate=fisher or estimate=none",
            )
        pairs.append((old.cpu().numpy(), new.cpu().numpy()))
    return relative_l2_error(pairs)


@contextmanager
def _noted(model: Any, layers: Sequence[str]) -> Iterator[Calls]:
    """Within this block the layers' inputs and outputs are noted, and gradients reach the outputs.

    Only outputs get gradients: the embeddings' output is where the graph begins, and weights are no part of it.
    """
    calls: Calls = {name: [] for name in layers}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with ExitStack() as undo:
        for parameter in trained:
            parameter.requires_grad_(False)
            undo.callback(parameter.requires_grad_, True)
        embeddings = model.get_input_embeddings()
        hook = embeddings.register_forward_hook(lambda _module, _given, output: output.requires_grad_(True))
        undo.callback(hook.remove)
        for name in layers:

            def note(_module: Any, given: Any, output: Tensor, name: str = name) -> None:
                calls[name].append((given[0].detach(), output))

            undo.callback(model.get_submodule(name).register_forward_hook(note).remove)
        yield calls
