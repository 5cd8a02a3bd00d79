"""How fast a variant is beside its baseline, in the runtime that it is meant for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlflow_compress.commands.evaluate.result import Measurement
from mlflow_compress.commands.shared.tabular import lines_of_run
from mlflow_compress.records import MetricResult

WITHIN = 0.1  # of a ratio: the ends of an interval that is narrow enough


def imprecise(results: Sequence[MetricResult]) -> list[MetricResult]:
    """Return the ratios of speed whose interval is wider than that."""
    ratios = [(r, r.low, r.high) for r in results if r.name.startswith(("speed/decode_ratio", "speed/prefill_ratio"))]
    return [r for r, low, high in ratios if low and high and max(r.value / low, high / r.value) > 1 + WITHIN]


@dataclass(frozen=True, kw_only=True)
class SpeedMeasurement(Measurement):
    """Tokens a second, waits between tokens, memory and load time; empty, with the reason, where nothing was timed."""

    baseline: str  # The baseline's short name
    # What was measured once per model: seconds to load it, and resident memory
    values: Mapping[str, float] = field(default_factory=dict)
    described: Mapping[str, str] = field(default_factory=dict)  # Runtime with version, device, dtype, threads

    @property
    def summary(self) -> str:
        """What was found, in one sentence."""
        if not self.results:
            return f"{self.name} was not timed: {'; '.join(dict.fromkeys(self.not_computed.values()))}"
        parts = []
        if "speed/decode_ratio_batch_1" not in self.pooled:
            writing, first = self.pooled["speed/decode_tokens_per_second_batch_1"], self.pooled["speed/first_token_ms"]
            speed = f"{writing.value:.3g} tokens a second written, first token after {first.value:.3g} ms"
            return f"{self.name} in {self._runtime}, without its baseline: {speed}"
        for what, batch in (("decode", 1), ("decode", 8), ("prefill", 1), ("prefill", 8)):
            found = self.pooled[f"speed/{what}_ratio_batch_{batch}"]
            parts.append(f"{what} (batch {batch}) {found.value:.2f}x [{found.low:.2f}, {found.high:.2f}]")
        if memory := self.pooled.get("speed/memory_peak_ratio"):
            parts.append(f"peak memory {memory.value:.2f}x [{memory.low:.2f}, {memory.high:.2f}]")
        wide = imprecise(self.results)
        noisy = f" (noisy: after {wide[0].n} rounds an interval is wider than {WITHIN:.0%})" if wide else ""
        return f"{self.name} against {self.baseline} in {self._runtime}: {', '.join(parts)}{noisy}"

    @property
    def _runtime(self) -> str:
        found = self.described
        number = found.get("threads")
        threads = [] if number is None else ["1 thread" if number == "1" else f"{number} threads"]
        return f"{found['runtime']} ({', '.join([found['dtype'], *threads])})"

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the records as plain values, ready for JSON."""
        return {**super().to_dict(), "values": dict(self.values), "described": dict(self.described)}

    def as_text(self) -> str:
        """Return the ratios in one line, then every value, and where to look."""
        from mlflow_compress.reporting.html import value_table

        lines = [self.summary, *(value_table(self.pooled).lines() if self.pooled else [])]
        lines += [f"{name} {value:.4g}" for name, value in self.values.items()]
        return "\n".join([*lines, *lines_of_run(self.run)])
