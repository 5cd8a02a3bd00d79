"""What a sweep has found, and what it is doing at this moment."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from mlflow_compress.commands.shared.tabular import ScoredVariants, Tabular, lines_of_run
from mlflow_compress.decide.scoreboard import Scoreboard
from mlflow_compress.reporting.numbers import bytes_text, duration_text
from mlflow_compress.reporting.tables import Column, Table
from mlflow_compress.tracking.store import RunLink


@dataclass(frozen=True, kw_only=True)
class PlannedVariant:
    """One variant of a sweep."""

    # The variant and its method
    name: str
    method: str
    finished_run: str | None  # The main run that holds its results already; None where it is to be made
    seconds: float | None  # Estimated duration, from earlier runs of the store; None where there are none
    # Estimated size of its checkpoint; None for a method that has no bits, whose checkpoint is at most as large as
    # the baseline; 0 of a served model, which takes none of this disk
    size_bytes: float | None


@dataclass(frozen=True, kw_only=True)
class SweepPlan(Tabular):
    """The plan of a sweep."""

    baseline: str  # The baseline's short name
    evaluation: str  # The evaluation id that all variants share
    variants: tuple[PlannedVariant, ...]  # In the order in which they are made
    left_out: Mapping[str, str]  # Combinations that are not made, and why
    base_size_bytes: int  # Bytes of the baseline's stored tensors
    # How often a checkpoint is stored: in the folder of checkpoints, and with the registered model if it is logged
    copies: int
    made_once: tuple[str, ...] = ()  # Variants without the replicates that were asked for: no calibration text is read

    @property
    def to_do(self) -> tuple[PlannedVariant, ...]:
        return tuple(variant for variant in self.variants if variant.finished_run is None)

    @property
    def seconds(self) -> float | None:
        """Estimated duration of what is to do; None where an estimate is missing."""
        each = [variant.seconds for variant in self.to_do]
        return None if any(seconds is None for seconds in each) else sum(seconds or 0.0 for seconds in each)

    @property
    def disk_bytes(self) -> float:
        """Estimated bytes of the checkpoints of what is to do; one of unknown size counts like the baseline."""
        return self.copies * sum(map(self.size_of, self.to_do))

    def size_of(self, variant: PlannedVariant) -> float:
        """Return the estimated bytes of a checkpoint, at most."""
        return self.base_size_bytes if variant.size_bytes is None else variant.size_bytes

    @property
    def summary(self) -> str:
        n, done = len(self.variants), len(self.variants) - len(self.to_do)
        n_left = len(self.left_out)
        words = "combination is" if n_left == 1 else "combinations are"
        left = f"; {n_left} {words} not supported" if n_left else ""
        finished = f", {done} of them finished" if done else ""
        return f"{n} {'variant' if n == 1 else 'variants'} of {self.baseline}{finished}{left}"

    def to_rows(self) -> Sequence[Mapping[str, Any]]:
        return [asdict(variant) for variant in self.variants]

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "seconds": self.seconds, "disk_bytes": self.disk_bytes}

    def as_text(self) -> str:
        columns = [Column("variant", left=True), Column("time"), Column("size")]
        lines = [f"{self.summary}; evaluation {self.evaluation[:8]}", ""]
        rows = []
        for variant in self.variants:
            time = "unknown" if variant.seconds is None else duration_text(variant.seconds)
            size = bytes_text(int(self.size_of(variant)))
            on_disk = f"{'at most' if variant.size_bytes is None else 'about'} {size}"
            finished = variant.finished_run
            shown = time if finished is None else f"finished, run {finished[:8]}"
            rows.append((variant.name, shown, on_disk if variant.size_bytes != 0 else "served"))
        lines += [*Table(columns=columns, rows=rows).lines(ruled=False), "", *_sums(self)]
        lines += (
            [f"One replicate, because no calibration text is read: {', '.join(self.made_once)}."]
            if self.made_once
            else []
        )
        not_made = [f"- {name}: {why}" for name, why in self.left_out.items()]
        return "\n".join([*lines, *(["", "Not made:", *not_made] if not_made else [])])


def _sums(plan: SweepPlan) -> list[str]:
    if not plan.to_do:
        return ["Nothing to do: every variant is finished."]
    n_unknown = sum(1 for variant in plan.to_do if variant.seconds is None)
    known = sum(variant.seconds or 0.0 for variant in plan.to_do)
    if not n_unknown:
        time = f"{duration_text(known)}, as in earlier runs of this store"
    elif n_unknown == len(plan.to_do):
        time = "unknown: the store has no finished run of these methods on this evaluation"
    else:
        others = "1 variant" if n_unknown == 1 else f"{n_unknown} variants"
        time = f"{duration_text(known)}, and that of {others} is unknown"
    copies = "the checkpoints, and a copy of each with its model" if plan.copies == 2 else "the checkpoints"
    return [f"Time: {time}.", f"Disk: about {bytes_text(int(plan.disk_bytes))} ({copies}; records are not counted)."]


State = Literal["waits", "runs", "finished", "found", "failed"]


@dataclass(frozen=True, kw_only=True)
class VariantProgress:
    """How far one variant of a running sweep is."""

    name: str  # The variant
    state: State = "waits"  # "found" means that an earlier run holds it
    doing: str = ""  # What happens now, what was found, or why it failed


@dataclass(frozen=True, kw_only=True)
class SweepProgress:
    """What has just happened in a sweep: a line for a log, and all variants for a live table."""

    line: str
    variants: tuple[VariantProgress, ...] = ()

    def __str__(self) -> str:
        return self.line


@dataclass(frozen=True, kw_only=True)
class Sweep(ScoredVariants):
    """Many variants of one baseline, side by side."""

    scoreboard: Scoreboard  # Every variant with its values, and which of them can be told apart
    plan: SweepPlan  # What was asked for
    finding: str  # What was found, in one sentence
    text: str  # The scoreboard as text for a terminal
    choice: str  # What the default policy chooses, and why; empty where no variant has results
    page: str  # Where the page over the variants lies; empty where there is none
    run: RunLink  # The run that holds it

    @property
    def failed(self) -> dict[str, str]:
        """Every variant that failed or lacks a stage, and why."""
        return {row.name: row.reason for row in self.scoreboard.rows if row.reason and row.status != "unsupported"}

    @property
    def summary(self) -> str:
        return self.finding

    @property
    def scores(self) -> Scoreboard:
        return self.scoreboard

    def to_dict(self) -> dict[str, Any]:
        return {
            "scoreboard": self.scoreboard.to_dict(),
            "plan": self.plan.to_dict(),
            "choice": self.choice,
            "run": asdict(self.run),
        }

    def as_text(self) -> str:
        from mlflow_compress.reporting.scoreboard_text import wrapped

        page = [f"Page:          {self.page}"] if self.page else []
        said = [line for text in (self.choice, self.finding) for line in wrapped(text)]
        parts = ["\n".join(said), self.text, "\n".join([*lines_of_run(self.run), *page])]
        return "\n\n".join(part for part in parts if part)
