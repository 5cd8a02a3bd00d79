"""Which formats a search may mix, and which it chooses within a budget."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import numpy as np

from mlflow_compress.commands.main.parameters import MainConfig
from mlflow_compress.commands.quantize.run import variant_name
from mlflow_compress.commands.search.parameters import SearchConfig
from mlflow_compress.commands.shared.inputs import method_settings
from mlflow_compress.commands.sweep.plan import Combination
from mlflow_compress.compression.method import METHODS, CalibratedConfig
from mlflow_compress.compression.methods.kv_cache import KvCacheConfig, quantized_cache
from mlflow_compress.compression.mixed_recipe import MIXED, MixedRecipe
from mlflow_compress.compression.servers import check_target
from mlflow_compress.decide.cost_table import Allocation, Around, Cell, CostTable, Limit, StoredSizes
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
    return Combination(name=variant_name(quantize), config=config, settings=method_settings(quantize))


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
    made: Mapping[str, str] = MappingProxyType({}),
) -> Combination:
    """Return the variant of a recipe, which is written into `folder`; `caches` are those of layers by their number.

    - `made`: Names of the uniform variants' checkpoints by their format, where layers are taken from them.
    """
    used = [one for one in choices if one.name in set(layers.values())]
    cache = {layer: one.model_dump(include={"key_bits", "value_bits"}) for layer, one in caches.items()}
    recipe = MixedRecipe(
        formats={one.name: one.described for one in used},
        layers=dict(layers),
        cache=cache,
        made={one.name: made[one.name] for one in used if one.name in made},
    )
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
            fix="Give fewer cache_tokens, or leave caches as they are",
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
class Mixture:
    """A choice of formats whose modules were put together in the baseline and measured, before it is a checkpoint."""

    allocation: Allocation  # The format of each group
    predicted: float  # What the costs promised that chose it last
    kl: Float  # What was measured; shape (n_windows,)
    round: int  # The round in which it was chosen first: 0 by the costs of one group at a time, later ones in place
    # Where costs in place chose it, what they promised over what was measured, minus 1; else None
    miss: float | None = None

    @property
    def measured(self) -> float:
        return float(self.kl.mean())

    @property
    def high(self) -> float:
        """Upper end of its interval; infinite where there are too few windows for one."""
        interval = studentized_interval(self.kl)
        return np.inf if interval is None else interval.high

    def is_inside(self, limit: Limit) -> bool:
        """Return whether the upper end of the KL keeps to a limit of KL; other limits are kept by construction."""
        return limit.kind != "max_kl" or self.high <= limit.value

    def order(self, limit: Limit) -> tuple[float, ...]:
        """Return what is smallest for the best choice: the KL, or the bytes where the KL is limited."""
        if limit.kind != "max_kl":
            return (self.measured,)
        return (0.0, self.allocation.n_bytes, self.measured) if self.is_inside(limit) else (1.0, self.high)


@dataclass(kw_only=True)
class InPlace:
    """Measures costs where they are chosen: around recipes whose modules are put together, without a checkpoint."""

    table: CostTable  # The costs of one group at a time in the baseline
    # From choices of formats to the KL of their modules together in the baseline, shape (n_choices, n_windows)
    together: Callable[[Sequence[tuple[int, ...]]], Float]
    passes: int  # How many choices may still be measured, by all limits together
    rounds: int  # How often costs are measured around the best choice
    # Relative error of a prediction from which a limit gets passes of its own: as many as the table has cells
    tolerance: float
    known: dict[tuple[int, ...], Float] = field(default_factory=dict)  # Measured once for all limits of a search

    def measure(self, choices: Sequence[tuple[int, ...]]) -> list[Float]:
        """Return the KL of each choice, shape (n_windows,)."""
        new = [choice for choice in dict.fromkeys(choices) if choice not in self.known]
        if new:
            self.passes -= len(new)
            self.known.update(zip(new, self.together(new), strict=True))
        return [self.known[choice] for choice in choices]

    def choose(self, limit: Limit, passes: int) -> list[Mixture]:
        """Return the choices that were tried within a limit: first that of the costs in the baseline.

        A round measures costs around the best choice so far: one other format in one group, the rest as it was chosen,
        those first that are nearest to being chosen. The programme is solved again for a few groups, and what it
        chooses is measured. Where that misses, the pairs of groups that changed share what is missing, as a cost of
        both together. Costs that were not measured there are those around the choice before, or in the baseline times
        what their sum has missed. One format for all is measured beside them.
        """
        first = self.table.solved(limit)
        predicted = self.table.predicted(first.choice)
        best = Mixture(allocation=first, predicted=predicted, kl=self.measure([first.choice])[0], round=0)
        if self.rounds:  # what is known of it in place is the better promise
            best = replace(best, predicted=best.measured)
        tried = {first.choice: best}
        off = best.measured / predicted if min(best.measured, predicted) > 0 else 1.0
        if abs(1 / off - 1) > self.tolerance or not best.is_inside(limit):
            cells = int((self.table.sizes.layers > 0).sum())
            passes += cells
            self.passes += cells
        end = self.passes - passes
        prices = _Prices(self.table, off, best)
        for number in range(1, self.rounds + 1):
            left = (self.passes - end) // (self.rounds + 1 - number) - 1
            wanted = prices.nearest()[: max(left, 0)]
            while True:
                prices.add(wanted, self.measure([prices.other(cell) for cell in wanted]))
                left -= len(wanted)
                allocation = prices.solved(limit)
                if allocation is None:
                    break
                wanted = [cell for cell in prices.changed(allocation.choice) if not prices.measured[cell]]
                if not wanted or left <= 0:
                    break
                wanted = wanted[:left]
            if allocation is None or (allocation.choice not in self.known and self.passes <= end):
                break
            predicted = prices.predicted(allocation.choice)
            if allocation.choice == best.allocation.choice:
                tried[allocation.choice] = replace(tried[allocation.choice], predicted=predicted)
                continue
            kl = self.measure([allocation.choice])[0]
            miss = predicted / float(kl.mean()) - 1 if kl.any() else None
            mixture = Mixture(allocation=allocation, predicted=predicted, kl=kl, round=number, miss=miss)
            tried.setdefault(allocation.choice, mixture)
            prices.blame(mixture)
            if mixture.order(limit) < best.order(limit):
                best = mixture
                prices.move(best)
        plain = self.table.largest_uniform(limit.layer_bytes(self.table.sizes)) if limit.kind != "max_kl" else None
        if plain is not None and plain.choice not in tried:
            kl, predicted = self.measure([plain.choice])[0], prices.predicted(plain.choice)
            tried[plain.choice] = Mixture(allocation=plain, predicted=predicted, kl=kl, round=0)
        return list(tried.values())


FAR = 0.1
"""Relative error of costs in place from which fewer groups may change."""


class _Prices:
    """Costs around a choice: measured there, or estimated."""

    def __init__(self, table: CostTable, off: float, best: Mixture) -> None:
        self.sizes, self.added = table.sizes, off * table.added
        self.pairs: dict[tuple[Cell, Cell], float] = {}
        self.most = max(2, len(self.added) // 4)  # Groups that may change: far away the costs are others
        self.move(best)

    def move(self, best: Mixture) -> None:
        """Tell costs from another choice on: those of its own formats are 0."""
        self.best, self.choice = best, best.allocation.choice
        self.added = self.added - self.added[np.arange(len(self.added)), list(self.choice)][:, None]
        self.measured = np.zeros(self.added.shape[:2], dtype=np.bool_)
        self.measured[np.arange(len(self.added)), list(self.choice)] = True

    def add(self, cells: Sequence[Cell], kl: Sequence[Float]) -> None:
        for cell, values in zip(cells, kl, strict=True):
            self.added[cell], self.measured[cell] = values - self.best.kl, True

    def other(self, cell: Cell) -> tuple[int, ...]:
        """Return the choice with another format in one group."""
        return tuple(cell[1] if group == cell[0] else column for group, column in enumerate(self.choice))

    def changed(self, choice: Sequence[int]) -> list[Cell]:
        return [(group, new) for group, (new, old) in enumerate(zip(choice, self.choice, strict=True)) if new != old]

    def nearest(self) -> list[Cell]:
        """Return the cells that were not measured here, by how near they are to being chosen.

        A smaller format has a price for each byte saved, a larger one a gain from each byte more. Around the best
        choice all prices are above all gains, and what is nearest to the border between them changes sides first.
        """
        layers = self.sizes.layers
        more = (layers - layers[np.arange(len(layers)), list(self.choice)][:, None]).astype(np.float64)
        each = np.divide(-self.added.mean(axis=2), more, out=np.zeros_like(more), where=more != 0)
        smaller = (more < 0) & ~self.measured & (layers > 0)
        larger = (more > 0) & ~self.measured & (each > 0)
        prices = each[smaller & (each > 0)]
        border = np.sqrt(prices.min() * each[larger].max()) if len(prices) and larger.any() else 1.0
        distance = np.abs(np.log(np.where(each > 0, each, border) / border))  # 0 where less is no worse
        rows = [(int(group), int(column)) for group, column in np.argwhere(smaller | larger)]
        return sorted(rows, key=lambda cell: distance[cell])

    def solved(self, limit: Limit) -> Allocation | None:
        """Return the best choice near this one; None where none keeps to the limit."""
        table = CostTable(sizes=self.sizes, start=self.best.kl, added=self.added)
        margin = max(0.0, self.best.high - self.best.measured) if limit.kind == "max_kl" else 0.0
        most = self.most
        while True:
            try:
                return table.solved(
                    limit, margin=margin, around=Around(choice=self.choice, most=most, pairs=self.pairs)
                )
            except ConfigError:
                if most >= len(self.choice):
                    return None
                most *= 2

    def predicted(self, choice: Sequence[int]) -> float:
        """Return what the costs promise for a choice."""
        alone = self.added.mean(axis=2)[np.arange(len(choice)), list(choice)].sum()
        both = sum(
            cost * (all(choice[g] == f for g, f in pair) - all(self.choice[g] == f for g, f in pair))
            for pair, cost in self.pairs.items()
        )
        return self.best.measured + float(alone) + both

    def blame(self, mixture: Mixture) -> None:
        """Give what the costs have missed to the pairs of groups that changed; where it was much, fewer change next."""
        together = list(itertools.combinations(self.changed(mixture.allocation.choice), 2))
        missing = mixture.measured - mixture.predicted
        for pair in together:
            self.pairs[pair] = self.pairs.get(pair, 0.0) + missing / len(together)
        if mixture.measured > self.best.measured or abs(missing) > FAR * mixture.measured:
            self.most = max(1, self.most // 2)


@dataclass(frozen=True, kw_only=True, eq=False)
class Choice(Mixture):
    """A choice of formats, made and measured on the search's text."""

    variant: Combination  # Name and parameters of the variant
    folder: str  # Its checkpoint


