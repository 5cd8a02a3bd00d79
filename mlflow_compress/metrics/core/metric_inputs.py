"""Everything that metrics read: the records of baseline, variant and noise run, with shared views computed once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mlflow_compress.errors import AlignmentError, ConfigError, DataError
from mlflow_compress.metrics.core.item_table import (
    ItemSubset,
    ItemTable,
    check_same_items,
)
from mlflow_compress.metrics.core.metric_registry import METRICS
from mlflow_compress.metrics.core.predictions import OptionGrid, Predictions, option_means, predict
from mlflow_compress.metrics.stats.arrays import Bool, Float
from mlflow_compress.metrics.stats.bootstrap import Method
from mlflow_compress.records import MetricResult, OptionScores, RunRecords

if TYPE_CHECKING:
    from mlflow_compress.records import RunRecords


def missing(inputs: MetricInputs, requirement: str) -> str | None:
    """Return why a requirement is not met, or None where it is.

    - "items", "variant", "noise", "engine", "asked_again", "embeddings", "bertscore_model": they are there.
    - "family:<name>": the baseline has an item of that family. "package:<name>": the package is installed.
    - "shuffles": every model was scored under shuffled answer orders. "positive_kl": the KL of some item is above 0.
    - "predictions", "option_scores", "token_scores", "judgments", "generations": records of the baseline and, where
      there is one, of the variant.
    - "judgments:<judge>": ratings of that judge, of the same models. "several_judges": grades of two judge models or
      more. "judge_repeats": an answer was graded more than once. "comparisons": verdicts on pairs of answers.
    - "greedy_answers", "greedy_scores": greedy answers as tokens, and scores on the baseline's, of the same models;
      "greedy_distances": the variant's. "traces": the baseline's own sampled answers.
    - "timings": the model that a run is about was timed. A baseline that is not served was not, beside a served one.
    - "option_bounds": the variant's bounds, from lists of most probable tokens.
    - "option_distances", "token_distances": the variant's distances; "item_distances": the former, where any item has
      options to score; "noise_option_distances", "noise_token_distances": those of the second baseline run.
    """
    if requirement.startswith("family:"):
        family = requirement.removeprefix("family:")
        items = inputs.baseline.items
        found = items is not None and len(items) > 0 and bool((inputs.view.family == family).any())
        return None if found else f"no item of the family {family}"
    if requirement.startswith("package:"):
        package = requirement.removeprefix("package:")
        return None if find_spec(package) is not None else f"the package {package} is not installed"
    if requirement.startswith("judgments:"):
        return _judged(inputs, requirement.removeprefix("judgments:"))
    if requirement not in _CHECKS:
        allowed = [*_CHECKS, "family:<name>", "package:<name>", "judgments:<judge>"]
        raise ConfigError("Unknown requirement of a metric", allowed=allowed, got=requirement)
    return _CHECKS[requirement](inputs)


def _judged(inputs: MetricInputs, judge: str) -> str | None:
    reason = _CHECKS["judgments"](inputs)
    if reason is not None:
        return reason
    for who, run in (("baseline", inputs.baseline), ("variant", inputs.variant)):
        if run is not None and not any(is_of(judge, task) for task in _judge_tasks(run)):
            return f"the {who} has no judgments records of {judge}"
    return None


def is_of(judge: str, task: str) -> bool:
    """Return whether ratings with this `task` are those of a judge: "<judge>", or "<judge>/<model>" of several."""
    return task == judge or task.startswith(f"{judge}/")


def _judge_tasks(run: RunRecords) -> set[str]:
    return set() if run.judgments is None else set(run.judgments.table.column("task").to_pylist())


def _several_judges(inputs: MetricInputs) -> str | None:
    models = [task for task in _judge_tasks(inputs.subject) if task.startswith("mt_bench/")]
    return None if len(models) > 1 else "fewer than two judge models graded the answers"


def _judge_repeats(inputs: MetricInputs) -> str | None:
    judgments = inputs.subject.judgments
    rows = [] if judgments is None else judgments.table.select(["task", "repeat"]).to_pylist()
    repeated = any(is_of("mt_bench", row["task"]) and row["repeat"] > 0 for row in rows)
    return None if repeated else "no answer was graded more than once"


def _comparisons(inputs: MetricInputs) -> str | None:
    found = inputs.variant is not None and any(is_of("pairwise", task) for task in _judge_tasks(inputs.variant))
    return None if found else "the answers were not compared in pairs (judges=pairwise)"


def _has(attribute: str) -> Callable[[MetricInputs], str | None]:
    def check(inputs: MetricInputs) -> str | None:
        for who, run in (("baseline", inputs.baseline), ("variant", inputs.variant)):
            if run is not None and not len(getattr(run, attribute) or ()):
                return f"the {who} has no {attribute} records"
        return None

    return check


def _distance(who: str, attribute: str) -> Callable[[MetricInputs], str | None]:
    def check(inputs: MetricInputs) -> str | None:
        run = inputs.variant if who == "variant" else inputs.noise
        if run is None:
            return "no variant" if who == "variant" else "no second run of the baseline"
        return None if len(getattr(run, attribute) or ()) else f"the {who} run has no {attribute} records"

    return check


def _predictions(inputs: MetricInputs) -> str | None:
    if inputs.baseline.items is None or not len(inputs.baseline.items):
        return "the baseline has no items records"
    for who, run in (("baseline", inputs.baseline), ("variant", inputs.variant)):
        if run is not None and not len(run.option_scores or ()) and not len(run.generations or ()):
            return f"the {who} has neither option scores nor generations"
    return None


def _shuffles(inputs: MetricInputs) -> str | None:
    for who, run in (("baseline", inputs.baseline), ("variant", inputs.variant)):
        scores = inputs.ordinary_scores(run) if run is not None else None
        if run is not None and (scores is None or not (scores.column("permutation") > 0).any()):
            return f"the {who} was not scored under shuffled answer orders"
    return None


def _positive_kl(inputs: MetricInputs) -> str | None:
    found = inputs.variant.option_distances if inputs.variant is not None else None
    moved = found is not None and bool((found.column("kl") > 0).any())
    return None if moved else "the KL of every item is 0: no item holds a share of it"


def _item_distances(inputs: MetricInputs) -> str | None:
    if not (inputs.view.n_options > 0).any():
        return None
    return _distance("variant", "option_distances")(inputs)


_CHECKS: dict[str, Callable[[MetricInputs], str | None]] = {
    "items": lambda e: None if e.baseline.items is not None and len(e.baseline.items) else "the baseline has no items",
    "variant": lambda e: None if e.variant is not None else "no variant to compare",
    "noise": lambda e: None if e.noise is not None else "no second run of the baseline",
    "asked_again": lambda e: None if e.asked_again is not None else "no server was asked for the variant twice",
    "engine": lambda e: None if e.engine is not None else "transformers itself ran both models",
    "embeddings": lambda e: None if e.embeddings is not None else "no answer embeddings",
    "bertscore_model": lambda e: None if e.settings.bertscore_model else "no bertscore_model was given",
    "predictions": _predictions,
    "shuffles": _shuffles,
    "positive_kl": _positive_kl,
    "item_distances": _item_distances,
    "option_scores": _has("option_scores"),
    "token_scores": _has("token_scores"),
    "judgments": _has("judgments"),
    "several_judges": _several_judges,
    "judge_repeats": _judge_repeats,
    "comparisons": _comparisons,
    "generations": _has("generations"),
    "greedy_answers": _has("greedy_answers"),
    "greedy_scores": _has("greedy_scores"),
    "greedy_distances": _distance("variant", "greedy_distances"),
    "timings": lambda e: None if len(e.subject.timings or ()) else "nothing was timed",
    "serving_memory": _has("serving_memory"),
    "traces": lambda e: (
        None if len(e.baseline.traces or ()) else "the baseline wrote no text of its own (tasks=traces)"
    ),
    "option_bounds": _distance("variant", "option_bounds"),
    "option_distances": _distance("variant", "option_distances"),
    "token_distances": _distance("variant", "token_distances"),
    "noise_option_distances": _distance("noise", "option_distances"),
    "noise_token_distances": _distance("noise", "token_distances"),
}


@dataclass(frozen=True, kw_only=True)
class MetricSettings:
    """How intervals and conformal sets are computed."""

    level: float = 0.95  # Confidence level of every interval
    resamples: int = 2000  # Bootstrap resamples
    seed: int = 0  # Seed of the bootstrap
    method: Method = "bca"  # Kind of bootstrap interval; means of divergences always have the studentised one
    alpha: float = 0.1  # Miscoverage that conformal sets aim at
    split_seed: int = 42  # Seed of the calibration/test split
    calibration_share: float = 0.5  # Share of the items that calibrates
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
    settings: MetricSettings = field(default_factory=MetricSettings)  # Intervals and splits

    def __post_init__(self) -> None:
        ours = self.baseline.items
        theirs = self.variant.items if self.variant is not None else None
        if ours is not None and theirs is not None and theirs is not ours:
            check_same_items(ours, theirs)

    @property
    def subject(self) -> RunRecords:
        """The model that a run is about: the variant, or the baseline where there is no variant."""
        return self.variant if self.variant is not None else self.baseline

    @cached_property
    def view(self) -> ItemTable:
        """The items as arrays."""
        if self.baseline.items is None:
            raise DataError("The baseline has no items records")
        return ItemTable(self.baseline.items)

    @cached_property
    def headline_families(self) -> tuple[str, ...]:
        """Families that the headline values are pooled over: multiple choice where there is any, else all answered."""
        return self.view.choice or self.view.graded

    def subsets(
        self, families: Collection[str], *, pooled: Collection[str] = (), categories: Collection[str] | None = None
    ) -> Iterator[ItemSubset]:
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

    def _predict(self, run: RunRecords) -> tuple[Predictions, OptionGrid | None]:
        return predict(self.view, replace(run, option_scores=self.ordinary_scores(run)))

    @cached_property
    def _baseline(self) -> tuple[Predictions, OptionGrid | None]:
        return self._predict(self.baseline)

    @cached_property
    def _variant(self) -> tuple[Predictions, OptionGrid | None]:
        if self.variant is None:
            raise DataError("There is no variant")
        found = self._predict(self.variant)
        self._check_same_shuffles(found[1])
        return found

    def _check_same_shuffles(self, grid: OptionGrid | None) -> None:
        ours = self._baseline[1]
        if ours is None or grid is None:
            return
        shared = min(ours.content.shape[1], grid.content.shape[1])
        both = ours.scored[:, :shared] & grid.scored[:, :shared]
        differing = (ours.content[:, :shared] != grid.content[:, :shared]).any(axis=-1) & both
        if differing.any():
            raise AlignmentError(
                "Baseline and variant saw different answer orders",
                got=self.view.name(int(np.argwhere(differing)[0][0])),
                fix="Evaluate both with the same shuffle seed",
            )

    @property
    def baseline_predictions(self) -> Predictions:
        """The baseline's answers."""
        return self._baseline[0]

    @property
    def variant_predictions(self) -> Predictions:
        """The variant's answers."""
        return self._variant[0]

    @property
    def subject_predictions(self) -> Predictions:
        """The answers of the variant, or of the baseline where there is no variant."""
        return self.variant_predictions if self.variant is not None else self.baseline_predictions

    def grid(self, which: str) -> OptionGrid:
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
        name = f"_distance_{column}_{noise}"
        if name not in self.__dict__:  # computed once, as a cached_property would
            self.__dict__[name] = option_means(self.view, run.option_distances, column)
        return np.asarray(self.__dict__[name], dtype=np.float64)

    @cached_property
    def scored_by_both(self) -> Bool:
        """Items with a prediction of both models in the original order, shape (n_items,)."""
        return self.baseline_predictions.scored[:, 0] & self.variant_predictions.scored[:, 0]

    def missing(self, requirement: str) -> str | None:
        """Return why a requirement of a metric is not met, or None where it is; see `requirements.missing`."""
        return missing(self, requirement)


def unmet(inputs: MetricInputs) -> dict[str, str]:
    """Return the metrics that cannot be computed from the inputs, by name, with the first reason for each."""
    reasons: dict[str, str] = {}
    for name, metric in METRICS.items():
        for requirement in metric.requires:
            reason = inputs.missing(requirement)
            if reason is not None:
                reasons[name] = reason
                break
    return reasons


def compute_all(inputs: MetricInputs) -> list[MetricResult]:
    """Return the results of every registered metric whose requirements are met, in the order of the metrics' names.

    Headline values have neither task nor category; the same keys by task and by category follow them.

    Raises
    ------
    AlignmentError
        When baseline and variant do not describe the same items, answer orders or tokens.
    DataError
        When records hold NaN or infinite values or are incomplete.
    """
    skipped = unmet(inputs)
    return [result for name, metric in METRICS.items() if name not in skipped for result in metric.compute(inputs)]


def headline(results: list[MetricResult]) -> dict[str, MetricResult]:
    """Return the pooled results by key: what a run's table shows."""
    return {r.name: r for r in results if r.task is None and r.category is None}
