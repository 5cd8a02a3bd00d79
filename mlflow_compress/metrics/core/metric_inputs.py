"""Everything that metrics read: the records of baseline, variant and noise run, with shared views computed once."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from mlflow_compress.errors import AlignmentError, ConfigError, DataError
from mlflow_compress.metrics.core import item_table
from mlflow_compress.metrics.stats.arrays import Bool, Float, Int
from mlflow_compress.metrics.stats.bootstrap import (
    BootstrapMethod,
    Statistic,
    bootstrap,
    first_column,
    studentized_interval,
)
from mlflow_compress.metrics.stats.flip_model import expected_flips
from mlflow_compress.metrics.stats.intervals import Interval
from mlflow_compress.metrics.stats.stratified import Design, EstimateOf, Units
from mlflow_compress.records import Draws, Generations, MetricResult, OptionScores, RunRecords, align

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class MetricSettings:
    """How intervals and conformal sets are computed."""

    level: float = 0.95  # Confidence level of every interval
    resamples: int = 2000  # Bootstrap resamples
    seed: int = 0  # Seed of the bootstrap
    method: BootstrapMethod = "bca"  # Kind of bootstrap interval; means of divergences always have the studentised one
    alpha: float = 0.1  # Miscoverage that conformal sets aim at
    split_seed: int = 42  # Seed of the calibration/test splits, which are drawn from it and the items' ids
    calibration_share: float = 0.5  # Share of the items that calibrates
    # What intervals are of, where items were drawn: "population" is what the benchmark is itself a sample of, as for
    # every other interval; "benchmark" is all of its items, so that no width is left once all are drawn.
    reading: EstimateOf = "population"
    pooled_only: bool = False  # Leave out the values by task and by category
    # Folder and layer of BERTScore's model; without it that metric is left out
    bertscore_model: tuple[str, int] | None = None

    def __post_init__(self) -> None:
        for name in ("level", "alpha", "calibration_share"):
            if not 0.0 < getattr(self, name) < 1.0:
                raise ConfigError(f"{name} must lie strictly between 0 and 1", got=getattr(self, name))
        if self.resamples < 100:
            raise ConfigError("resamples must be at least 100", got=self.resamples)
        if self.method not in ("bca", "percentile"):
            raise ConfigError("Unknown interval method", allowed=("bca", "percentile"), got=self.method)

    def interval(self, columns: Float, statistic: Statistic = first_column) -> Interval | None:
        """Return the bootstrap interval of a statistic of column means, one row per unit that is drawn."""
        return bootstrap(
            columns, statistic, resamples=self.resamples, level=self.level, seed=self.seed, method=self.method
        )

    def skewed_interval(self, values: Float, sizes: Float | None = None) -> Interval | None:
        """Return the studentised bootstrap interval of a mean, or of a ratio of sums over clusters."""
        return studentized_interval(values, sizes, resamples=self.resamples, level=self.level, seed=self.seed)


@dataclass(frozen=True, eq=False)
class AnswerEmbeddings:
    """Sentence embeddings of k sampled answers per instruction, row for row the same instructions."""

    task: str  # Name of the instruction set
    item_ids: tuple[str, ...]  # The instructions
    baseline: npt.NDArray[np.floating]  # Embeddings of each model's answers; shape (n, k, d)
    variant: npt.NDArray[np.floating] | None = None
    # A second sample of the baseline, for the floor; shape (n, k, d)
    baseline_again: npt.NDArray[np.floating] | None = None


@dataclass(frozen=True, eq=False)
class AnswerSamples:
    """Sampled answers of both models to the same first turns, as many of each; rows in the baseline's order.

    Raises `AlignmentError`: the numbers of samples, the instructions, or the prompts differ.
    """

    baseline: Generations
    variant: Generations
    questions: Mapping[str, str]  # What the user wrote, by the instruction's id
    most_tokens: int  # The token limit of all answers
    baseline_again: Generations | None = None  # A second sample of the baseline, for the floor
    categories: Mapping[str, str] = field(default_factory=dict)  # Of the instructions, by id

    def __post_init__(self) -> None:
        keys = set(self.baseline.key_rows())
        for name in ("variant", "baseline_again"):
            other: Generations | None = getattr(self, name)
            if other is None:
                continue
            if lonely := keys ^ set(other.key_rows()):
                raise AlignmentError(
                    f"The baseline's answers and {name} have different samples: their health is not compared",
                    allowed="the same instructions, with the same number of samples",
                    got=str(sorted(lonely)[:3]),
                    fix="Generate both with the same num_samples and instructions",
                )
            aligned = Generations(other.table.take(align(self.baseline, other)))
            if (aligned.column("prompt") != self.baseline.column("prompt")).any():
                raise AlignmentError("Two models answered different prompts", fix="Generate both with the same prompts")
            object.__setattr__(self, name, aligned)

    @property
    def instruction(self) -> Int:
        """Number of each answer's instruction, shape (n,)."""
        return np.unique([f"{task}\x1f{item}" for task, item, *_ in self.baseline.key_rows()], return_inverse=True)[1]


