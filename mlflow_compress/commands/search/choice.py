"""Which formats a search may mix, and which it chooses within a budget."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from mlflow_compress.commands.main.parameters import MainConfig
from mlflow_compress.commands.quantize.run import variant_name
from mlflow_compress.commands.search.parameters import SearchConfig
from mlflow_compress.commands.shared.inputs import method_settings
from mlflow_compress.commands.sweep.plan import Combination
from mlflow_compress.compression.layers import ForLayers
from mlflow_compress.compression.method import METHODS, CalibratedConfig
from mlflow_compress.compression.mixed_recipe import MIXED, MixedRecipe
from mlflow_compress.compression.servers import check_target
from mlflow_compress.decide.cost_table import Allocation, CostTable, Limit, StoredSizes
from mlflow_compress.errors import ConfigError
from mlflow_compress.metrics.stats.arrays import Float
from mlflow_compress.metrics.stats.bootstrap import studentized_interval
from mlflow_compress.metrics.stats.significance import paired_mean
from mlflow_compress.models.source_model import SourceModel
from mlflow_compress.models.stored_weights import bytes_of_layers, read_headers, total_bytes


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
    def rescales(self) -> bool:
        """Whether its method moves scales between neighbouring layers, which then get one format together."""
        method = METHODS.get(self.method)
        return isinstance(method, ForLayers) and method.rescales

    @property
    def calibration_samples(self) -> int:
        """Calibration sequences that its method reads; 0 where it needs none."""
        return int(getattr(self.uniform.settings, "calibration_samples", 0))


def candidates(config: SearchConfig) -> tuple[list[CandidateFormat], bool]:
    """Return the formats, and whether a layer may stay as it is."""
    uniform, may_keep = config.uniform_variants()
    choices = []
    for name, variant in uniform.items():
        method, combination = variant.compression.method, _combination(variant)
        METHODS.get(method).require_backend(combination.settings)
        choices.append(CandidateFormat(name=name, method=method, uniform=combination))
    return choices, may_keep


def _combination(config: MainConfig) -> Combination:
    quantize = config.quantize_config
    return Combination(name=variant_name(quantize), config=config, settings=method_settings(quantize))


def limits_of(config: SearchConfig) -> list[Limit]:
    """Return the limits, one variant each."""
    kind = config.limited
    values = sorted({float(part) for part in getattr(config.space, kind).split(",")})
    return [Limit(kind=kind, value=value) for value in values]  # type: ignore[arg-type]


def recipe_variant(
    config: SearchConfig, choices: Sequence[CandidateFormat], layers: Mapping[str, str], name: str, folder: Path
) -> Combination:
    """Return the variant of a recipe, which is written into `folder`."""
    used = [one for one in choices if one.name in set(layers.values())]
    recipe = MixedRecipe(formats={one.name: one.described for one in used}, layers=dict(layers))
    digest = hashlib.sha256(recipe.text.encode()).hexdigest()[:12]
    path = folder / digest / f"{'-'.join(sorted({one.method for one in used}))}-{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    recipe.write(path)
    samples = max([1, *(one.calibration_samples for one in used)])  # 1 where no format reads them
    recipe_of = {"method_args": {"recipe": str(path)}, "calibration_samples": samples}
    return _combination(config.main_config(method=MIXED, **recipe_of))


def require_mixable(config: SearchConfig, choices: Sequence[CandidateFormat], source: SourceModel) -> None:
    """Raise an error, before any work, where formats cannot share a checkpoint, or the target does not take them."""
    for one in choices:
        uniform: Any = one.uniform.settings
        check_target(config.space.target, METHODS.get(one.method), uniform, source)
    layers = {layer: choices[i % len(choices)].name for i, layer in enumerate(source.linear)}
    with TemporaryDirectory() as folder:
        settings: Any = recipe_variant(config, choices, layers, "check", Path(folder)).settings
        METHODS.get(MIXED).check(settings, source)
        check_target(config.space.target, METHODS.get(MIXED), settings, source)


def require_in_reach(limit: Limit, choices: Sequence[CandidateFormat], source: SourceModel) -> None:
    """Raise `ConfigError`, before any work, for a budget that no format reaches or that is above the baseline's.

    Scales and zero points are not known yet: the budget is checked again when the formats' checkpoints are there.
    """
    headers = read_headers(source.folder)
    weights = sum(rows * columns for rows, columns in source.linear.values())
    base = bytes_of_layers(headers, source.linear)
    fewest = min(int(one.uniform.own_settings["bits"]) for one in choices)
    sizes = StoredSizes(
        groups=("all",),
        formats=("smallest",),
        layers=np.array([[fewest * weights // 8]]),
        base=base,
        rest=total_bytes(headers) - base,
        weights=weights,
    )
    if limit.kind != "max_kl":
        limit.layer_bytes(sizes, scales=False)


Make = Callable[[Allocation, Limit], tuple[Combination, str]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Choice:
    """A choice of formats, made and measured on the search's text."""

    allocation: Allocation  # The format of each group
    variant: Combination  # Name and parameters of the variant
    folder: str  # Its checkpoint
    predicted: float  # What the costs promised
    kl: Float  # What was measured; shape (n_windows,)
    round: int  # The round in which it was chosen: 0 by the costs of one group at a time, later ones by refitted costs

    @property
    def measured(self) -> float:
        return float(self.kl.mean())

    @property
    def high(self) -> float:
        """Upper end of its interval; infinite where there are too few windows for one."""
        interval = studentized_interval(self.kl)
        return np.inf if interval is None else interval.high

    def misses(self, limit: Limit, tolerance: float) -> bool:
        """Return whether the prediction is farther off than the tolerance, or the KL is not surely within its limit."""
        off = abs(self.predicted - self.measured) > tolerance * self.measured
        return off or not self.is_inside(limit)

    def is_inside(self, limit: Limit) -> bool:
        """Return whether the upper end of the KL keeps to a limit of KL; other limits are kept by construction."""
        return limit.kind != "max_kl" or self.high <= limit.value


