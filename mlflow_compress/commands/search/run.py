"""Runs a search: uniform variants, costs of their formats by group, the chosen recipes, and a table of all."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from mlflow_compress.commands.command import Say, silent
from mlflow_compress.commands.evaluate.items import suite_of
from mlflow_compress.commands.evaluate.models import engine_started
from mlflow_compress.commands.main.in_process import in_process
from mlflow_compress.commands.search.choice import (
    BASELINE,
    CandidateFormat,
    Choice,
    cache_bytes,
    candidates,
    choose_formats,
    limits_of,
    quantized_caches,
    recipe_variant,
    require_in_reach,
    require_mixable,
    with_caches,
)
from mlflow_compress.commands.search.measured_costs import (
    SwapCosts,
    cache_groups,
    format_groups,
    read_search_text,
)
from mlflow_compress.commands.search.parameters import SearchConfig
from mlflow_compress.commands.search.result import GroupCost, Search, SearchedVariant
from mlflow_compress.commands.shared.get_or_create import digest, resumable_workdir, unfinished_until_ended
from mlflow_compress.commands.shared.named_models import folder_or_hub, model_label, model_path, read_manifest
from mlflow_compress.commands.sweep.make_variant import parent_run
from mlflow_compress.commands.sweep.parameters import SweepConfig
from mlflow_compress.commands.sweep.plan import Combination, Prepared, prepare_sweep
from mlflow_compress.commands.sweep.run import make_variants
from mlflow_compress.compression.method import METHODS
from mlflow_compress.compression.mixed_recipe import KEPT
from mlflow_compress.compression.pipeline import reload_helper
from mlflow_compress.config import EMBEDDED, Policy, as_text
from mlflow_compress.config.declarations import AUTO
from mlflow_compress.decide.cost_table import Allocation, CostTable, Limit, StoredSizes, linear_mix
from mlflow_compress.decide.separation import item_scores
from mlflow_compress.errors import (
    AlignmentError,
    CheckpointError,
    DataError,
    StageError,
)
from mlflow_compress.home import home, out_folder
from mlflow_compress.items.contamination import check_contamination
from mlflow_compress.items.suite import task_parts
from mlflow_compress.kept import keeping
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.requirements import ITEMS, PREDICTIONS
from mlflow_compress.metrics.stats.arrays import Float
from mlflow_compress.metrics.stats.bootstrap import studentized_interval
from mlflow_compress.metrics.stats.significance import paired_mean
from mlflow_compress.models.architectures.quantized_cache import QuantizedCache
from mlflow_compress.models.source_model import SourceModel
from mlflow_compress.models.source_model import resolve as resolve_source
from mlflow_compress.models.stored_weights import bytes_of_layers, read_headers, total_bytes
from mlflow_compress.models.weight_groups import WeightGroup
from mlflow_compress.records import RunRecords, TokenDistances
from mlflow_compress.reporting.search_tables import rows_csv, search_markdown
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.live_processes import scratch_folder
from mlflow_compress.tracking.run_names import RECORDS
from mlflow_compress.tracking.tracked_run import TrackedRun
from mlflow_compress.tracking.tracker import Tracker, tracking_uri

_NO_KL, _FIX = "The evaluation of this search measures no KL", "Give tasks with text or options"


@dataclass(frozen=True, kw_only=True, eq=False)
class UnitKl:
    """KL of one variant on each unit of the evaluation."""

    unit: str  # "window" where the evaluation has corpora, else "item"
    keys: tuple[tuple[str, str], ...]  # Task and id of each unit
    kl: Float  # Nats: the mean per token of a window, or the KL of an item; shape (n_units,)


def unit_kl(tracker: Tracker, main_run: str) -> UnitKl:
    """Return the KL of a main run's variant on each unit; a `DataError` where the evaluation measures none."""
    evaluate = tracker.children(main_run)["evaluate"]
    variant = RunRecords.read(tracker.fetch(evaluate.info.run_id, RECORDS))
    if variant.token_distances is not None:
        return _windows(variant.token_distances)
    baseline = RunRecords.read(tracker.fetch(evaluate.data.tags[run_names.BASELINE_RUN], RECORDS))
    inputs = MetricInputs(baseline=baseline, variant=variant)
    if reason := inputs.missing(ITEMS, PREDICTIONS):
        raise DataError(_NO_KL, got=reason, fix=_FIX)
    scores = item_scores(inputs)
    rows = np.isfinite(scores.kl)
    if not rows.any():
        raise DataError(_NO_KL, fix=_FIX)
    keys = tuple(zip(scores.task[rows].tolist(), scores.item_id[rows].tolist(), strict=True))
    return UnitKl(unit="item", keys=keys, kl=np.maximum(scores.kl[rows], 0.0))