@dataclass(frozen=True, eq=False)
class MetricInputs:
    """The records of one variant and its baseline, or of a baseline alone."""

    baseline: RunRecords  # The reference model's records
    # The compressed model's records. Without it the baseline itself is the subject of the single-model metrics.
    variant: RunRecords | None = None
    # The baseline's second run under another batch composition, with its distances from the first
    noise: RunRecords | None = None
    # The baseline's checkpoint under transformers, where another engine runs baseline and variant, with its distances
    # from the first run
    engine: RunRecords | None = None
    # A served variant's second answers to some of the prompts, with their distances from its first
    asked_again: RunRecords | None = None
    embeddings: AnswerEmbeddings | None = None  # Input of the similarity metrics
    samples: AnswerSamples | None = None  # Input of the health of answers
    settings: MetricSettings = field(default_factory=MetricSettings)  # Intervals and splits
    _computed: dict[str, Any] = field(default_factory=dict, init=False, repr=False)
    # The baseline's records of all items; `baseline` has those of the drawn ones, where the variant's were drawn
    whole_baseline: RunRecords = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "whole_baseline", self.baseline)
        if self.variant is not None and self.variant.draws is not None and self.variant.items is not None:
            drawn = self.baseline.of_items([(str(task), str(item)) for task, item in self.variant.draws.key_rows()])
            object.__setattr__(self, "baseline", drawn)
        ours = self.baseline.items
        theirs = self.variant.items if self.variant is not None else None
        if ours is not None and theirs is not None and theirs is not ours:
            item_table.check_same_items(ours, theirs)

    @property
    def draws(self) -> Draws | None:
        """How the items of the subject were drawn; None where it was scored on all of them."""
        return self.subject.draws

    @cached_property
    def design(self) -> Design | None:
        """How each item was drawn, in the order of `view`; None where all were, so that none is weighted."""
        if self.draws is None:
            return None
        rows = align(self.view.items, self.draws)
        columns = (self.draws.column(name)[rows].astype(np.int64) for name in ("stratum", "stratum_size", "drawn"))
        design = Design(*columns)
        if design.is_whole:
            return None
        if self.variant is None or not (self.baseline.has_answers and self.variant.has_answers):
            return design
        lead = self.baseline_predictions.lead[:, 0]
        known = np.isfinite(lead) & self.scored_by_both
        flipped = self.baseline_predictions.correct[:, 0] != self.variant_predictions.correct[:, 0]
        if not known.any():
            return design
        return replace(design, flips=expected_flips(lead, flipped, known, design.stratum))

    def units(self, rows: Int) -> Units:
        """Return what estimates of some items must know besides values: their groups, and how they were drawn."""
        return Units(self.view.group[rows], None if self.design is None else self.design[rows])

    @property
    def subject(self) -> RunRecords:
        """The model that a run is about: the variant, or the baseline where there is no variant."""
        return self.variant if self.variant is not None else self.baseline

    @cached_property
    def view(self) -> item_table.ItemTable:
        if self.baseline.items is None:
            raise DataError("The baseline has no items records")
        return item_table.ItemTable(self.baseline.items)

    @cached_property
    def headline_families(self) -> tuple[str, ...]:
        """Families that the headline is pooled over: multiple choice where there is any, else answered, else logged."""
        return self.view.choice or self.view.graded or self.view.scored

    @cached_property
    def headline_rows(self) -> Int:
        """Items that the headline values are pooled over, shape (n_rows,)."""
        return np.flatnonzero(np.isin(self.view.family, self.headline_families))

    def subsets(
        self, families: Collection[str], *, pooled: Collection[str] = (), categories: Collection[str] | None = None
    ) -> Iterator[item_table.ItemSubset]:
        """Iterate over `ItemTable.subsets`, pooled ones alone where the settings ask for pooled values only."""
        for subset in self.view.subsets(families, pooled=pooled, categories=categories):
            if not self.settings.pooled_only or (subset.task is None and subset.category is None):
                yield subset

    def ordinary_scores(self, run: RunRecords) -> OptionScores | None:
        """Return a run's option scores without the items that are scored in every answer order.

        Their 24 orders would widen every array and are no shuffles; the metric `all_orders` reads them by itself.
        """
        every_order = self.view.families(lambda family: family.every_order)
        apart = sorted(set(self.view.task[np.isin(self.view.family, every_order)]))
        return run.option_scores.without(task=apart) if apart and run.option_scores is not None else run.option_scores

    def _predict(self, run: RunRecords) -> tuple[item_table.Predictions, item_table.OptionGrid | None]:
        return item_table.predict(self.view, replace(run, option_scores=self.ordinary_scores(run)))

    @cached_property
    def _baseline(self) -> tuple[item_table.Predictions, item_table.OptionGrid | None]:
        return self._predict(self.baseline)

    @cached_property
    def _variant(self) -> tuple[item_table.Predictions, item_table.OptionGrid | None]:
        if self.variant is None:
            raise DataError("There is no variant")
        predictions = self._predict(self.variant)
        ours, theirs = self._baseline[1], predictions[1]
        if ours is not None and theirs is not None:
            shared = min(ours.content.shape[1], theirs.content.shape[1])
            both = ours.scored[:, :shared] & theirs.scored[:, :shared]
            differing = (ours.content[:, :shared] != theirs.content[:, :shared]).any(axis=-1) & both
            if differing.any():
                raise AlignmentError(
                    "Baseline and variant saw different answer orders",
                    got=self.view.name(int(np.argwhere(differing)[0][0])),
                    fix="Evaluate both with the same shuffle seed",
                )
        return predictions

    @property
    def baseline_predictions(self) -> item_table.Predictions:
        return self._baseline[0]

    @property
    def variant_predictions(self) -> item_table.Predictions:
        return self._variant[0]

    @property
    def subject_predictions(self) -> item_table.Predictions:
        """The answers of the variant, or of the baseline where there is no variant."""
        return self.variant_predictions if self.variant is not None else self.baseline_predictions

    def grid(self, which: str) -> item_table.OptionGrid:
        """Return the dense option scores of "baseline" or "variant"; none is a `DataError`."""
        grid = (self._baseline if which == "baseline" else self._variant)[1]
        if grid is None:
            raise DataError(f"The {which} has no option scores")
        return grid

    def distance(self, column: str, *, noise: bool = False) -> Float:
        """Return one distance per item (mean over its options at permutation 0), NaN where an item has none."""
        run = self.noise if noise else self.variant
        if run is None or run.option_distances is None:
            raise DataError("There are no option distances")
        distances = run.option_distances
        return self.once(f"{column}, noise={noise}", lambda: item_table.option_means(self.view, distances, column))

    def once(self, name: str, compute: Callable[[], T]) -> T:
        """Return what several metrics read of these records: computed at the first call."""
        if name not in self._computed:
            self._computed[name] = compute()
        return self._computed[name]  # type: ignore[no-any-return]

    @cached_property
    def scored_by_both(self) -> Bool:
        """Items with a prediction of both models in the original order, shape (n_items,)."""
        return self.baseline_predictions.scored[:, 0] & self.variant_predictions.scored[:, 0]

    def missing(self, *requirements: "Requirement") -> str | None:
        """Return why the first of some requirements that is not met is not, or None where all are."""
        return next((reason for one in requirements if (reason := one.missing(self)) is not None), None)


@dataclass(frozen=True)
class Requirement:
    """A part of the inputs that must be there. Requirements of one name are equal."""

    name: str
    missing: Callable[[MetricInputs], str | None] = field(compare=False, repr=False)  # Why it is not there, or None

    def __str__(self) -> str:
        return self.name


def headline(results: Iterable[MetricResult]) -> dict[str, MetricResult]:
    """Return the pooled results by key: what a run's table shows."""
    return {r.name: r for r in results if r.task is None and r.category is None}
