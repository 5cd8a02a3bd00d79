"""Forecasts flips from stored records: the variant's flips, and how sure the baseline is of other items."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mlflow_compress.commands.evaluate.result import Evaluation
from mlflow_compress.commands.shared.stored import check_comparable, read_metadata
from mlflow_compress.commands.shared.tabular import Tabular
from mlflow_compress.errors import ConfigError
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.stats.arrays import Bool
from mlflow_compress.metrics.stats.flip_model import forecast_flips
from mlflow_compress.records import MetricResult, RunRecords
from mlflow_compress.reporting.tables import Table


@dataclass(frozen=True)
class Forecast(Tabular):
    """The flips to expect of a variant on items that it was not run on."""

    variant: str
    n_run: int  # Items of the variant's own evaluation that it is made from
    # In percent, with the interval of what would be seen, by task; of several tasks first all together, as None. There
    # are no intervals where the variant was run on fewer than three parts: how much parts differ is then not known
    flips: Sequence[MetricResult]

    @property
    def summary(self) -> str:
        """What is expected over all items, in one sentence."""
        found = self.flips[0]
        expected = f"{found.value:.1f} % of {found.n:,} answers are expected to flip"
        return f"{self.variant}: {expected}, from {self.n_run:,} that were run"

    def to_rows(self) -> Sequence[Mapping[str, Any]]:
        """Return one row per task; of several tasks, first one of all, whose task is None."""
        return [{"task": x.task, "n": x.n, "flips_pct": x.value, "low": x.low, "high": x.high} for x in self.flips]

    def as_text(self) -> str:
        """Return the sentence, and a row per task."""
        rows = [{"task": x.task or "all", "items": x.n, "answers flipped": x} for x in self.flips]
        without = [] if self.flips[0].low is not None else ["No intervals: it was run on fewer than three categories."]
        return "\n".join([self.summary, "", *Table.of(rows).lines(), *without])


def forecast_of(variant: Evaluation, other: Evaluation) -> Forecast:
    """Return the flips to expect of a variant on the items of another evaluation that its own does not have.

    Parts are the categories of tasks.
    """
    if variant.baseline_records_folder is None:
        raise ConfigError("A forecast needs the evaluation of a variant", got=f"{variant.name}, which has no baseline")
    folder = other.baseline_records_folder or other.records_folder
    sides = (variant.baseline, variant.baseline_records_folder), (other.baseline or other.name, folder)
    check_comparable(*({"baseline": name, "tokenizer": read_metadata(f).get("tokenizer")} for name, f in sides))
    ran = MetricInputs(RunRecords.read(variant.baseline_records_folder), RunRecords.read(variant.records_folder))
    before, after = ran.baseline_predictions, ran.variant_predictions
    known = np.isfinite(before.firmness[:, 0]) & after.scored[:, 0]
    there = MetricInputs(RunRecords.read(folder))
    firmness = there.baseline_predictions.firmness[:, 0]
    new = np.isfinite(firmness) & ~np.isin(there.view.keys, ran.view.keys)
    if not known.any():
        raise ConfigError("The variant's evaluation has no items with options", got=variant.name)
    if not new.any():
        raise ConfigError(
            "There is no item to forecast: the variant was run on all of them",
            fix="Give an evaluation of the same baseline that has other items with options",
        )
    flipped = before.correct[known, 0] != after.correct[known, 0]
    own, its = before.firmness[known, 0], firmness[new]
    found = forecast_flips(own, flipped, _parts(ran, known), its, _parts(there, new))
    tasks = there.view.task[new]
    each: list[tuple[str | None, Bool]] = [(name, tasks == name) for name in dict.fromkeys(tasks)]
    whole: list[tuple[str | None, Bool]] = [(None, np.ones(len(tasks), dtype=bool))] if len(each) > 1 else []
    flips = []
    for task, rows in [*whole, *each]:
        share, interval = found.share(rows)
        low, high = (None, None) if interval is None else (100 * interval.low, 100 * interval.high)
        flips.append(MetricResult("distance/flips_pct", 100 * share, low, high, task=task, n=int(rows.sum())))
    return Forecast(variant=variant.name, n_run=int(known.sum()), flips=flips)


def _parts(inputs: MetricInputs, rows: Bool) -> npt.NDArray[np.str_]:
    view = inputs.view
    return np.array([f"{a}\x1f{b}" for a, b in zip(view.task[rows], view.category[rows], strict=True)])
