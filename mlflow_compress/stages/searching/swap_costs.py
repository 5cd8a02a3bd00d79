"""Measures what formats cost, group by group, on the search's own text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mlflow_compress.compression import calibration_tokens
from mlflow_compress.config import SearchConfig
from mlflow_compress.errors import ConfigError, UnsupportedError
from mlflow_compress.items.sources.calibration_sets import load_calibration
from mlflow_compress.metrics.stats.arrays import Float
from mlflow_compress.models.loading import LoadedModel, load_model
from mlflow_compress.models.source_model import SourceModel, without_weights
from mlflow_compress.models.swappable_groups import find_differences
from mlflow_compress.models.weight_groups import WeightGroup, weight_groups
from mlflow_compress.records import SwapDistances
from mlflow_compress.scoring.plan.corpus_windows import Windows
from mlflow_compress.scoring.plan.trie import Ids
from mlflow_compress.scoring.swaps.swap import Swap
from mlflow_compress.scoring.swaps.swap_meter import WHOLE, SwapMeter
from mlflow_compress.stages.evaluation.open_models import light
from mlflow_compress.stages.get_or_create import digest
from mlflow_compress.stages.model_names import model_path


@dataclass(frozen=True, kw_only=True, eq=False)
class SearchText:
    """The text that costs are measured on.

    Attributes
    ----------
    name : str
        The set or file that it is from.
    texts : tuple of str
        All of that set, for the check against the evaluation.
    sha256 : str
        Of the token ids.
    windows : Windows
        Equal windows, of which the second half is scored.
    """

    name: str
    texts: tuple[str, ...]
    sha256: str
    windows: Windows


def search_text(config: SearchConfig, source: SourceModel, used: int) -> SearchText:
    """Return the search's text, cut into windows.

    Parameters
    ----------
    config : SearchConfig
        The search.
    source : SourceModel
        The baseline, for its tokenizer.
    used : int
        Windows that calibrate. Without a text of its own, the search takes those that follow in the seeded order.

    Raises
    ------
    ConfigError
        The text is too short.
    """
    space = config.space
    given = space.search_text or space.calibration
    found = load_calibration(given, model=config.source.model, data_dir=config.source.data_dir or "")
    skipped = 0 if space.search_text else used
    tokenizer = source.tokenizer()
    length = space.calibration_length
    try:
        tokens = calibration_tokens.prepare(
            tokenizer,
            found.rendered(tokenizer),
            samples=skipped + space.search_windows,
            length=length,
            seed=config.source.seed,
        )
    except ConfigError as error:
        needed = f"{skipped + space.search_windows} windows of {length} tokens, of which {skipped} calibrate"
        raise ConfigError(
            f"The search's text {found.name!r} is too short", allowed=needed, fix="Give search_text, or fewer windows"
        ) from error
    chosen = calibration_tokens.Calibration(tokens.ids[skipped:])
    ids: list[Ids] = list(chosen.ids.astype(np.int32))
    return SearchText(
        name=found.name,
        texts=tuple(found.plain()),
        sha256=chosen.sha256,
        windows=Windows(ids, [np.arange(length // 2 + 1, length)] * len(ids)),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class SwapCosts:
    """Measures checkpoints against the baseline, as a whole and group by group.

    Attributes
    ----------
    config : SearchConfig
        Which baseline, and how models are loaded.
    text : SearchText
        What is scored.
    resume : Path
        Folder of unfinished measurements. A search that was interrupted loses the batch that it was at.
    groups : tuple of WeightGroup
        The groups that get a format each.
    """

    config: SearchConfig
    text: SearchText
    resume: Path
    groups: tuple[WeightGroup, ...]

    def alone(self, folder: str, numbers: Sequence[int] | None = None) -> Float:
        """Return the KL of the baseline with one group of a checkpoint at a time, shape (n_groups, n_windows).

        `numbers` are the groups; all by default.
        """
        variant = self.open(folder)
        groups = [self.groups[i] for i in (range(len(self.groups)) if numbers is None else numbers)]
        kind = f"alone-{digest({'groups': [group.name for group in groups]})[:12]}"
        found = self._measured(kind, [Swap.of(group, variant.model) for group in groups], [variant])
        return self._per_group(found, groups)

    def around(self, recipe: str, folder: str | None) -> Float:
        """Return the KL of a recipe's checkpoint with one group of another one at a time; None is the baseline."""
        chosen, other = self.open(recipe), self.open(folder)
        swaps = []
        for group in self.groups:
            rest = [Swap.of(one, chosen.model) for one in self.groups if one is not group]
            swaps.append(Swap.together(group.name, [*rest, Swap.of(group, other.model)]))
        return self._per_group(self._measured("around", swaps, [chosen, other]), self.groups)

    def whole(self, folder: str) -> Float:
        """Return the KL of a checkpoint, shape (n_windows,)."""
        variant = self.open(folder)
        return self._windows(self._measured("whole", [], [variant], variant=variant), WHOLE)

    def open(self, folder: str | None) -> LoadedModel:
        """Return the model of a checkpoint; None is the baseline."""
        path = model_path(self.config.source.model) if folder is None else folder
        return load_model(light(path, self.config.source, self.config.inference).config)

    def _measured(
        self, kind: str, swaps: Sequence[Swap], models: Sequence[LoadedModel], variant: LoadedModel | None = None
    ) -> SwapDistances:
        hashes = [model.weights for model in models]
        folder = self.resume / f"{kind}-{'-'.join(one[:12] for one in hashes)}"
        identity = {"kind": kind, "models": json.dumps(hashes), "text": self.text.sha256}
        meter = SwapMeter(self.open(None), progress=False)
        return meter.measure("search", self.text.windows, swaps, variant=variant, resume=folder, identity=identity)

    def _per_group(self, found: SwapDistances, groups: Sequence[WeightGroup]) -> Float:
        return np.stack([self._windows(found, group.name) for group in groups])

    def _windows(self, found: SwapDistances, name: str) -> Float:
        """Return the mean KL of each window, whose scored positions are equally many."""
        kl = found.where(swap=name).column("kl")
        return np.asarray(kl.reshape(len(self.text.windows.ids), -1).mean(axis=1), dtype=np.float64)


