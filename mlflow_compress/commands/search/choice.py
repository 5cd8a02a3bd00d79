"""Which formats a search may mix, and which it chooses within a budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import numpy as np

from mlflow_compress.commands.main.parameters import MainConfig
from mlflow_compress.commands.quantize.run import variant_name
from mlflow_compress.commands.search.parameters import SearchConfig
from mlflow_compress.commands.shared.named_method import method_settings
from mlflow_compress.commands.sweep.plan import Combination
from mlflow_compress.compression.method import METHODS, CalibratedConfig
from mlflow_compress.compression.methods.kv_cache import KvCacheConfig, quantized_cache
from mlflow_compress.compression.mixed_recipe import MIXED, MixedRecipe
from mlflow_compress.compression.servers import check_target
from mlflow_compress.decide.cost_table import Allocation, CostTable, Limit, StoredSizes
from mlflow_compress.errors import ConfigError, UnsupportedError
from mlflow_compress.metrics.stats.arrays import Float
from mlflow_compress.metrics.stats.bootstrap import studentized_interval
from mlflow_compress.metrics.stats.significance import paired_mean
from mlflow_compress.models.architectures.quantized_cache import QuantizedCache, cache_bytes_per_token
from mlflow_compress.models.checkpoint_config import QUANTIZED_CACHE
from mlflow_compress.models.source_model import SourceModel
from mlflow_compress.models.stored_weights import bytes_of_layers, read_headers, total_bytes

BASELINE = "baseline"


@dataclass(frozen=True, kw_only=True)
class CandidateFormat:
    """A format that a group of layers may get."""

    name: str  # As the user wrote it: "gptq:4"
    method: str  # Its method
    uniform: Combination  # The variant in which all layers have this format

    @property
    def described(self) -> dict[str, Any]:
        """Method and settings for a recipe, which has the settings of the calibration by itself."""
        settings = self.uniform.own_settings.items()
        return {"method": self.method, **{k: v for k, v in settings if k not in CalibratedConfig.model_fields}}

    @property
    def calibration_samples(self) -> int:
        """Calibration sequences that its method reads; 0 where it needs none."""
        return int(getattr(self.uniform.settings, "calibration_samples", 0))


def candidates(config: SearchConfig) -> tuple[list[CandidateFormat], bool]:
    """Return the formats, and whether a layer may stay as it is."""
    uniform, may_keep = config.uniform_variants()
    choices = []
    for name, variant in uniform.items():
        method, combination = variant.compression.method, combination_of(variant)
        METHODS.get(method).require_backend(combination.settings)
        choices.append(CandidateFormat(name=name, method=method, uniform=combination))
    return choices, may_keep


def combination_of(config: MainConfig) -> Combination:
    """Return a main job that compresses, with its short name and the settings of its method."""
    quantize = config.quantize_config
    return Combination(
        name=variant_name(quantize), config=config, settings=method_settings(quantize.compression, quantize.source)
    )


def limits_of(config: SearchConfig) -> list[Limit]:
    """Return the limits, one variant each."""
    kind = config.limited
    values = sorted({float(part) for part in getattr(config.space, kind).split(",")})
    return [Limit(kind=kind, value=value) for value in values]  # type: ignore[arg-type]


def recipe_variant(
    config: SearchConfig,
    choices: Sequence[CandidateFormat],
    layers: Mapping[str, str],
    name: str,
    folder: Path,
    caches: Mapping[str, KvCacheConfig] = MappingProxyType({}),
) -> Combination:
    """Return the variant of a recipe, which is written into `folder`; `caches` are those of layers by their number."""
    used = [one for one in choices if one.name in set(layers.values())]
    cache = {layer: one.model_dump(include={"key_bits", "value_bits"}) for layer, one in caches.items()}
    recipe = MixedRecipe(formats={one.name: one.described for one in used}, layers=dict(layers), cache=cache)
    parts = [*sorted({one.method for one in used}), *(["cache"] if caches else []), name]
    path = recipe.written(folder, "-".join(parts))
    samples = max([1, *(one.calibration_samples for one in used)])  # 1 where no format reads them
    recipe_of = {"method_args": {"recipe": str(path)}, "calibration_samples": samples}
    return combination_of(config.for_variants(MainConfig, method=MIXED, **recipe_of))


def require_mixable(config: SearchConfig, choices: Sequence[CandidateFormat], source: SourceModel) -> None:
    """Raise an error, before any work, where formats cannot share a checkpoint, or the target does not take them."""
    for one in choices:
        uniform: Any = one.uniform.settings
        check_target(config.space.target, METHODS.get(one.method), uniform, source)
    layers = {layer: choices[i % len(choices)].name for i, layer in enumerate(source.linear)}
    caches = dict(zip("0", filter(None, config.caches.values()), strict=False))  # the first one, of one layer
    with TemporaryDirectory() as folder:
        settings: Any = recipe_variant(config, choices, layers, "check", Path(folder), caches).settings
        METHODS.get(MIXED).check(settings, source)
        check_target(config.space.target, METHODS.get(MIXED), settings, source)


def cache_bytes(
    config: SearchConfig, source: SourceModel, caches: Mapping[str, QuantizedCache | None]
) -> dict[str, int]:
    """Return the bytes of one layer's cache in each format, and as `BASELINE` in the baseline; {} without formats."""
    if not caches:
        return {}
    model = source.configuration()
    text, tokens = model.get_text_config(), config.space.cache_tokens
    n_tokens = source.max_length if isinstance(tokens, str) else tokens
    window = getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None
    if (taken := cache_bytes_per_token(model)) is None or (window is not None and window < n_tokens):
        raise UnsupportedError(
            "The bytes of this model's cache are not known",
            allowed="attention with keys and values of one width, and a window of all cache_tokens",
            got=f"{source.architecture}, {n_tokens} tokens",
            fix="Give fewer cache_tokens, or leave out cache_formats",
        )
    sizes = {BASELINE: taken}
    for name, cache in caches.items():
        if cache is not None:
            setattr(text, QUANTIZED_CACHE, dict.fromkeys(map(str, range(source.layers)), asdict(cache)))
        sizes[name] = taken if cache is None else cache_bytes_per_token(model) or 0.0
    return {name: math.ceil(n_tokens * per_token / source.layers) for name, per_token in sizes.items()}