def _windows(distances: TokenDistances) -> UnitKl:
    names = list(zip(distances.column("task").tolist(), distances.column("item_id").tolist(), strict=True))
    keys = tuple(dict.fromkeys(names))
    number = {key: row for row, key in enumerate(keys)}
    rows = np.array([number[name] for name in names])
    return UnitKl(unit="window", keys=keys, kl=np.bincount(rows, distances.column("kl")) / np.bincount(rows))


@dataclass(frozen=True, kw_only=True)
class FinishedMain:
    """A finished main run and its checkpoint."""

    run_id: str
    folder: str  # The checkpoint
    name: str  # The variant's short name


def publish_search(
    tracker: Tracker,
    run: TrackedRun,
    config: SearchConfig,
    *,
    table: CostTable,
    uniform: Mapping[str, FinishedMain],
    chosen: Mapping[Limit, tuple[Choice, FinishedMain]],
    costs: SwapCosts,
) -> Search:
    """Log everything that people read of a search on its run, and return it."""
    every = [*uniform.values(), *(made for _, made in chosen.values())]
    held_out = {made.run_id: unit_kl(tracker, made.run_id) for made in every}
    first = next(iter(held_out.values()))
    if any(other.keys != first.keys for other in held_out.values()):
        raise AlignmentError("Two variants of the search were not evaluated on the same texts")
    ends = {made.name: (table.sizes.uniform(name), held_out[made.run_id].kl) for name, made in uniform.items()}
    ends[BASELINE] = (table.sizes.base, np.zeros_like(first.kl))
    rows = [_row(made, held_out[made.run_id], costs.whole(made.folder)) for made in uniform.values()]
    for limit, (choice, made) in chosen.items():
        rows.append(_searched(limit, choice, made, held_out[made.run_id], ends))
    length, name = config.space.calibration_length, Path(costs.text.name).name

    if table.sizes.cache:
        tokens = int(config.space.cache_tokens)
        taken = {made.run_id: read_manifest(made.folder, verify=False).cache_bytes_per_token or 0.0 for made in every}
        rows = [replace(row, cache_bytes=math.ceil(tokens * taken[row.run_id])) for row in rows]
    rows.sort(key=lambda row: (row.bits_per_weight, row.cache_bytes or 0, row.name))
    tasks = EMBEDDED if config.evaluation.tasks == "auto" else config.evaluation.tasks
    tasks = ", ".join(Path(part).name for part in task_parts(tasks))
    result = Search(
        baseline=model_label(config.source.model),
        variants=tuple(rows),
        formats=table.sizes.formats,
        groups=table.sizes.groups,
        costs=tuple(_group_costs(table)),
        recipes={made.name: table.sizes.chosen(choice.allocation.choice) for choice, made in chosen.values()},
        cache_tokens=int(config.space.cache_tokens) if table.sizes.cache else None,
        search_text=f"{len(costs.text.windows.ids)} windows of {length} tokens of {name}",
        held_out=f"{len(first.keys)} {first.unit}s of {tasks}",
        run=tracker.link(run.run_id),
    )
    _log(tracker, run, result)
    return result


