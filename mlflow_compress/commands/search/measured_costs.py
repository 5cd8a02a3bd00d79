"""What formats cost in each group of layers, measured in the baseline one group at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mlflow_compress.commands.evaluate.models import as_baseline, light
from mlflow_compress.commands.search.parameters import SearchConfig
from mlflow_compress.commands.shared.get_or_create import digest
from mlflow_compress.commands.shared.named_models import model_path
from mlflow_compress.compression import calibration_tokens
from mlflow_compress.decide.cost_table import CostTable, StoredSizes
from mlflow_compress.errors import ConfigError, UnsupportedError
from mlflow_compress.items.sources.calibration_sets import load_calibration
from mlflow_compress.metrics.stats.arrays import Float
from mlflow_compress.models.architectures.quantized_cache import QuantizedCache, attention_modules, with_cache
from mlflow_compress.models.loading import LoadedModel, load_model
from mlflow_compress.models.model_files import without_weights
from mlflow_compress.models.source_model import SourceModel
from mlflow_compress.models.weight_groups import (
    WeightGroup,
    find_differences,
    weight_groups,
)
from mlflow_compress.records import SwapDistances
from mlflow_compress.scoring.plan.corpus_windows import Windows
from mlflow_compress.scoring.plan.packing import Ids
from mlflow_compress.scoring.swap_meter import WHOLE, Swap, SwapMeter


@dataclass(frozen=True, kw_only=True, eq=False)
class SearchText:
    """The text that costs are measured on."""

    name: str  # The set or file that it is from
    texts: tuple[str, ...]  # All of that set, for the check against the evaluation
    sha256: str  # Of the token ids
    windows: Windows  # Equal windows, of which the second half is scored


def read_search_text(config: SearchConfig, source: SourceModel, used: int) -> SearchText:
    """Return the search's text, cut into windows.

    `used` windows calibrate. Without a text of its own, the search takes those that follow in the seeded order.
    """
    space = config.space
    named = space.search_text or space.calibration
    corpus = load_calibration(named, model=config.source.model, data_dir=config.source.data_dir or "")
    skipped = 0 if space.search_text else used
    tokenizer = source.tokenizer()
    length = space.calibration_length
    try:
        tokens = calibration_tokens.prepare_calibration(
            tokenizer,
            corpus.rendered(tokenizer),
            samples=skipped + space.search_windows,
            length=length,
            seed=config.source.seed,
        )
    except ConfigError as error:
        needed = f"{skipped + space.search_windows} windows of {length} tokens, of which {skipped} calibrate"
        raise ConfigError(
            f"The search's text {corpus.name!r} is too short",
            allowed=needed,
            fix="Give text or fewer windows in search_args",
        ) from error
    chosen = calibration_tokens.Calibration(tokens.ids[skipped:])
    ids: list[Ids] = list(chosen.ids.astype(np.int32))
    return SearchText(
        name=corpus.name,
        texts=tuple(corpus.plain()),
        sha256=chosen.sha256,
        windows=Windows(ids, [np.arange(length // 2 + 1, length)] * len(ids)),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class SwapCosts:
    """Measures checkpoints against the baseline, as a whole and group by group."""

    config: SearchConfig  # Which baseline, and how models are loaded
    text: SearchText  # What is scored
    resume: Path  # Folder of unfinished measurements. A search that was interrupted loses the batch that it was at.
    groups: tuple[WeightGroup, ...]  # The groups of layers that get a format each
    caches: tuple[WeightGroup, ...] = ()  # The attention of each layer, where its cache gets a format too

    def alone(self, option: str | QuantizedCache, numbers: Sequence[int] | None = None) -> Float:
        """Return the KL of the baseline with one group of a checkpoint, or one layer's rounded cache, at a time.

        Its shape is (n_groups, n_windows). `numbers` are the groups; all by default.
        """
        baseline = self.open(None)
        model: LoadedModel | QuantizedCache
        model, every = (self.open(option), self.groups) if isinstance(option, str) else (option, self.caches)
        groups = every if numbers is None else [every[i] for i in numbers]
        kind = f"alone-{digest({'groups': [group.name for group in groups]})[:12]}"
        swaps = [self._swap(group, model, baseline) for group in groups]
        distances = self._measured(kind, swaps, [model], baseline=baseline)
        return np.stack([self._windows(distances, group.name) for group in groups])

    def table(
        self,
        sizes: StoredSizes,
        folders: Mapping[str, str | None],
        caches: Sequence[Mapping[str, QuantizedCache | None]],
    ) -> CostTable:
        """Return the KL of every group in each format.

        `folders` are the formats' checkpoints; `caches` what the cache of each group can be. None is the baseline.
        """
        n_groups = len(self.groups)
        kl = np.zeros((*sizes.layers.shape, len(self.text.windows.ids)))
        for column, name in enumerate(sizes.formats):
            if (folder := folders.get(name)) is not None and n_groups:
                kl[:n_groups, column] = self.alone(folder)
            rounded: dict[QuantizedCache, list[int]] = {}
            for number, options in enumerate(caches):
                if (cache := options.get(name)) is not None:
                    rounded.setdefault(cache, []).append(number)
            for cache, numbers in rounded.items():
                kl[[n_groups + number for number in numbers], column] = self.alone(cache, numbers)
        return CostTable(sizes=sizes, kl=kl)

    def _swap(self, group: WeightGroup, option: LoadedModel | QuantizedCache, baseline: LoadedModel) -> Swap:
        if isinstance(option, LoadedModel):
            return Swap.of(group, option.model)
        modules = {name: baseline.model.get_submodule(name) for name in group.modules}
        return Swap(group.name, {name: with_cache(module, option) for name, module in modules.items()})

    def whole(self, folder: str) -> Float:
        """Return the KL of a checkpoint, shape (n_windows,)."""
        variant = self.open(folder)
        return self._windows(self._measured("whole", [], [variant], variant=variant), WHOLE)

    def open(self, folder: str | None) -> LoadedModel:
        """Return the model of a checkpoint; None is the baseline."""
        source, inference = self.config.source, self.config.inference
        base = light(model_path(source.model), source, inference)
        chosen = base if folder is None else light(folder, source, as_baseline(inference, base))
        return load_model(chosen.config)

    def _measured(
        self,
        kind: str,
        swaps: Sequence[Swap],
        models: Sequence[LoadedModel | QuantizedCache],
        *,
        variant: LoadedModel | None = None,
        baseline: LoadedModel | None = None,
    ) -> SwapDistances:
        hashes = [one.weights if isinstance(one, LoadedModel) else digest({"cache": str(one)}) for one in models]
        folder = self.resume / f"{kind}-{'-'.join(one[:12] for one in hashes)}"
        identity = {"kind": kind, "models": json.dumps(hashes), "text": self.text.sha256}
        meter = SwapMeter(baseline or self.open(None), progress=False)
        return meter.measure("search", self.text.windows, swaps, variant=variant, resume=folder, identity=identity)

    def _windows(self, distances: SwapDistances, name: str) -> Float:
        """Return the mean KL of each window, whose scored positions are equally many."""
        kl = distances.where(swap=name).column("kl")
        return np.asarray(kl.reshape(len(self.text.windows.ids), -1).mean(axis=1), dtype=np.float64)


def cache_groups(source: SourceModel) -> tuple[WeightGroup, ...]:
    """Return the attention of each layer, as a group that gets a format for its cache."""
    bare = without_weights(source.configuration(), source.folder, trust_remote_code=source.trust_remote_code)
    modules = enumerate(attention_modules(bare))
    return tuple(WeightGroup(f"layers.{layer}.cache", "cache", layer, (name,)) for layer, (name, _) in modules)


def format_groups(
    config: SearchConfig, source: SourceModel, folders: Sequence[str], *, rescaled: bool
) -> tuple[WeightGroup, ...]:
    """Return the groups of layers that get one format each.

    Where scales were moved between neighbours (`rescaled`), norms, and layers that have each other's scales, are in
    one group; else the groups are the layers that serving engines fuse.
    """
    opened = light(model_path(config.source.model), config.source, config.inference)
    inference = as_baseline(config.inference, opened)
    if rescaled:
        baseline = load_model(opened.config).model
        joined: list[WeightGroup] = []
        for folder in folders:
            variant = load_model(light(folder, config.source, inference).config).model
            for group in find_differences(baseline, variant).groups:
                joined = joined_distances(joined, group)
    else:
        bare = without_weights(opened.model_config, opened.path, trust_remote_code=source.trust_remote_code)
        joined = [group for group in weight_groups(bare) if set(group.modules) & source.linear.keys()]
        for group in joined:
            if others := sorted(set(group.modules) - source.linear.keys()):
                raise UnsupportedError(f"Group {group.name} has weights outside linear layers", got=others[0])
    return tuple(joined)


def joined_distances(groups: Sequence[WeightGroup], other: WeightGroup) -> list[WeightGroup]:
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