def with_caches(sizes: StoredSizes, caches: Mapping[str, Mapping[str, int]]) -> StoredSizes:
    """Return the sizes with each cache as one more group, and the formats of caches as columns too.

    `caches` has what `cache_bytes` returns, by the name of the group.
    """
    if not caches:
        return sizes
    formats = tuple(dict.fromkeys((*sizes.formats, *(name for one in caches.values() for name in one))))
    formats = tuple(name for name in formats if name != BASELINE)
    layers = np.pad(sizes.layers, ((0, len(caches)), (0, len(formats) - len(sizes.formats))))
    for row, n_bytes in enumerate(caches.values(), start=len(sizes.groups)):
        for name in n_bytes.keys() - {BASELINE}:
            layers[row, formats.index(name)] = n_bytes[name]
    kept = sum(n_bytes[BASELINE] for n_bytes in caches.values())
    groups = (*sizes.groups, *caches)
    return replace(sizes, groups=groups, formats=formats, layers=layers, base=sizes.base + kept, cache=kept)


def quantized_caches(config: SearchConfig, source: SourceModel) -> dict[str, QuantizedCache | None]:
    """Return what each format makes of a cache; None for the one that stays as it is."""
    return {name: None if one is None else quantized_cache(one, source) for name, one in config.caches.items()}


