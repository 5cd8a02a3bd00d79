"""Runs a search: uniform variants, costs of their formats by group, the chosen recipes, and a table of all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from mlflow_compress.compression.reload_helper import reload_helper
from mlflow_compress.compression.shared.mixed_recipe import KEPT
from mlflow_compress.config import SearchConfig, as_text
from mlflow_compress.decide.allocation import Allocation
from mlflow_compress.decide.cost_estimate import Estimation
from mlflow_compress.decide.cost_table import CostTable, Limit, StoredSizes
from mlflow_compress.errors import CheckpointError, MissingDependencyError, StageError, UnsupportedError
from mlflow_compress.home import home, out_folder
from mlflow_compress.items.contamination import check_contamination
from mlflow_compress.kept import keeping
from mlflow_compress.metrics.stats.arrays import Float
from mlflow_compress.models.source_model import SourceModel
from mlflow_compress.models.source_model import resolve as resolve_source
from mlflow_compress.models.stored_weights import bytes_of_layers, read_headers, total_bytes
from mlflow_compress.models.weight_groups import WeightGroup
from mlflow_compress.results import Search
from mlflow_compress.stages.evaluation.open_models import engine_started
from mlflow_compress.stages.get_or_create import digest
from mlflow_compress.stages.model_names import folder_or_hub, model_label, model_path
from mlflow_compress.stages.resumable_workdir import resumable_workdir
from mlflow_compress.stages.resuming.noted_commands import unfinished_until_ended
from mlflow_compress.stages.searching.autoscheme import autoscheme_choices, integer_formats
from mlflow_compress.stages.searching.choose_formats import Choice, choose, first_table, measured
from mlflow_compress.stages.searching.estimate_costs import first_estimated_table
from mlflow_compress.stages.searching.publish_search import Made, publish_search
from mlflow_compress.stages.searching.search_space import (
    CandidateFormat,
    candidates,
    limits_of,
    recipe_variant,
    require_in_reach,
    require_mixable,
)
from mlflow_compress.stages.searching.swap_costs import SwapCosts, format_groups, search_text
from mlflow_compress.stages.sweep.combinations import Combination
from mlflow_compress.stages.sweep.make_variant import in_process
from mlflow_compress.stages.sweep.prepare import Prepared, prepare
from mlflow_compress.stages.sweep.run_sweep import make_variants
from mlflow_compress.stages.sweep.sweep_runs import parent_run
from mlflow_compress.stages.task_inputs import suite_of
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.tracked_run import TrackedRun
from mlflow_compress.tracking.tracker import Tracker, tracking_uri

Say = Callable[[str], None]


def _silent(line: str) -> None:
    """Tell nobody."""


def run_search(config: SearchConfig, say: Say = _silent) -> Search:
    """Find the formats of every group of layers within each limit, and return them beside the uniform variants.

    Parameters
    ----------
    config : SearchConfig
        The parameters, with absolute paths.
    say : callable (line)
        Is told what happens.

    Raises
    ------
    ConfigError, DataError
        A parameter is wrong. No run was made, but for a budget that only the stored sizes show to be impossible.
    StageError
        A variant could not be made.
    """
    limits, (found, may_keep), given = limits_of(config), candidates(config), config
    path = model_path(config.source.model)
    with folder_or_hub("model", path):
        source = resolve_source(path, trust_remote_code=config.source.trust_remote_code)
    require_mixable(config, found, source)
    for limit in limits:
        require_in_reach(limit, found, source)
    config = config.with_values(output_dir=str(out_folder(config.space.output_dir, tracking_uri())))
    found, may_keep = candidates(config)
    with unfinished_until_ended(given), keeping(), engine_started(config.running, config.source):
        tracker = Tracker(config.experiment)
        prepared = prepare(config.sweep_config, [one.uniform for one in found], tracker)
        text = search_text(config, source, max(one.calibration_samples for one in found))
        suite = suite_of(found[0].uniform.config.evaluate_config())
        check_contamination(text.texts, suite.tasks, suite.corpora)
        label = model_label(config.source.model)
        key = digest(
            {
                "variants": sorted(variant.key for variant in prepared.variants),
                "limits": [[limit.kind, limit.value] for limit in limits],
                "search": [text.sha256, may_keep, config.space.search_rounds, config.space.search_tolerance],
                "estimate": [config.space.estimate, config.space.measured_swaps],
                "autoscheme": config.space.autoscheme,
            }
        )
        tags = {run_names.BASE_MODEL: label, run_names.EVALUATION: prepared.evaluation}
        with (
            parent_run(tracker, f"search {config.space.formats} {label}", key, tags, stage="search") as run,
            reload_helper(),
            resumable_workdir(tracker.uri, key) as resume,
        ):
            run.log_params(as_text(config))
            runs = _made(tracker, run, prepared, say)
            groups = _groups(config, source, found, tracker, runs)
            costs = SwapCosts(config=config, text=text, resume=resume, groups=groups)
            return _Search(config, tracker, run, source, found, may_keep, costs, say).result(limits, runs)


def _groups(
    config: SearchConfig, source: SourceModel, found: Sequence[CandidateFormat], tracker: Tracker, runs: dict[str, str]
) -> tuple[WeightGroup, ...]:
    """Return the groups that get one format each."""
    children = [tracker.children(runs[one.uniform.name])["quantize"] for one in found]
    folders = [str(child.data.tags[run_names.CHECKPOINT]) for child in children]
    return format_groups(config, source, folders, rescaled=any(one.rescales for one in found))


def _made(tracker: Tracker, run: TrackedRun, prepared: Prepared, say: Say) -> dict[str, str]:
    """Make variants, each with a main run below the search's; return the runs by name. A failure is a `StageError`."""
    runs = make_variants(tracker, run, prepared, lambda progress: say(progress.line))
    for name, run_id in runs.items():
        found = tracker.client.get_run(run_id)
        if found.info.status != "FINISHED":
            reason = found.data.tags.get(run_names.ERROR, f"its run is {found.info.status}")
            raise StageError(f"{name}: {reason}", stage="search", fix="The same command again goes on from here")
    return runs