def _row(made: FinishedMain, units: UnitKl, kl: Float) -> SearchedVariant:
    manifest = read_manifest(made.folder, verify=False)
    interval, searched = studentized_interval(units.kl), studentized_interval(kl)
    return SearchedVariant(
        name=made.name,
        kind="uniform",
        bits_per_weight=manifest.bits_per_weight,
        bits_per_weight_model=manifest.bits_per_weight_model,
        size_bytes=manifest.size_bytes,
        kl=float(units.kl.mean()),
        kl_low=None if interval is None else interval.low,
        kl_high=None if interval is None else interval.high,
        search_kl=float(kl.mean()),
        search_kl_high=None if searched is None else searched.high,
        run_id=made.run_id,
    )


def _searched(
    limit: Limit, choice: Choice, made: FinishedMain, units: UnitKl, ends: Mapping[str, tuple[int, Float]]
) -> SearchedVariant:
    row = replace(
        _row(made, units, choice.kl),
        kind="searched",
        limit=limit.short,
        max_kl=limit.value if limit.kind == "max_kl" else None,
        predicted_kl=choice.predicted,
        gap=choice.allocation.gap,
    )
    mix = linear_mix(choice.allocation.n_bytes, ends)
    if mix is None:
        return row
    difference = units.kl - mix.kl
    mean = paired_mean(difference)
    low, high = (None if mean is None else mean.interval) or (None, None)
    return replace(
        row,
        mix=f"{mix.share:.2f} of {mix.larger}, the rest {mix.smaller}",
        mix_kl=float(mix.kl.mean()),
        difference=float(difference.mean()),
        difference_low=low,
        difference_high=high,
    )


def _group_costs(table: CostTable) -> Iterator[GroupCost]:
    """Iterate over the costs in the baseline, each with its interval over the windows."""
    for i, group in enumerate(table.sizes.groups):
        for j, name in enumerate(table.sizes.formats):
            if not table.sizes.layers[i, j]:
                continue
            kl = table.kl[i, j]
            interval = studentized_interval(kl)
            yield GroupCost(
                group=group,
                format=name,
                size_bytes=int(table.sizes.layers[i, j]),
                kl=float(kl.mean()),
                kl_low=None if interval is None else interval.low,
                kl_high=None if interval is None else interval.high,
            )


def _log(tracker: Tracker, run: TrackedRun, result: Search) -> None:
    # Imported here, because matplotlib takes a second to import.
    from mlflow_compress.reporting.figures import draw_search

    rows = result.to_rows()
    markdown = search_markdown(rows, result.summary, result.notes)
    run.log_json(result.to_dict(), "search.json")
    run.log_text(rows_csv(rows), "search.csv")
    run.log_text(rows_csv([asdict(one) for one in result.costs]), "costs.csv")
    run.log_text(markdown, "search.md")
    standard = Policy().kl  # the default gate
    limits = [one.max_kl for one in result.searched if one.max_kl is not None]
    gate = max(limits) if limits else None if standard is None else standard.max_kl
    with scratch_folder(tracker.uri) as folder:
        figures = draw_search(rows, folder, gate=gate)
        run.log_figures(folder, [figure.path.stem for figure in figures])
    against = [one.against_mix for one in result.searched]
    errors = [abs(one.prediction_error) for one in result.searched if one.prediction_error is not None]
    run.log_values(
        {
            "search/variants": len(result.searched),
            "search/closer_than_mix": against.count("closer"),
            "search/farther_than_mix": against.count("farther"),
            **({"search/largest_prediction_error_pct": 100 * max(errors)} if errors else {}),
        }
    )
    run.set_tags({run_names.VERDICT: result.summary})
    run.set_note(markdown)