def require_in_reach(
    limit: Limit,
    choices: Sequence[CandidateFormat],
    source: SourceModel,
    caches: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """Raise `ConfigError`, before any work, for a budget that no format reaches or that is above the baseline's.

    Scales and zero points are not known yet: the budget is checked again when the formats' checkpoints are there.
    """
    headers = read_headers(source.folder)
    weights = sum(rows * columns for rows, columns in source.linear.values())
    base = bytes_of_layers(headers, source.linear)
    fewest = min(int(one.uniform.own_settings["bits"]) for one in choices)
    kept, *rounded = [source.layers * n_bytes for n_bytes in caches.values()] or [0, 0]
    sizes = StoredSizes(
        groups=("all",),
        formats=("smallest",),
        layers=np.array([[fewest * weights // 8 + min(rounded)]]),
        base=base + kept,
        rest=total_bytes(headers) - base,
        weights=weights,
    )
    if limit.kind != "max_kl":
        limit.layer_bytes(sizes, scales=False)


@dataclass(frozen=True, kw_only=True, eq=False)
class Choice:
    """A choice of formats, made and measured on the search's text."""

    allocation: Allocation  # The format of each group
    predicted: float  # The sum of the costs that chose it
    kl: Float  # What the checkpoint costs; shape (n_windows,)
    variant: Combination  # Name and parameters of the variant
    folder: str  # Its checkpoint

    @property
    def measured(self) -> float:
        return float(self.kl.mean())

    @property
    def high(self) -> float:
        """Upper end of its interval; infinite where there are too few windows for one."""
        interval = studentized_interval(self.kl)
        return np.inf if interval is None else interval.high


def choose_formats(
    limit: Limit,
    table: CostTable,
    *,
    make: Callable[[Allocation, Limit], tuple[Combination, str]],
    measure: Callable[[str], Float],
    uniform: Callable[[str], Float],
    rounds: int,
) -> Choice:
    """Return the best choice of formats, as a checkpoint.

    The integer programme chooses by the costs of one group at a time. Within a budget, one format for all that keeps to
    it is taken unless the mixture is surely closer: their difference, paired by window, has an interval below 0.
    `uniform` returns the KL of the uniform variant of a format, window by window.

    A limit of KL is one of the checkpoint: its upper end must keep to it. Where it does not, the programme is solved
    for what it predicted, lowered by the same factor, at most `rounds` times. If none keeps to it, it is the closest.
    """

    def made(allocation: Allocation) -> Choice:
        variant, folder = make(allocation, limit)
        predicted = table.predicted(allocation.choice)
        return Choice(allocation=allocation, predicted=predicted, kl=measure(folder), variant=variant, folder=folder)

    mixed = made(table.solved(limit))
    if limit.kind == "max_kl":
        return _within(limit, table, mixed, made, rounds)
    plain = table.largest_uniform(limit.layer_bytes(table.sizes))
    if plain is None or plain.choice == mixed.allocation.choice:
        return mixed
    # The uniform variants have their caches as in the baseline.
    simple = made(plain) if table.sizes.cache else None
    kl = uniform(table.sizes.formats[plain.choice[0]]) if simple is None else simple.kl
    return mixed if _is_surely_closer(mixed.kl, kl) else simple or made(plain)


def _within(limit: Limit, table: CostTable, first: Choice, made: Callable[[Allocation], Choice], rounds: int) -> Choice:
    """Return the first checkpoint that keeps to a limit of KL, or the closest one."""
    tried = [first]
    while limit.value < tried[-1].high < np.inf and len(tried) <= rounds:
        last = tried[-1]
        try:
            allocation = table.solved(replace(limit, value=last.predicted * limit.value / last.high))
        except ConfigError:  # not even the format that costs least in every group promises so little
            break
        tried.append(made(allocation))
    return min(tried, key=lambda one: one.high)


def _is_surely_closer(kl: Float, other: Float) -> bool:
    """Return whether a KL is below another one, paired by window; by the mean alone where there is no interval."""
    difference = paired_mean(kl - other)
    interval = None if difference is None else difference.interval
    return bool(kl.mean() < other.mean()) if interval is None else interval.high < 0