def measured(
    allocation: Allocation,
    limit: Limit,
    table: CostTable,
    *,
    make: Make,
    measure: Callable[[str], Float],
    number: int = 0,
) -> Choice:
    """Return a choice of formats after making and measuring it; arguments as `choose_formats`."""
    variant, folder = make(allocation, limit)
    return Choice(
        allocation=allocation,
        variant=variant,
        folder=folder,
        predicted=table.predicted(allocation.choice),
        kl=measure(folder),
        round=number,
    )


def choose_formats(
    limit: Limit,
    table: CostTable,
    *,
    rounds: int,
    tolerance: float,
    make: Make,
    measure: Callable[[str], Float],
    refit: Callable[[Choice], CostTable],
    uniform: Callable[[str], Float],
) -> Choice:
    """Return the best choice of formats that was made and measured.

    The first costs are those of one group at a time in the baseline. Where the KL of the checkpoint differs from their
    sum by more than the tolerance, they are measured again within that checkpoint, where the other groups are as they
    were chosen. That includes what the groups do to each other, as far as one change at a time shows it. Then the
    programme is solved again.

    `uniform` returns the KL of the uniform variant of a format, window by window. Where one format for all keeps to
    the budget too, it is chosen, unless the mixed one is surely closer: its difference, paired by window, has an
    interval below 0. The best of several measurements on one text looks better than it is.
    """
    first = table
    tried: dict[tuple[int, ...], Choice] = {}
    margin = 0.0
    for number in range(rounds + 1):
        try:
            allocation = table.solved(limit, margin=margin)
        except ConfigError:
            if not tried:
                raise
            break  # by the refitted costs nothing keeps to the limit
        if allocation.choice in tried:
            break
        chosen = measured(allocation, limit, table, make=make, measure=measure, number=number)
        tried[allocation.choice] = chosen
        if not chosen.misses(limit, tolerance) or number == rounds:
            break
        table = refit(chosen)
        margin = max(0.0, chosen.high - chosen.measured) if limit.kind == "max_kl" else 0.0
    inside = [one for one in tried.values() if one.is_inside(limit)]
    if limit.kind == "max_kl" and inside:
        return min(inside, key=lambda one: (one.allocation.n_bytes, one.measured))
    if limit.kind == "max_kl":
        return min(tried.values(), key=lambda one: one.high)
    best = min(tried.values(), key=lambda one: one.measured)
    plain = first.largest_uniform(limit.layer_bytes(first.sizes))
    if plain is None or plain.choice == best.allocation.choice:
        return best
    difference = paired_mean(best.kl - uniform(first.sizes.formats[plain.choice[0]]))
    if difference is None or difference.interval.high < 0:
        return best
    return tried.get(plain.choice) or measured(plain, limit, first, make=make, measure=measure)
