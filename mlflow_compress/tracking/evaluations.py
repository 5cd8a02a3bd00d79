"""Variants of one baseline, grouped by evaluation. Only runs with the same evaluation id may be compared."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlflow.entities import Run

from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.tracker import Tracker


@dataclass(frozen=True, kw_only=True)
class Variant:
    """The newest finished run of one compressed checkpoint."""

    # The variant's name, followed by eight digits of its checkpoint's hash where several checkpoints share the name
    name: str
    checkpoint: tuple[str, str]  # The variant's name and its checkpoint's hash. Together they identify a variant.
    run: Run  # The variant's main run
    items: int | None  # Number of items with a prediction; None if the run does not have it
    makes: int = 1  # Makes with other calibration samples, itself included


@dataclass(frozen=True, kw_only=True)
class EvaluationGroup:
    """All variants that were evaluated on the same items, with the same settings, against the same baseline."""

    id: str  # The evaluation id (tag `evaluation`)
    base_weights: str  # SHA-256 of the baseline's weight files
    variants: tuple[Variant, ...]  # The newest run of every checkpoint, sorted by name
    started: int  # Start of the newest run, in milliseconds since 1970

    @property
    def items(self) -> int | None:
        """Largest number of items with a prediction among the variants; None if no run has it."""
        return max((v.items for v in self.variants if v.items is not None), default=None)

    @property
    def described(self) -> str:
        """The evaluation as text: the beginning of its id, and its numbers of variants and items."""
        n = len(self.variants)
        items = "an unknown number of" if self.items is None else f"{self.items:,}"
        return f"evaluation {self.id[:8]} ({n} {'variant' if n == 1 else 'variants'}, {items} items)"


def names_of(checkpoints: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Return a display name per (variant, hash): the variant's name, with the hash if the name is not unique."""
    every = set(checkpoints)
    variants = [variant for variant, _ in every]
    return {
        (variant, digest): f"{variant} ({digest[:8]})" if variants.count(variant) > 1 else variant
        for variant, digest in every
    }


def _checkpoint(run: Run) -> tuple[str, str]:
    return run.data.tags[run_names.VARIANT], run.data.tags.get(run_names.CHECKPOINT_SHA256, "unknown")


def items_in(metrics: Mapping[str, float]) -> int | None:
    """Return the number of items with a prediction, from the metrics of a main run; None where they lack it."""
    return int(metrics[run_names.N_ITEMS]) if run_names.N_ITEMS in metrics else None


def makes_of(run: Run, runs: Sequence[Run]) -> list[Run]:
    """Return those of some runs that have made a run's variant again with other calibration samples, each make once."""
    made = Path(run.data.tags.get(run_names.CHECKPOINT, "")).name
    again = [other for other in runs if other.data.tags.get(run_names.REPLICATE_OF) == made]
    return list({_checkpoint(other): other for other in again}.values())


def _newest(runs: Sequence[Run]) -> tuple[Variant, ...]:
    """Return the newest run of every checkpoint but replicates, by name: the luckiest of several would be chosen."""
    newest: dict[tuple[str, str], Run] = {}
    for run in runs:
        if run_names.REPLICATE_OF not in run.data.tags:
            newest.setdefault(_checkpoint(run), run)
    shown = names_of(newest)
    variants = [
        Variant(
            name=shown[key],
            checkpoint=key,
            run=run,
            items=items_in(run.data.metrics),
            makes=1 + len(makes_of(run, runs)),
        )
        for key, run in newest.items()
    ]
    return tuple(sorted(variants, key=lambda variant: variant.name))


def evaluations(tracker: Tracker, base_model: str) -> list[EvaluationGroup]:
    """Return the finished main runs of a baseline by evaluation: most items first, then newest first."""
    groups: dict[str, list[Run]] = {}
    for run in tracker.find_finished("main", **{run_names.BASE_MODEL: base_model}):
        groups.setdefault(run.data.tags[run_names.EVALUATION], []).append(run)
    every = [
        EvaluationGroup(
            id=key,
            base_weights=runs[0].data.tags[run_names.BASE_WEIGHTS],
            variants=_newest(runs),
            started=max(run.info.start_time for run in runs),
        )
        for key, runs in groups.items()
    ]
    every.sort(key=lambda e: (e.items is not None, e.items or 0, e.started), reverse=True)
    return every