def run_search(config: SearchConfig, say: Say = silent) -> Search:
    """Find the formats of every group of layers within each limit, and return them beside the uniform variants."""
    original, limits = config, limits_of(config)
    config = config.with_values(output_dir=str(out_folder(config.space.output_dir, tracking_uri())))
    formats, may_keep = candidates(config)
    path = model_path(config.source.model)
    with folder_or_hub("model", path):
        source = resolve_source(path, trust_remote_code=config.source.trust_remote_code)
    require_mixable(config, formats, source)
    caches = cache_bytes(config, source, quantized_caches(config, source))
    if caches and config.space.cache_tokens == AUTO:
        config = config.with_values(cache_tokens=source.max_length)
    for limit in limits:
        require_in_reach(limit, formats, source, caches)

    with unfinished_until_ended(original), keeping(), engine_started(config.running, config.source):
        tracker = Tracker(config.experiment)
        prepared = prepare_sweep(config.for_variants(SweepConfig), [one.uniform for one in formats], tracker)
        text = read_search_text(config, source, max(one.calibration_samples for one in formats))
        suite = suite_of(formats[0].uniform.config.evaluate_config())
        check_contamination(text.texts, suite.tasks, suite.corpora)
        label = model_label(config.source.model)
        key = digest(
            {
                "variants": sorted(variant.key for variant in prepared.variants),
                "limits": [[limit.kind, limit.value] for limit in limits],
                "search": [text.sha256, may_keep, config.space.search_rounds],
                **({"caches": caches} if caches else {}),
            }
        )
        tags = {run_names.BASE_MODEL: label, run_names.EVALUATION: prepared.evaluation}
        with (
            parent_run(tracker, f"search {config.space.formats} {label}", key, tags, stage="search") as run,
            reload_helper(),
            resumable_workdir(tracker.uri, key) as resume,
        ):
            run.log_params(as_text(config))
            made = make_all(tracker, run, prepared, say)
            uniform = {one.name: made[one.uniform.name] for one in formats}
            folders = [variant.folder for variant in uniform.values()]
            rescaled = any(getattr(METHODS.get(one.method), "rescales", False) for one in formats)
            groups = format_groups(config, source, folders, rescaled=rescaled)
            layers = cache_groups(source) if caches else ()
            costs = SwapCosts(config=config, text=text, resume=resume, groups=groups, caches=layers)
            return _Search(tracker, run, source, formats, may_keep, costs, uniform, say).result(limits)


def make_all(tracker: Tracker, run: TrackedRun, prepared: Prepared, say: Say) -> dict[str, FinishedMain]:
    """Make variants, each with a main run below the search's; return them by name. A failure is a `StageError`."""
    made = {}
    for name, run_id in make_variants(tracker, run, prepared, lambda progress: say(progress.line)).items():
        main = tracker.client.get_run(run_id)
        if main.info.status != "FINISHED":
            reason = main.data.tags.get(run_names.RUN_ERROR, f"its run is {main.info.status}")
            raise StageError(f"{name}: {reason}", stage="search", fix="Repeat the command to continue from here")
        tags = tracker.children(run_id)["quantize"].data.tags
        made[name] = FinishedMain(run_id=run_id, folder=tags[run_names.CHECKPOINT], name=tags[run_names.VARIANT])
    return made


def layers_of(groups: Sequence[WeightGroup], source: SourceModel) -> list[list[str]]:
    """Return the linear layers of each group."""
    return [[name for name in group.modules if name in source.linear] for group in groups]


def stored_sizes(source: SourceModel, groups: Sequence[WeightGroup], folders: Mapping[str, str | None]) -> StoredSizes:
    """Return the bytes of each group in the checkpoint of each format; None is the baseline."""
    base, by_layer = read_headers(source.folder), layers_of(groups, source)
    headers = [base if folder is None else read_headers(Path(folder)) for folder in folders.values()]
    linear = [layer for layers in by_layer for layer in layers]
    first = headers[0]
    return StoredSizes(
        groups=tuple(group.name for group in groups),
        formats=tuple(folders),
        layers=np.array(
            [bytes_of_layers(one, layers) for layers in by_layer for one in headers], dtype=np.int64
        ).reshape(len(groups), len(headers)),
        base=bytes_of_layers(base, linear),
        rest=total_bytes(first) - bytes_of_layers(first, linear),
        weights=sum(rows * columns for rows, columns in source.linear.values()),
    )


