"""What a search has found: variants of mixed precision beside uniform ones, or the repair of a refused variant."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from mlflow_compress.commands.promote.result import NOTHING_PASSES
from mlflow_compress.commands.shared.tabular import Tabular, lines_of_run
from mlflow_compress.config import EMBEDDED
from mlflow_compress.models.checkpoint_config import CACHE_IGNORED
from mlflow_compress.reporting.numbers import bytes_text
from mlflow_compress.reporting.search_tables import search_finding, search_notes, search_table
from mlflow_compress.reporting.tables import Column, Table, escape_markdown
from mlflow_compress.tracking.store import RunLink


@dataclass(frozen=True, kw_only=True)
class SearchedVariant:
    """One row of a search."""

    name: str  # The variant
    kind: Literal["uniform", "searched"]  # Whether all layers have one format, or each group its own
    limit: str = ""  # What was searched: "4.5bit"; "" for a uniform variant
    max_kl: float | None = None  # The limit where it is one of KL
    # Stored bits per weight of the linear layers, and of the whole model
    bits_per_weight: float
    bits_per_weight_model: float
    size_bytes: int  # Bytes of all stored tensors
    cache_bytes: int | None = None  # Bytes of its cache of keys and values, where a search has chosen caches
    # KL on the evaluation's texts in nats, with its interval; None where there are too few units for one
    kl: float
    kl_low: float | None
    kl_high: float | None
    search_kl: float  # KL of the checkpoint on the search's text
    search_kl_high: float | None  # Upper end of its interval
    predicted_kl: float | None = None  # The sum of its costs on the search's text; None for a uniform variant
    gap: float | None = None  # Optimality gap of the integer programme: 0 is a proven optimum
    mix: str = ""  # The linear mix beside it: "0.37 of gptq-4bit-g128, the rest gptq-3bit-g128"
    mix_kl: float | None = None  # KL of that mix on the evaluation's texts
    # KL of this variant minus that of the mix, paired by unit, with its interval
    difference: float | None = None
    difference_low: float | None = None
    difference_high: float | None = None
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
    # KL on the search's text in nats, with its interval; None where there are too few windows for one
    kl: float
    kl_low: float | None
    kl_high: float | None


@dataclass(frozen=True, kw_only=True)
class Search(Tabular):
    """Variants of mixed precision that a search has chosen and measured."""

    baseline: str  # The baseline's short name
    variants: tuple[SearchedVariant, ...]  # Sorted by size
    # What could be chosen for what
    formats: tuple[str, ...]
    groups: tuple[str, ...]
    costs: tuple[GroupCost, ...]  # Of every group in every format
    recipes: Mapping[str, Mapping[str, str]]  # The format of each group, by searched variant
    cache_tokens: int | None = None  # Tokens in that cache, whose bytes the limit counts; None without cache formats
    # What the costs were measured on, and what the variants were evaluated on
    search_text: str
    held_out: str
    run: RunLink  # The run that holds it

    @property
    def searched(self) -> tuple[SearchedVariant, ...]:
        return tuple(one for one in self.variants if one.kind == "searched")

    @property
    def notes(self) -> list[str]:
        told = search_notes(self.to_rows(), search_text=self.search_text, held_out=self.held_out)
        if self.cache_tokens is not None:
            told.append(f"Cache: keys and values of {self.cache_tokens:,} tokens. Limits count it with the weights")
            told.append(CACHE_IGNORED)
        return told

    @property
    def summary(self) -> str:
        return search_finding(self.to_rows())

    def to_rows(self) -> Sequence[Mapping[str, Any]]:
        return [
            {**asdict(one), "prediction_error": one.prediction_error, "against_mix": one.against_mix}
            for one in self.variants
        ]

    def table(self) -> Table:
        return search_table(self.to_rows())

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "variants": list(self.to_rows()), "found": self.summary, "notes": self.notes}

    def as_text(self) -> str:
        """Return the finding, every variant with the linear mix of its size, and how to read that."""
        notes = "\n".join(f"- {note}." for note in self.notes)
        table = "\n".join(self.table().lines())
        return "\n\n".join([f"{self.summary}.", table, notes, *lines_of_run(self.run)])


@dataclass(frozen=True, kw_only=True)
class RepairTrial:
    """A variant that a repair has made, or the refused one."""

    name: str
    # The variant that was refused, the smallest one that passes, or another one that was tried
    role: Literal["refused", "repaired", "tried"]
    raised: int  # Groups of layers that have more bits than in the refused variant
    raised_caches: int = 0  # Layers whose cache has more bits
    bits_per_weight: float  # Of the linear layers
    size_bytes: int  # Of all stored tensors
    cache_bytes: int | None = None  # Of its cache of keys and values, where that of the refused variant is rounded
    extra_bytes: int  # More than the refused variant has, in its tensors and that cache
    # On the evaluation's items; None where it has none
    kl: float | None
    flips_pct: float | None
    search_kl: float  # On the search's text
    predicted_kl: float | None  # The sum of its costs there, scaled as the one made before; None: not predicted
    passed: bool  # Whether the policy passes it, beside all variants of its evaluation
    # What every gate reads, and those that fail
    reasons: tuple[str, ...]
    failed: tuple[str, ...]
    run_id: str  # Its main run

    @property
    def all_bytes(self) -> int:
        return self.size_bytes + (self.cache_bytes or 0)


@dataclass(frozen=True, kw_only=True)
class Repair(Tabular):
    """The smallest change to a refused variant with which a policy passes it."""

    # The refused variant, its baseline, and the baseline as it was given
    name: str
    baseline: str
    model: str
    repaired_run: str  # Its main run
    passed: bool  # Whether it passes as it is: then nothing was made
    reasons: tuple[str, ...]  # Why it does not pass, or what its gates read
    # The policy's file as it was given (None: the default policy), and the policy's hash
    policy: str | None
    policy_sha256: str
    trials: tuple[RepairTrial, ...] = ()  # Sorted by size
    cache_tokens: int | None = None  # Tokens in the cache whose bytes count; None where it is not rounded
    changed: Mapping[str, str] = field(default_factory=dict)  # What became of each group, and cache, that was raised
    recipe: str | None = None  # File of the repaired variant's recipe; None where all its layers have one format
    run: RunLink  # The run that holds the repair; the refused variant's own where nothing was made

    @property
    def repaired(self) -> RepairTrial | None:
        """The smallest variant that passes; None where none does, or the variant passes as it is."""
        return next((one for one in self.trials if one.role == "repaired"), None)

    @property
    def extra_bytes(self) -> int | None:
        """The price: bytes that the repaired variant has more."""
        return None if self.repaired is None else self.repaired.extra_bytes

    @property
    def exit_code(self) -> int:
        return 0 if self.passed or self.repaired is not None else NOTHING_PASSES

    @property
    def summary(self) -> str:
        if self.passed:
            return f"{self.name} already passes the policy: nothing was made"
        best = self.repaired
        if best is None:
            largest = self.trials[-1]
            none = (
                f"not even {largest.name} passes, the largest mixture" if len(self.trials) > 1 else "nothing is larger"
            )
            return f"{self.name} cannot be repaired: {none}: {'; '.join(largest.failed)}"
        before = next(one for one in self.trials if one.role == "refused")
        share = 100 * best.extra_bytes / before.all_bytes
        below = [one for one in self.trials if one.all_bytes < best.all_bytes and one.role == "tried"]
        raised = [f"{best.raised} {'group' if best.raised == 1 else 'groups'} of layers"] if best.raised else []
        if n := best.raised_caches:
            raised.append(f"the {'cache of 1 layer' if n == 1 else f'caches of {n} layers'}")
        cache = ""
        if best.cache_bytes is not None and before.cache_bytes is not None:
            cache = f", cache {bytes_text(before.cache_bytes)} -> {bytes_text(best.cache_bytes)}"
        edge = f"; {bytes_text(best.all_bytes - below[-1].all_bytes)} less does not pass" if below else ""
        return (
            f"{best.name} passes: {' and '.join(raised)} with more bits than in {self.name}, for "
            f"{bytes_text(best.extra_bytes)} more "
            f"({share:.3g} %, {before.bits_per_weight:.2f} -> {best.bits_per_weight:.2f} bits per weight{cache}){edge}"
        )

    def to_rows(self) -> Sequence[Mapping[str, Any]]:
        return [
            {**asdict(one), "reasons": "; ".join(one.reasons), "failed": "; ".join(one.failed)} for one in self.trials
        ]

    def table(self) -> Table:
        cached = self.cache_tokens is not None
        heads = ("size", *(["cache"] if cached else []), "more", "bits/weight", "KL (nats)", "flips (%)")
        return Table(
            columns=[Column("variant", left=True), *map(Column, heads), Column("policy", left=True)],
            rows=[
                (
                    one.name,
                    bytes_text(one.size_bytes),
                    *([bytes_text(one.cache_bytes)] if one.cache_bytes is not None else []),
                    bytes_text(one.extra_bytes) if one.extra_bytes else None,
                    f"{one.bits_per_weight:.3f}",
                    None if one.kl is None else f"{one.kl:.4f}",
                    None if one.flips_pct is None else f"{one.flips_pct:.1f}",
                    "passes" if one.passed else "fails",
                )
                for one in self.trials
            ],
        )

    def gates(self) -> list[str]:
        """Return what the policy's gates read, before and after, a line each."""
        if not self.trials:
            return [f"{self.name}: {'; '.join(self.reasons)}"]
        before = next(one for one in self.trials if one.role == "refused")
        after = self.repaired or self.trials[-1]
        return [f"{one.name}: {'; '.join(one.reasons)}" for one in (before, after)]

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "verdict": self.summary, "extra_bytes": self.extra_bytes}

    def _changes(self) -> list[str]:
        by_format: dict[str, list[str]] = {}
        for group, name in self.changed.items():
            by_format.setdefault(name, []).append(group)
        lines = [f"Raised, {name}: {', '.join(groups)}" for name, groups in by_format.items()]
        if self.cache_tokens is not None:
            lines.append(f"Cache: keys and values of {self.cache_tokens:,} tokens, counted with the weights")
            lines.append(CACHE_IGNORED)
        return lines

    def as_text(self) -> str:
        """Return what passes and its price, every variant, the gates before and after, and the next command."""
        blocks = [f"{self.summary}."]
        if self.trials:
            blocks.append("\n".join(self.table().lines()))
        blocks.append("\n".join([*self._changes(), *self.gates()]))
        blocks += lines_of_run(self.run)
        policy = "" if self.policy is None else f" --policy {shlex.quote(self.policy)}"
        if self.exit_code == 0:
            blocks.append(f"Next:          mlflow-compress promote --model {shlex.quote(self.model)}{policy}")
        if self.recipe is not None:
            named = "" if self.model == EMBEDDED else f" --model {shlex.quote(self.model)}"
            recipe = shlex.quote(f"recipe={self.recipe}")
            blocks[-1] += f"\nMade again:    mlflow-compress main{named} --method mixed --method_args {recipe}"
        return "\n\n".join(blocks)

    def markdown(self) -> str:
        """Return the same for the run's note."""
        listed = [f"- {escape_markdown(line)}." for line in [*self._changes(), *self.gates()]]
        return "\n".join([f"**{escape_markdown(self.summary)}.**", "", self.table().markdown(), "", *listed, ""])
