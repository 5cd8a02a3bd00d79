"""What every stage would cost, before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mlflow_compress.commands.shared.tabular import Tabular, aligned_lines


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """The cost of one stage."""

    stage: str
    times: int  # How often it runs: once for a baseline, once for each variant
    # Tokens that the layers compute; the same without shared prefixes
    tokens: int
    tokens_unshared: int
    operations: float | None  # Floating-point operations; None where there is no formula
    # From and to the storage
    bytes_read: float
    bytes_written: float
    memory: float  # Bytes that one copy of the model and its work need at once, without the libraries themselves
    # Of all its runs; None where there is no formula, no price, or too few devices
    seconds: float | None
    dollars: float | None


@dataclass(frozen=True, kw_only=True)
class CostPlan(Tabular):
    """The plan: what each stage costs, and how the model lies on the devices."""

    model: str
    # All weights; those that one token is multiplied with, without embeddings and head
    parameters: float
    active_parameters: float
    # Devices there are; devices that one copy of the model needs; copies that work side by side (0: it does not fit)
    devices: int
    devices_per_copy: int
    copies: int
    stages: tuple[StageCost, ...]
    states_bytes: float  # Bytes of the baseline's stored states
    checkpoint_bytes: float  # Bytes of one compressed checkpoint
    notes: tuple[str, ...]  # What the figures assume, and what they leave out

    @property
    def seconds(self) -> float | None:
        """Seconds of all stages, one after the other; None where one is not known."""
        each = [stage.seconds for stage in self.stages]
        return None if any(s is None for s in each) else sum(s or 0.0 for s in each)

    @property
    def summary(self) -> str:
        """The model, and how it lies on the devices."""
        active = f", {self.active_parameters / 1e9:.3g} billion a token" if self.active_parameters else ""
        where = (
            f"{self.copies} {'copy' if self.copies == 1 else 'copies'} on {self.devices_per_copy} of {self.devices} "
            f"{'device' if self.devices == 1 else 'devices'} each"
            if self.copies
            else f"does not fit on {self.devices}: one copy needs {self.devices_per_copy} devices"
        )
        return f"{self.model}: {self.parameters / 1e9:.3g} billion weights{active}; {where}"

    def to_rows(self) -> Sequence[Mapping[str, Any]]:
        """Return one row per stage."""
        return [asdict(stage) for stage in self.stages]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, ready for JSON."""
        return {**super().to_dict(), "seconds": self.seconds}

    def as_text(self) -> str:
        """Return one line per stage, the sums, and what the figures assume."""
        from mlflow_compress.reporting.numbers import bytes_text, duration

        def sized(n: float) -> str:
            return bytes_text(round(n))

        def known(value: float | None, text: Callable[[float], str]) -> str:
            return "unknown" if value is None else text(value)

        priced = any(stage.dollars is not None for stage in self.stages)
        heads = ("stage", "times", "tokens", "unshared", "operations", "read", "written", "memory", "time")
        rows = [
            (
                s.stage,
                str(s.times),
                f"{s.tokens:,}",
                f"{s.tokens_unshared:,}",
                known(s.operations, "{:.2e}".format),
                sized(s.bytes_read),
                sized(s.bytes_written),
                sized(s.memory),
                known(s.seconds, duration),
                *([known(s.dollars, "${:,.2f}".format)] if priced else []),
            )
            for s in self.stages
        ]
        lines = [f"{self.summary}.", "", *aligned_lines([(*heads, *(["dollars"] if priced else [])), *rows]), ""]
        lines.append(
            f"All stages: {known(self.seconds, duration)}. States of the baseline: {sized(self.states_bytes)}. "
            f"One checkpoint: {sized(self.checkpoint_bytes)}."
        )
        return "\n".join([*lines, *(f"- {note}." for note in self.notes)])