def format_groups(
    config: SearchConfig, source: SourceModel, folders: Sequence[str], *, rescaled: bool
) -> tuple[WeightGroup, ...]:
    """Return the groups of layers that get one format each.

    Parameters
    ----------
    config : SearchConfig
        Which baseline, and how models are loaded.
    source : SourceModel
        The baseline.
    folders : sequence of str
        The uniform checkpoints.
    rescaled : bool
        Whether scales were moved between neighbours in them. Then norms, and layers that have each other's scales, are
        in one group; else the groups are the layers that serving engines fuse.

    Raises
    ------
    UnsupportedError
        A group holds weights that no format changes.
    """
    opened = light(model_path(config.source.model), config.source, config.inference)
    if rescaled:
        baseline = load_model(opened.config).model
        found: list[WeightGroup] = []
        for folder in folders:
            variant = load_model(light(folder, config.source, config.inference).config).model
            for group in find_differences(baseline, variant).groups:
                found = joined(found, group)
    else:
        bare = without_weights(opened.model_config, source.name, trust_remote_code=source.trust_remote_code)
        found = [group for group in weight_groups(bare) if set(group.modules) & source.linear.keys()]
        for group in found:
            if others := sorted(set(group.modules) - source.linear.keys()):
                raise UnsupportedError(f"Group {group.name} holds weights that are in no linear layer", got=others[0])
    return tuple(found)


def joined(groups: Sequence[WeightGroup], other: WeightGroup) -> list[WeightGroup]:
    """Return the groups with one more; those that share a module with it become one group with it."""
    same = [group for group in groups if set(group.modules) & set(other.modules)]
    if not same:
        return [*groups, other]
    modules = tuple(dict.fromkeys(name for group in (*same, other) for name in group.modules))
    kinds = "+".join(dict.fromkeys(kind for group in (*same, other) for kind in group.kind.split("+")))
    first = same[0]
    prefix = first.name.removesuffix(first.kind)
    whole = WeightGroup(f"{prefix}{kinds}", kinds, first.layer, modules)
    return [whole if group is first else group for group in groups if group is first or group not in same]
