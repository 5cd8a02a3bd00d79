"""Publishes a search on its run: the table, the costs, the front as a figure, and a few counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mlflow_compress.compression.shared.mixed_recipe import KEPT
from mlflow_compress.config import EMBEDDED, Policy, SearchConfig
from mlflow_compress.decide.cost_estimate import Estimation
from mlflow_compress.decide.cost_table import CostTable, Limit, StoredSizes, linear_mix
from mlflow_compress.decide.scoreboard.paired_mean import paired_mean
from mlflow_compress.metrics.stats.arrays import Float
from mlflow_compress.metrics.stats.studentized import studentized_interval
from mlflow_compress.reporting.searched.search_tables import rows_csv, search_markdown
from mlflow_compress.results import CostEstimate, GroupCost, Search, SearchedVariant
from mlflow_compress.stages.model_names import model_label, read_manifest
from mlflow_compress.stages.searching.choose_formats import Choice
from mlflow_compress.stages.searching.held_out import UnitKl, unit_kl
from mlflow_compress.stages.searching.swap_costs import SwapCosts
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.shared_store.live_processes import scratch_folder
from mlflow_compress.tracking.tracked_run import TrackedRun
from mlflow_compress.tracking.tracker import Tracker

BASELINE = "baseline"


@dataclass(frozen=True, kw_only=True)
class Made:
    """A finished main run and its checkpoint.

    Attributes
    ----------
    run_id : str
    folder : str
        The checkpoint.
    name : str
        The variant's short name.
    """

    run_id: str
    folder: str
    name: str


def publish_search(
    tracker: Tracker,
    run: TrackedRun,
    config: SearchConfig,
    *,
    table: CostTable,
    estimation: Estimation | None,
    uniform: Mapping[str, Made],
    chosen: Mapping[Limit, tuple[Choice, Made]],
    autoscheme: Mapping[Limit, tuple[Choice, Made]],
    left_out: str,
    costs: SwapCosts,
) -> Search:
    """Log everything that people read of a search on its run, and return it.

    Parameters
    ----------
    tracker, run : Tracker, TrackedRun
        The store and the search's run.
    config : SearchConfig
        What was asked for.
    table : CostTable
        Costs in the baseline.
    estimation : Estimation or None
        Which of them were estimated.
    uniform : mapping of str to Made
        The uniform variant of each format.
    chosen : mapping of Limit to (Choice, Made)
        The searched variant of each limit.
    autoscheme : mapping of Limit to (Choice, Made)
        AutoScheme's variant of the same size.
    left_out : str
        Why there is none of its; "" where nothing is missing.
    costs : SwapCosts
        Measures checkpoints on the search's text.
    """
    every = [*uniform.values(), *(made for _, made in (*chosen.values(), *autoscheme.values()))]
    held_out = {made.run_id: unit_kl(tracker, made.run_id) for made in every}
    first = next(iter(held_out.values()))
    for other in held_out.values():
        first.require_same(other)
    ends = {made.name: (table.sizes.uniform(name), held_out[made.run_id].kl) for name, made in uniform.items()}
    ends[BASELINE] = (table.sizes.base, np.zeros_like(first.kl))
    rows = [_row(made, held_out[made.run_id], costs.whole(made.folder)) for made in uniform.values()]
    for limit, (choice, made) in chosen.items():
        rows.append(_searched(limit, choice, made, held_out[made.run_id], ends))
    for limit, (choice, made) in autoscheme.items():
        own = held_out[made.run_id]
        row = replace(_searched(limit, choice, made, own, ends), kind="autoscheme", gap=None)
        rows.append(replace(row, **_against(own, held_out[chosen[limit][1].run_id])))
    length, name = config.space.calibration_length, Path(costs.text.name).name
    rows.sort(key=lambda row: (row.bits_per_weight, row.name))
    tasks = EMBEDDED if config.evaluation.tasks == "auto" else config.evaluation.tasks
    tasks = ", ".join(Path(part).name for part in tasks.split(","))
    found = Search(
        baseline=model_label(config.source.model),
        variants=tuple(rows),
        formats=table.sizes.formats,
        groups=table.sizes.groups,
        costs=tuple(_group_costs(table, estimation)),
        estimate=None if estimation is None else _estimate(estimation),
        recipes={made.name: _recipe(table.sizes, choice) for choice, made in (*chosen.values(), *autoscheme.values())},
        search_text=f"{len(table.start)} windows of {length} tokens of {name}",
        held_out=f"{len(first.keys)} {first.unit}s of {tasks}",
        left_out=left_out,
        run=tracker.link(run.run_id),
    )
    _log(tracker, run, found)
    return found


def _row(made: Made, units: UnitKl, kl: Float) -> SearchedVariant:
    manifest, interval, searched = read_manifest(made.folder), studentized_interval(units.kl), studentized_interval(kl)
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
    limit: Limit, choice: Choice, made: Made, units: UnitKl, ends: Mapping[str, tuple[int, Float]]
) -> SearchedVariant:
    row = replace(
        _row(made, units, choice.kl),
        kind="searched",
        limit=limit.short,
        max_kl=limit.value if limit.kind == "max_kl" else None,
        predicted_kl=choice.predicted,
        rounds=choice.round,
        gap=choice.allocation.gap,
    )
    mix = linear_mix(choice.allocation.n_bytes, ends)
    if mix is None:
        return row
    difference = paired_mean(units.kl - mix.kl)
    return replace(
        row,
        mix=f"{mix.share:.2f} of {mix.larger}, the rest {mix.smaller}",
        mix_kl=float(mix.kl.mean()),
        difference=float((units.kl - mix.kl).mean()),
        difference_low=None if difference is None else difference.interval.low,
        difference_high=None if difference is None else difference.interval.high,
    )


def _against(own: UnitKl, searched: UnitKl) -> dict[str, Any]:
    """Return the paired difference to the searched variant of the same limit, as a row has it."""
    found = paired_mean(own.kl - searched.kl)
    return {
        "search_difference": float((own.kl - searched.kl).mean()),
        "search_difference_low": None if found is None else found.interval.low,
        "search_difference_high": None if found is None else found.interval.high,
    }


def _estimate(found: Estimation) -> CostEstimate:
    return CostEstimate(
        kind=found.kind,
        swaps=int(found.measured.sum()),
        possible=found.possible,
        rank_correlation=found.rank_correlation,
    )


def _group_costs(table: CostTable, estimation: Estimation | None) -> Iterator[GroupCost]:
    """Iterate over the costs in the baseline, each with its interval over the windows where it was measured."""
    for i, group in enumerate(table.sizes.groups):
        for j, name in enumerate(table.sizes.formats):
            kl = table.added[i, j]
            estimated = estimation is not None and name != KEPT and not estimation.measured[i, j]
            interval = None if estimated else studentized_interval(kl)
            yield GroupCost(
                group=group,
                format=name,
                size_bytes=int(table.sizes.layers[i, j]),
                kl=float(kl.mean()),
                kl_low=None if interval is None else interval.low,
                kl_high=None if interval is None else interval.high,
                estimated=estimated,
                estimate=None if estimation is None else float(estimation.estimates[i, j]),
            )


def _recipe(sizes: StoredSizes, choice: Choice) -> dict[str, str]:
    return {group: sizes.formats[i] for group, i in zip(sizes.groups, choice.allocation.choice, strict=True)}


def _log(tracker: Tracker, run: TrackedRun, found: Search) -> None:
    # Imported here, because matplotlib takes a second to import.
    from mlflow_compress.reporting.figures import draw_search

    rows = found.to_rows()
    markdown = search_markdown(rows, found.found, found.notes)
    run.log_json(found.to_dict(), "search.json")
    run.log_text(rows_csv(rows), "search.csv")
    run.log_text(rows_csv([asdict(one) for one in found.costs]), "costs.csv")
    run.log_text(markdown, "search.md")
    standard = Policy().kl  # the default gate
    limits = [one.max_kl for one in found.searched if one.max_kl is not None]
    gate = max(limits) if limits else None if standard is None else standard.max_kl
    with scratch_folder(tracker.uri) as folder:
        figures = draw_search(rows, folder, gate=gate)
        run.log_figures(folder, [figure.path.stem for figure in figures])
    against = [one.against_mix for one in found.searched]
    errors = [abs(one.prediction_error) for one in found.searched if one.prediction_error is not None]
    run.log_values(
        {
            "search/variants": len(found.searched),
            "search/closer_than_mix": against.count("closer"),
            "search/farther_than_mix": against.count("farther"),
            **({"search/largest_prediction_error_pct": 100 * max(errors)} if errors else {}),
            **({"search/measured_swaps": found.estimate.swaps} if found.estimate is not None else {}),
        }
    )
    run.set_tags({run_names.VERDICT: found.found})
    run.set_note(markdown)