class _Search:
    """The part of a search that needs its run."""

    def __init__(
        self,
        config: SearchConfig,
        tracker: Tracker,
        run: TrackedRun,
        source: SourceModel,
        found: Sequence[CandidateFormat],
        may_keep: bool,
        costs: SwapCosts,
        say: Say,
    ) -> None:
        self._config, self._tracker, self._run, self._source = config, tracker, run, source
        self._found, self._costs, self._say = found, costs, say
        self._may_keep = may_keep
        self._folders: dict[str, str | None] = {}
        self._layers = [[name for name in group.modules if name in source.linear] for group in costs.groups]

    def result(self, limits: Sequence[Limit], runs: dict[str, str]) -> Search:
        uniform = {one.name: self._of(runs[one.uniform.name]) for one in self._found}
        self._folders = {name: made.folder for name, made in uniform.items()}
        if self._may_keep:
            self._folders[KEPT] = None
        sizes = self._sizes()
        for limit in limits:
            if limit.kind != "max_kl":
                limit.layer_bytes(sizes)
        table, estimation = self._table(limits, sizes)
        chosen = {limit: self._chosen(limit, table) for limit in limits}
        beside, left_out = self._autoscheme(chosen, table)
        variants = {one.variant.name: one.variant for one in (*chosen.values(), *beside.values())}
        prepared = prepare(self._config.sweep_config, list(variants.values()), self._tracker)
        mixed = _made(self._tracker, self._run, prepared, self._say)
        return publish_search(
            self._tracker,
            self._run,
            self._config,
            table=table,
            estimation=estimation,
            uniform=uniform,
            chosen={limit: (choice, self._of(mixed[choice.variant.name])) for limit, choice in chosen.items()},
            autoscheme={limit: (choice, self._of(mixed[choice.variant.name])) for limit, choice in beside.items()},
            left_out=left_out,
            costs=self._costs,
        )

    def _table(self, limits: Sequence[Limit], sizes: StoredSizes) -> tuple[CostTable, Estimation | None]:
        """Return the costs in the baseline, and what was estimated of them."""
        space, what = self._config.space, f"{len(self._found)} formats in {len(sizes.groups)} groups"
        if space.estimate == "none":
            self._say(f"[search] measures {what}")
            return first_table(self._costs, self._folders, sizes), None
        self._say(f"[search] estimates {what}, and measures what is chosen")
        table, found = first_estimated_table(
            space.estimate, self._costs, self._folders, sizes, limits, space.measured_swaps
        )
        self._say(f"[search] measured {found.measured.sum()} of {found.possible} swaps")
        return table, found

    def _autoscheme(self, chosen: Mapping[Limit, Choice], table: CostTable) -> tuple[dict[Limit, Choice], str]:
        """Return AutoScheme's choices within the same sizes, or why there are none."""
        asked = self._config.space.autoscheme
        if asked == "false":
            return {}, ""
        sizes = table.sizes
        budgets = {
            limit: one.allocation.n_bytes if limit.kind == "max_kl" else limit.layer_bytes(sizes)
            for limit, one in chosen.items()
        }
        try:
            formats = integer_formats(self._found, self._may_keep)
            self._say(f"[search] AutoScheme scores {len(formats)} formats")
            found = autoscheme_choices(self._config, self._source, formats, self._costs, table, budgets)
        except (MissingDependencyError, UnsupportedError) as error:
            if asked == "true":
                raise
            return {}, str(error)
        make = partial(self._make, sizes, name="autoscheme-")
        return {
            limit: measured(one, limit, table, make=make, measure=self._costs.whole) for limit, one in found.items()
        }, ""

    def _of(self, run_id: str) -> Made:
        """Return a main run with its checkpoint."""
        tags = self._tracker.children(run_id)["quantize"].data.tags
        return Made(run_id=run_id, folder=tags[run_names.CHECKPOINT], name=tags[run_names.VARIANT])

    def _sizes(self) -> StoredSizes:
        """Return the stored bytes of every group in every format, from the headers of the checkpoints."""
        base = read_headers(self._source.folder)
        headers = [base if folder is None else read_headers(Path(folder)) for folder in self._folders.values()]
        by_group = [[bytes_of_layers(one, layers) for one in headers] for layers in self._layers]
        linear = [layer for layers in self._layers for layer in layers]
        first = headers[0]
        return StoredSizes(
            groups=tuple(group.name for group in self._costs.groups),
            formats=tuple(self._folders),
            layers=np.array(by_group, dtype=np.int64),
            base=bytes_of_layers(base, linear),
            rest=total_bytes(first) - bytes_of_layers(first, linear),
            weights=sum(rows * columns for rows, columns in self._source.linear.values()),
        )

    def _chosen(self, limit: Limit, table: CostTable) -> Choice:
        space = self._config.space
        found = choose(
            limit,
            table,
            rounds=space.search_rounds,
            tolerance=space.search_tolerance,
            make=partial(self._make, table.sizes),
            measure=self._costs.whole,
            refit=partial(self._refitted, table.sizes),
            uniform=self._uniform_kl,
        )
        self._say(
            f"[search] {limit.short}: {found.variant.name}, predicted KL {found.predicted:.3g}, measured "
            f"{found.measured:.3g} on the search's text"
        )
        return found

    def _uniform_kl(self, name: str) -> Float:
        folder = self._folders[name]
        return np.zeros(len(self._costs.text.windows.ids)) if folder is None else self._costs.whole(folder)

    def _make(
        self, sizes: StoredSizes, allocation: Allocation, limit: Limit, *, name: str = ""
    ) -> tuple[Combination, str]:
        """Make the checkpoint of a choice, and check that it has the bytes that were counted on."""
        layers = {
            layer: sizes.formats[chosen]
            for names, chosen in zip(self._layers, allocation.choice, strict=True)
            for layer in names
        }
        in_order = {layer: layers[layer] for layer in self._source.linear}
        folder = home(self._tracker.uri) / "recipes"
        variant = recipe_variant(self._config, self._found, in_order, f"{name}{limit.short}", folder)
        self._say(f"[search] {limit.short}: makes {variant.name}")
        child = in_process(self._tracker, "quantize", variant.config.quantize_config, self._run, say=self._say)
        made = str(self._tracker.client.get_run(child).data.tags[run_names.CHECKPOINT])
        headers = read_headers(Path(made))
        if limit.kind == "max_bytes" and not name and total_bytes(headers) > limit.value:
            raise CheckpointError(
                "The checkpoint is larger than max_bytes: its other tensors have grown",
                allowed=f"{limit.value:.0f} bytes",
                got=total_bytes(headers),
            )
        if (stored := bytes_of_layers(headers, layers)) != allocation.n_bytes:
            raise CheckpointError(
                "The checkpoint's layers do not take the bytes that their formats take alone",
                allowed=f"{allocation.n_bytes} bytes",
                got=stored,
            )
        return variant, made

    def _refitted(self, sizes: StoredSizes, choice: Choice) -> CostTable:
        told = f"predicted {choice.predicted:.3g}, measured {choice.measured:.3g}"
        self._say(f"[search] {told}: measures the costs again, within this recipe")
        added = [self._costs.around(choice.folder, folder) - choice.kl for folder in self._folders.values()]
        return CostTable(sizes=sizes, start=choice.kl, added=np.stack(added, axis=1))