@dataclass(frozen=True)
class _Search:
    """The part of a search that needs its run."""

    tracker: Tracker
    run: TrackedRun
    source: SourceModel
    formats: Sequence[CandidateFormat]
    may_keep: bool  # Whether a layer may stay as it is
    costs: SwapCosts
    uniform: Mapping[str, FinishedMain]  # The uniform variants by their format
    say: Say

    @cached_property
    def config(self) -> SearchConfig:
        return self.costs.config

    @cached_property
    def folders(self) -> dict[str, str | None]:
        return {**{name: made.folder for name, made in self.uniform.items()}, **({KEPT: None} if self.may_keep else {})}

    @cached_property
    def layers(self) -> list[list[str]]:
        return layers_of(self.costs.groups, self.source)

    @cached_property
    def caches(self) -> dict[str, QuantizedCache | None]:
        """The formats of caches; None is one that stays as it is."""
        return quantized_caches(self.config, self.source)

    def result(self, limits: Sequence[Limit]) -> Search:
        n_bytes = cache_bytes(self.config, self.source, self.caches)
        sizes = stored_sizes(self.source, self.costs.groups, self.folders)
        sizes = with_caches(sizes, {group.name: n_bytes for group in self.costs.caches})
        for limit in limits:
            if limit.kind != "max_kl":
                limit.layer_bytes(sizes)
        self.say(f"[search] measures {len(self.formats)} formats in {len(sizes.groups)} groups")
        table = self.costs.table(sizes, self.folders, [self.caches] * len(self.costs.caches))
        chosen = {}
        for limit in limits:
            choice = chosen[limit] = choose_formats(
                limit,
                table,
                make=partial(self._checkpoint, table.sizes),
                measure=self.costs.whole,
                uniform=self._uniform_kl,
                rounds=self.config.space.search_rounds,
            )
            self.say(
                f"[search] {limit.short}: {choice.variant.name}, predicted KL {choice.predicted:.3g}, measured "
                f"{choice.measured:.3g} on the search's text"
            )
        variants = {one.variant.name: one.variant for one in chosen.values()}
        prepared = prepare_sweep(self.config.for_variants(SweepConfig), list(variants.values()), self.tracker)
        made = make_all(self.tracker, self.run, prepared, self.say)
        return publish_search(
            self.tracker,
            self.run,
            self.config,
            table=table,
            uniform=self.uniform,
            chosen={limit: (choice, made[choice.variant.name]) for limit, choice in chosen.items()},
            costs=self.costs,
        )

    def _uniform_kl(self, name: str) -> Float:
        folder = self.folders[name]
        return np.zeros(len(self.costs.text.windows.ids)) if folder is None else self.costs.whole(folder)

    def _checkpoint(self, sizes: StoredSizes, allocation: Allocation, limit: Limit) -> tuple[Combination, str]:
        """Make a checkpoint, and check that it has the bytes that were counted on."""
        names = list(sizes.chosen(allocation.choice).values())
        layers = {layer: chosen for group, chosen in zip(self.layers, names, strict=False) for layer in group}
        settings, caches = self.config.caches, names[len(self.layers) :]
        rounded = {str(layer): one for layer, name in enumerate(caches) if (one := settings[name]) is not None}
        of_caches = sum(cache_bytes(self.config, self.source, self.caches)[name] for name in caches)
        in_order = {layer: layers[layer] for layer in self.source.linear}
        folder = home(self.tracker.uri) / "recipes"
        variant = recipe_variant(self.config, self.formats, in_order, limit.short, folder, rounded)
        self.say(f"[search] {limit.short}: makes {variant.name}")
        child = in_process(self.tracker, "quantize", variant.config.quantize_config, self.run, say=self.say)
        made = str(self.tracker.client.get_run(child).data.tags[run_names.CHECKPOINT])
        headers = read_headers(Path(made))
        if limit.kind == "max_bytes" and total_bytes(headers) + of_caches > limit.value:
            raise CheckpointError(
                "The checkpoint is larger than max_bytes: its other tensors have grown",
                allowed=f"{limit.value:.0f} bytes",
                got=total_bytes(headers) + of_caches,
            )
        if (stored := bytes_of_layers(headers, layers) + of_caches) != allocation.n_bytes:
            raise CheckpointError(
                "The size of the checkpoint's layers differs from the sum of their formats' sizes",
                allowed=f"{allocation.n_bytes} bytes",
                got=stored,
            )
        return variant, made
