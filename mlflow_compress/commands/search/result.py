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
    """One row of a search.

    Attributes
    ----------
    name : str
        The variant.
    kind : {"uniform", "searched", "autoscheme"}
        Whether all layers have one format, or each group its own; and who has chosen that.
    limit : str
        What was searched: "4.5bit"; "" for a uniform variant.
    max_kl : float or None
        The limit where it is one of KL.
    bits_per_weight, bits_per_weight_model : float
        Stored bits per weight of the linear layers, and of the whole model.
    size_bytes : int
        Bytes of all stored tensors.
    kl, kl_low, kl_high : float or None
        KL on the evaluation's texts in nats, with its interval; None where there are too few units for one.
    search_kl : float
        KL of the checkpoint on the search's text.
    search_kl_high : float or None
        Upper end of its interval.
    predicted_kl : float or None
        What the costs promised for the search's text; None for a uniform variant.
    rounds : int
        Rounds in which costs were refitted.
    gap : float or None
        Optimality gap of the integer programme: 0 is a proven optimum.
    mix : str
        The linear mix beside it: "0.37 of gptq-4bit-g128, the rest gptq-3bit-g128".
    mix_kl : float or None
        KL of that mix on the evaluation's texts.
    difference, difference_low, difference_high : float or None
        KL of this variant minus that of the mix, paired by unit, with its interval.
    search_difference, search_difference_low, search_difference_high : float or None
        Of AutoScheme's variant: its KL minus that of the searched variant of the same limit, paired by unit.
    run_id : str
        Its main run.
    """

    name: str
    kind: Literal["uniform", "searched", "autoscheme"]
    limit: str = ""
    max_kl: float | None = None
    bits_per_weight: float
    bits_per_weight_model: float
    size_bytes: int
    kl: float
    kl_low: float | None
    kl_high: float | None
    search_kl: float
    search_kl_high: float | None
    predicted_kl: float | None = None
    rounds: int = 0
    gap: float | None = None
    mix: str = ""
    mix_kl: float | None = None
    difference: float | None = None
    difference_low: float | None = None
    difference_high: float | None = None
    search_difference: float | None = None
    search_difference_low: float | None = None
    search_difference_high: float | None = None
    run_id: str

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
    """What one format costs in one group of layers.

    Attributes
    ----------
    group, format : str
        Which of them has this format, while the rest is as in the baseline.
    size_bytes : int
        Stored bytes of the group.
    kl, kl_low, kl_high : float or None
        KL on the search's text in nats, with its interval over windows; without one where it was not measured.
    estimated : bool
        Whether it was not measured: it is the estimate, times what the group's measured formats cost over theirs.
    estimate : float or None
        What was estimated before any measurement: nats ("fisher"), or a relative error ("linearity"); None without
        estimates.
    """

    group: str
    format: str
    size_bytes: int
    kl: float
    kl_low: float | None
    kl_high: float | None
    estimated: bool = False
    estimate: float | None = None


@dataclass(frozen=True, kw_only=True)
class CostEstimate:
    """How costs were estimated, and how much of it was measured.

    Attributes
    ----------
    kind : str
        "fisher" or "linearity".
    swaps, possible : int
        Swaps that were measured, of how many.
    rank_correlation : float or None
        Spearman's, of estimate and measured cost, over those that were measured; None for too few.
    """

    kind: str
    swaps: int
    possible: int
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
    """Variants of mixed precision that a search has chosen and measured.

    Attributes
    ----------
    baseline : str
        The baseline's short name.
    variants : tuple of SearchedVariant
        Sorted by size.
    formats, groups : tuple of str
        What could be chosen for what.
    costs : tuple of GroupCost
        Of every group in every format.
    estimate : CostEstimate or None
        How costs were estimated; None where all were measured.
    recipes : mapping of str to mapping of str to str
        The format of each group, by searched variant.
    search_text, held_out : str
        What the costs were measured on, and what the variants were evaluated on.
    left_out : str
        Why AutoScheme has no row; "" where nothing is missing.
    run : RunLink
        The run that holds it.
    """

    baseline: str
    variants: tuple[SearchedVariant, ...]
    formats: tuple[str, ...]
    groups: tuple[str, ...]
    costs: tuple[GroupCost, ...]
    estimate: CostEstimate | None
    recipes: Mapping[str, Mapping[str, str]]
    search_text: str
    held_out: str
    left_out: str
    run: RunLink

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
        return {**asdict(self), "variants": list(self.to_rows()), "found": self.found, "notes": self.notes}

    def as_text(self) -> str:
        """Return the finding, every variant with the linear mix of its size, and how to read that."""

        notes = "\n".join(f"- {note}." for note in self.notes)
        table = "\n".join(search_table(self.to_rows()).lines())
        return "\n\n".join([f"{self.summary}.", table, notes, *lines_of_run(self.run)])
