"""What a search has found: variants of mixed precision, beside uniform ones and their linear mix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from mlflow_compress.commands.shared.tabular import Tabular, lines_of_run
from mlflow_compress.reporting.search_tables import search_finding, search_notes, search_table
from mlflow_compress.reporting.tables import Table
from mlflow_compress.tracking.store import RunLink


@dataclass(frozen=True, kw_only=True)
class SearchedVariant:
    """One row of a search."""

    name: str  # The variant
    # Whether all layers have one format, or each group its own; and who has chosen that
    kind: Literal["uniform", "searched", "autoscheme"]
    limit: str = ""  # What was searched: "4.5bit"; "" for a uniform variant
    max_kl: float | None = None  # The limit where it is one of KL
    # Stored bits per weight of the linear layers, and of the whole model
    bits_per_weight: float
    bits_per_weight_model: float
    size_bytes: int  # Bytes of all stored tensors
    # KL on the evaluation's texts in nats, with its interval; None where there are too few units for one
    kl: float
    kl_low: float | None
    kl_high: float | None
    search_kl: float  # KL of the checkpoint on the search's text
    search_kl_high: float | None  # Upper end of its interval
    predicted_kl: float | None = None  # What the costs promised for the search's text; None for a uniform variant
    rounds: int = 0  # Rounds in which costs were refitted
    gap: float | None = None  # Optimality gap of the integer programme: 0 is a proven optimum
    mix: str = ""  # The linear mix beside it: "0.37 of gptq-4bit-g128, the rest gptq-3bit-g128"
    mix_kl: float | None = None  # KL of that mix on the evaluation's texts
    # KL of this variant minus that of the mix, paired by unit, with its interval
    difference: float | None = None
    difference_low: float | None = None
    difference_high: float | None = None
    # Of AutoScheme's variant: its KL minus that of the searched variant of the same limit, paired by unit
    search_difference: float | None = None
    search_difference_low: float | None = None
    search_difference_high: float | None = None
    run_id: str  # Its main run

    @property
    def prediction_error(self) -> float | None:
        """Predicted over measured KL on the search's text, minus 1; None for a uniform variant, or a KL of 0."""
        if self.predicted_kl is None or self.search_kl == 0:
            return None
        return self.predicted_kl / self.search_kl - 1

    @property
    def against_mix(self) -> Literal["closer", "farther", "not told apart"] | None:
        """How the variant compares with the linear mix; None where there is no mix or no interval."""
        if self.difference_low is None or self.difference_high is None:
            return None
        if self.difference_high < 0:
            return "closer"
        return "farther" if self.difference_low > 0 else "not told apart"


@dataclass(frozen=True, kw_only=True)
class GroupCost:
    """What one format costs in one group of layers."""

    # Which of them has this format, while the rest is as in the baseline
    group: str
    format: str
    size_bytes: int  # Stored bytes of the group
    # KL on the search's text in nats, with its interval over windows; without one where it was not measured
    kl: float
    kl_low: float | None
    kl_high: float | None
    # Whether it was not measured: it is the estimate, times what the group's measured formats cost over theirs
    estimated: bool = False
    # What was estimated before any measurement: nats ("fisher"), or a relative error ("linearity"); None without
    # estimates
    estimate: float | None = None


@dataclass(frozen=True, kw_only=True)
class CostEstimate:
    """How costs were estimated, and how much of it was measured."""

    kind: str  # "fisher" or "linearity"
    # Swaps that were measured, of how many
    swaps: int
    possible: int
    # Spearman's, of estimate and measured cost, over those that were measured; None for too few
    rank_correlation: float | None

    @property
    def note(self) -> str:
        """How to read the costs."""
        told = f"Costs are estimated ({self.kind}); {self.swaps} of {self.possible} swaps were measured"
        if self.rank_correlation is None:
            return told
        return f"{told}, with a rank correlation of {self.rank_correlation:.2f} between estimate and measured cost"


@dataclass(frozen=True, kw_only=True)
class Search(Tabular):
    """Variants of mixed precision that a search has chosen and measured."""

    baseline: str  # The baseline's short name
    variants: tuple[SearchedVariant, ...]  # Sorted by size
    # What could be chosen for what
    formats: tuple[str, ...]
    groups: tuple[str, ...]
    costs: tuple[GroupCost, ...]  # Of every group in every format
    estimate: CostEstimate | None  # How costs were estimated; None where all were measured
    recipes: Mapping[str, Mapping[str, str]]  # The format of each group, by searched variant
    # What the costs were measured on, and what the variants were evaluated on
    search_text: str
    held_out: str
    left_out: str  # Why AutoScheme has no row; "" where nothing is missing
    run: RunLink  # The run that holds it

    @property
    def searched(self) -> tuple[SearchedVariant, ...]:
        """The variants that the search has chosen."""
        return tuple(one for one in self.variants if one.kind == "searched")

    @property
    def found(self) -> str:
        """What was found, in one sentence."""
        return search_finding(self.to_rows())

    @property
    def notes(self) -> list[str]:
        """How to read the table, and what to know before a decision."""
        told = search_notes(self.to_rows(), search_text=self.search_text, held_out=self.held_out)
        told += [self.estimate.note] if self.estimate is not None else []
        return [*told, f"AutoScheme is not beside them: {self.left_out.rstrip('.')}"] if self.left_out else told

    @property
    def summary(self) -> str:
        """What was found."""
        return self.found

    def to_rows(self) -> Sequence[Mapping[str, Any]]:
        """Return one row per variant."""
        return [
            {**asdict(one), "prediction_error": one.prediction_error, "against_mix": one.against_mix}
            for one in self.variants
        ]

    def table(self) -> Table:
        """Return every variant with the linear mix of its size."""
        return search_table(self.to_rows())

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, ready for JSON."""
        return {**super().to_dict(), "variants": list(self.to_rows()), "found": self.found, "notes": self.notes}

    def as_text(self) -> str:
        """Return the finding, every variant with the linear mix of its size, and how to read that."""

        notes = "\n".join(f"- {note}." for note in self.notes)
        table = "\n".join(search_table(self.to_rows()).lines())
        return "\n\n".join([f"{self.summary}.", table, notes, *lines_of_run(self.run)])