def choose_formats(
    limit: Limit,
    table: CostTable,
    mixtures: Sequence[Mixture],
    *,
    make: Callable[[Allocation, Limit], tuple[Combination, str]],
    measure: Callable[[str], Float],
    around: Callable[[Allocation], tuple[Allocation, float] | None],
    uniform: Callable[[str], Float],
) -> Choice:
    """Return the best choice of formats that was made and measured.

    Of the mixtures that were tried, the best becomes a checkpoint, and so does the first one, which the costs of one
    group at a time have chosen. Where the KL is limited, the next one does until one keeps to the limit.

    `around` returns what costs around the first checkpoint choose, with the KL that they promise, or None where they
    are not needed. It becomes a checkpoint too, and the closer of the two is the first choice. `uniform` returns the KL
    of the uniform variant of a format, window by window. The first choice stays unless the best is surely closer: their
    difference, paired by window, has an interval below 0. So does one format for all that keeps to the budget. The best
    of several measurements on one text looks better than it is.
    """

    def made(mixture: Mixture) -> Choice:
        variant, folder = make(mixture.allocation, limit)
        return Choice(**{**vars(mixture), "kl": measure(folder)}, variant=variant, folder=folder)

    ordered = sorted(mixtures, key=lambda one: one.order(limit))
    if limit.kind == "max_kl":
        choices: list[Choice] = []
        for mixture in ordered:
            choices.append(made(mixture))
            if choices[-1].is_inside(limit):
                break
        return min(choices, key=lambda one: one.order(limit))
    first = made(mixtures[0])
    best = first if ordered[0] is mixtures[0] else made(ordered[0])
    if (promise := around(first.allocation)) is not None and promise[0].choice != first.allocation.choice:
        again = made(replace(mixtures[0], allocation=promise[0], predicted=promise[1], round=1))
        first = min(first, again, key=lambda one: one.measured)
    mixed = best if is_surely_closer(best.kl, first.kl) else first
    plain = table.largest_uniform(limit.layer_bytes(table.sizes))
    if plain is None or plain.choice == mixed.allocation.choice:
        return mixed
    tried = next(one for one in mixtures if one.allocation.choice == plain.choice)
    # The uniform variants have their caches as in the baseline.
    simple = made(tried) if table.sizes.cache else None
    kl = uniform(table.sizes.formats[plain.choice[0]]) if simple is None else simple.kl
    for choice in (mixed, best):
        if is_surely_closer(choice.kl, kl):
            return choice
    return simple or made(tried)


def is_surely_closer(kl: Float, other: Float) -> bool:
    """Return whether a KL is below another one, paired by window; by the mean alone where there is no interval."""
    difference = paired_mean(kl - other)
    return bool(kl.mean() < other.mean()) if difference is None else difference.interval.high < 0
