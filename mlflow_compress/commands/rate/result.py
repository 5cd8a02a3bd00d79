"""A blind sheet for raters, and what their ratings say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlflow_compress.commands.shared.tabular import Tabular, aligned_lines, lines_of_run
from mlflow_compress.errors import ConfigError
from mlflow_compress.records import MetricResult
from mlflow_compress.tracking.store import RunLink


@dataclass(frozen=True, kw_only=True)
class BlindSheet(Tabular):
    """What `blind` wrote."""

    folder: Path  # The folder with `for_raters` and `key.json`
    n_pairs: int  # Pairs to rate
    n_identical: int  # Pairs of identical answers, which are ties and need no rating

    @property
    def for_raters(self) -> Path:
        """The folder to give to raters: a page and a CSV file with the same pairs."""
        return self.folder / "for_raters"

    @property
    def key(self) -> Path:
        """The file that says whose answers they are. Keep it from raters."""
        return self.folder / "key.json"

    @property
    def summary(self) -> str:
        """How many pairs there are, in one sentence."""
        same = f", {self.n_identical} more are identical and count as ties" if self.n_identical else ""
        return f"{self.n_pairs} {'pair' if self.n_pairs == 1 else 'pairs'} to rate{same}."

    def to_rows(self) -> Sequence[Mapping[str, Any]]:
        """Return one row per file, and who may see it."""
        files = {"rate.html": "raters, in a browser", "answers.csv": "raters, in a spreadsheet"}
        rows = [{"file": str(self.for_raters / name), "for": whom} for name, whom in files.items()]
        return [*rows, {"file": str(self.key), "for": "you alone"}]

    def as_text(self) -> str:
        """Return how many pairs there are, and who gets which file."""
        return "\n".join(
            [self.summary, *aligned_lines([(f"For {row['for']}:", row["file"]) for row in self.to_rows()])]
        )


@dataclass(frozen=True, kw_only=True)
class HumanRatings(Tabular):
    """What people prefer."""

    # The models
    baseline: str
    variant: str
    results: tuple[MetricResult, ...]  # All raters together, by category, by rater (`task`), and their agreement
    missing: Mapping[str, int]  # Rows that each rater has not rated
    n_identical: int  # Pairs of identical answers, a tie of every rater
    run: RunLink | None = None  # The run to which the results were logged

    @property
    def pooled(self) -> dict[str, MetricResult]:
        """The results of all raters together, by metric."""
        return {result.name: result for result in self.results if result.task is None and result.category is None}

    def __getitem__(self, metric: str) -> MetricResult:
        """Return a result of all raters together; one that there is not is a `ConfigError`."""
        if metric not in self.pooled:
            raise ConfigError("The ratings do not give this metric", allowed=sorted(self.pooled), got=metric)
        return self.pooled[metric]

    @property
    def summary(self) -> str:
        """The win rate, in one sentence."""
        rate = self["human/win_rate"]
        interval = "" if rate.low is None else f" [{rate.low:.3f}, {rate.high:.3f}]"
        return (
            f"{self.variant} against {self.baseline}: win rate {rate.value:.3f}{interval} in {rate.n} ratings of "
            f"{len(self.missing)} {'rater' if len(self.missing) == 1 else 'raters'}, ties counting half"
        )

    def to_rows(self) -> Sequence[Mapping[str, Any]]:
        """Return one row per result; `task` is the rater, or a pair of raters."""
        return [asdict(result) for result in self.results]

    def as_text(self) -> str:
        """Return the win rate, one line per result, and what is missing."""
        rows = [
            (
                f"{result.name}{f' ({result.task})' if result.task else ''}",
                f"{result.value:.3f}",
                "" if result.low is None else f"[{result.low:.3f}, {result.high:.3f}]",
                f"n {result.n}",
            )
            for result in self.results
            if result.category is None
        ]
        lines = [f"{self.summary}.", "", *aligned_lines(rows)]
        if self.n_identical:
            lines.append(f"{self.n_identical} pairs of identical answers are ties of every rater.")
        lines += [f"{rater} has not rated {n} of the pairs." for rater, n in self.missing.items() if n]
        return "\n\n".join(["\n".join(lines), *lines_of_run(self.run)])
