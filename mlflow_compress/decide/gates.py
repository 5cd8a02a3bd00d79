"""Gates: bounds on the numbers of a variant, each a check with its reason in words."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mlflow_compress.metrics.core.metric_registry import all_keys, key
from mlflow_compress.metrics.kl_tail import ABOVE_CLIP, CLIP, CLIPPED_KL
from mlflow_compress.metrics.perplexity import GATED_DOCUMENTS, GATED_TOP_PCT
from mlflow_compress.metrics.stats.intervals import z_value
from mlflow_compress.metrics.stats.sample_size import (
    fewest_without_event,
    times_for_change,
    times_for_mean,
    times_for_share,
)
from mlflow_compress.metrics.stats.significance import OneEnd
from mlflow_compress.records import MetricResult

SIZE = "size/bytes"
RATIO = "size/ratio"
CACHE = "size/cache_bytes_per_token"
CACHE_RATIO = "size/cache_ratio"
KL = "distance/kl_mean"
_KL_REVERSE = "distance/kl_reverse_mean"
CORPUS_KL = "distance/corpus_kl_mean"
FLIPS = "distance/flips_pct"
DELTA = "quality/accuracy_delta"

# Upper ends of 95 % intervals (see `decide.gate_values`), and the number of items that have a KL.
GATE_KL_ITEMS = "gate/kl_items"
GATE_FLIPS = "gate/flips_pct_upper"
GATE_DROP = "gate/accuracy_drop_pct_upper"

SPEED = "speed/"  # before the names of all that the speed stage measures
DECODE_SPEEDUP = "speed/decode_ratio_batch_1"
PREFILL_SPEEDUP = "speed/prefill_ratio_batch_1"
MEMORY_RATIO = "speed/memory_peak_ratio"


@dataclass(frozen=True, kw_only=True)
class GateNumber:
    """What a gate has read, and its bound."""

    gate: str  # What is bounded, in words
    value: float | None  # The value itself; None where the gate bounds one that is no end of an interval
    read: float  # What is held against the bound: an end of its interval wherever there is one
    bound: float
    at_least: bool  # Whether the bound is the smallest accepted value
    passed: bool


@dataclass(frozen=True, kw_only=True)
class Check:
    """The result of one condition, with its reason in words, and the metric that is missing, if one is."""

    passed: bool
    reason: str
    missing: str = ""
    # Probability of a value this far within the limit, if the truth were at the limit; None where nothing is compared
    p_value: float | None = None
    # Of one that failed: whether more measuring may let it pass, as the value itself is within the limit, or is missing
    is_open: bool = False
    is_void: bool = False  # Of one that is open: whether no value of the evaluation tells anything
    short: str = ""  # The reason in a few words; empty: the reason itself
    # Of one that is open for too few items: about how many times as many would do; infinite above `MOST_TIMES`
    times_items: float | None = None
    number: GateNumber | None = None  # None where nothing was read


def without_speed(reason: str) -> dict[str, str]:
    """Return why speed and memory are missing, as `in_words` takes it; nothing where there is no reason."""
    return {SPEED: reason} if reason else {}


def in_words(check: Check, absent: Mapping[str, str]) -> str:
    """Return a check's reason, with why its metric is missing where `absent` says so, by the beginning of its name."""
    why = next((reason for start, reason in absent.items() if check.missing.startswith(start)), "")
    return f"{check.reason} ({why})" if why else check.reason


@dataclass(frozen=True, kw_only=True)
class Gate:
    """A metric that must not exceed a bound, or not fall below it."""

    metric: str  # Key of what is read: an end of a 95 % interval wherever there is one
    bound: float  # Largest accepted value, or smallest with `at_least`
    label: str  # The metric in words
    at_least: bool = False  # Whether the bound is the smallest accepted value
    # Of an end: the key of the value that the interval is of, what turns it into the unit of the bound, and its range
    value: str = ""
    factor: float = 1.0
    low: float = -math.inf
    high: float = math.inf
    # Whether it is the largest of several slices, whose values and ends stand beside it: no slice may exceed the bound
    by_slice: bool = False

    def checks(self, metrics: Mapping[str, float]) -> tuple[Check, ...]:
        """Return whether the metric is within the bound. A metric that is missing or NaN fails."""
        read = metrics.get(self.metric)
        if read is None:
            why = (
                f"{self.metric} is missing" if self.label == self.metric else f"{self.label}: {self.metric} is missing"
            )
            if "(upper end)" in self.metric and self.metric.startswith(CORPUS_KL):
                why += f", or from fewer than {GATED_DOCUMENTS} documents, or one holds {GATED_TOP_PCT:g} % of the mean"
            elif "(upper end)" in self.metric and self.metric.startswith((KL, _KL_REVERSE)):
                why += (
                    f", as where an item is above {CLIP:g} nat: give gates on {CLIPPED_KL.name} and {ABOVE_CLIP.name}"
                )
            return (
                self._unknown(why, self.metric, "without an interval" if self.value in metrics else "not measured"),
            )
        if self.value and self.value not in metrics:
            return (self._unknown(f"{self.label}: {self.value} is missing", self.value),)
        passed = read >= self.bound if self.at_least else read <= self.bound
        signs = (">=", "<") if self.at_least else ("<=", ">")
        sign = signs[0] if passed else signs[1]
        one_end = self.one_end(metrics)
        # Narrow is less than a tenth of the interval's width, which is a fifth of its half.
        narrow = one_end is not None and abs(self.bound - read) < abs(read - one_end.value) / 5
        reason = f"{self.label}: {read:.4g} {sign} {self.bound:g}{', narrowly' if narrow else ''}"
        p_value = one_end.p_value(self.bound) if one_end is not None else float(not passed)

        if self.by_slice and (slices := self._slices(metrics)):
            # Within the bound only if every slice is: an intersection-union test.
            p_value = max(end.p_value(self.bound) for end in slices.values())
            reason += f" ({max(slices, key=lambda name: slices[name].end)})"
        number = GateNumber(
            gate=self.label,
            value=None if one_end is None else one_end.value,
            read=read,
            bound=self.bound,
            at_least=self.at_least,
            passed=passed,
        )
        if passed:
            return (Check(passed=True, reason=reason, p_value=p_value, number=number),)
        shown = read if one_end is None else one_end.value
        beyond = signs[1] + "=" * (shown == self.bound)
        is_open = (shown > self.bound if self.at_least else shown < self.bound) and one_end is not None
        return (
            Check(
                passed=False,
                reason=reason,
                p_value=p_value,
                is_open=is_open,
                short=self._what if is_open else f"{self._amount(shown)} {beyond} {self.bound:g}",
                times_items=self._times_items(shown, read, metrics) if is_open else None,
                number=number,
            ),
        )

    def _times_items(self, value: float, end: float, metrics: Mapping[str, float]) -> float:
        """Return about how many times as many items bring the end within the bound, as `sample_size` plans it.

        Infinity stands for more than `MOST_TIMES`. How many independent items the sample counts as follows from the
        end U: of a share p ``n = z^2 U (1 - U) / (U - p)^2`` (Wilson), of the change of accuracy d with the flips f
        ``n = z^2 (f - d^2) / (U - d)^2`` (Tango; without any, Wilson's of 0).
        """
        z = z_value(0.95)
        if self.metric == GATE_DROP and FLIPS in metrics:
            change, width = -value / 100.0, (end - value) / 100.0
            flipped = max(metrics[FLIPS] / 100.0, abs(change))
            known = flipped - change**2 if flipped > 0.0 else width * (1.0 - width)
            n = z**2 * known / width**2
            if n >= 1.0:
                return times_for_change(change, flipped, n, -self.bound / 100.0)
        elif (self.low, self.high) == (0.0, 100.0) and not self.at_least:
            share, high = value / 100.0, end / 100.0
            n = z**2 * high * (1.0 - high) / (high - share) ** 2
            if n >= 1.0:
                return times_for_share(share, n, self.bound / 100.0)
        return times_for_mean(abs(self.bound - value), abs(end - value))

    def _unknown(self, reason: str, metric: str, lack: str = "not measured") -> Check:
        return Check(passed=False, reason=reason, missing=metric, is_open=True, short=f"{self._what} {lack}")

    @property
    def _what(self) -> str:
        """What is bounded, without its unit and the end that is read."""
        return self.label.partition(" (")[0].removesuffix(" in %").removesuffix(" in points")

    def _amount(self, value: float) -> str:
        label = self.label.partition(" (")[0]
        unit = next((f" {unit}" for unit in ("%", "points") if label.endswith(f" in {unit}")), "")
        return f"{self._what} {value:.3g}{unit}"

    def one_end(self, metrics: Mapping[str, float]) -> OneEnd | None:
        """Return the end that the gate reads, with its value; None where it reads no end, or one of them is missing."""
        if not self.value or self.value not in metrics or self.metric not in metrics:
            return None
        return self._end(self.factor * metrics[self.value], metrics[self.metric])

    def _end(self, value: float, end: float) -> OneEnd:
        return OneEnd(value=value, end=end, low=self.low, high=self.high, upper=not self.at_least)

    def _slices(self, metrics: Mapping[str, float]) -> dict[str, OneEnd]:
        start, end = f"{self.value} of ", self.metric.removeprefix(self.value)
        return {
            name.removeprefix(start): self._end(value, metrics[name + end])
            for name, value in metrics.items()
            if name.startswith(start) and name + end in metrics
        }


def published_gate(metric: str, bound: float, *, label: str = "", at_least: bool = False) -> Gate:
    """Return the gate on what a metric publishes for gates: the end of its interval that is worse."""
    declared = key(metric)
    assert declared.gate is not None
    low, high = sorted((declared.gate.factor * declared.low, declared.gate.factor * declared.high))
    return Gate(
        metric=declared.gate.name,
        bound=bound,
        label=label or f"{key(metric).gate_label or metric} (upper end)",
        at_least=at_least,
        value=metric,
        factor=declared.gate.factor,
        low=low,
        high=high,
    )


@dataclass(frozen=True, kw_only=True)
class DivergenceGate:
    """The gate on KL. It promises the mean of the KL clipped per item, and the share of items above the clip.

    No sample bounds a mean whose values have no bound: a large item that is rare enough is not seen. What was measured
    of the mean itself must keep to the limit too, and is no promise.
    """

    max_kl: float  # Largest accepted mean of the KL clipped per item, in nats
    max_outliers_pct: float  # Largest accepted share of items above the clip, in percent

    def checks(self, metrics: Mapping[str, float]) -> tuple[Check, ...]:
        n_items = metrics.get(GATE_KL_ITEMS)
        if n_items is None:
            return (
                Check(passed=False, reason=f"KL: {GATE_KL_ITEMS} is missing", is_open=True, short="KL not measured"),
            )
        if n_items == 0:
            return (Check(passed=True, reason="KL: does not apply, every answer of this evaluation is generated"),)
        first, second = self.reads()
        [above] = second.checks(metrics)
        needed = fewest_without_event(self.max_outliers_pct / 100.0)
        if not above.passed and not above.missing and n_items < needed < math.inf:
            fix = f"even with none above it, at least {needed:,} items are needed: give a larger limit, or more tasks"
            above = replace(above, reason=f"{above.reason} ({fix}; there are {n_items:,.0f})")
        # Clipping only lowers a mean: one that breaks the limit as it is does not pass without its largest values.
        mean = Gate(metric=KL, bound=self.max_kl, label="KL (mean)").checks(metrics)
        broken = mean if metrics.get(KL, 0.0) > self.max_kl else ()
        clipped = [
            one if one.passed or not broken else replace(one, short=broken[0].short) for one in first.checks(metrics)
        ]
        return (*broken, *clipped, above)

    def reads(self) -> tuple[Gate, Gate]:
        """Return the gates on the two bounded values."""
        above = "items above the clip limit in % (upper end)"
        return (
            published_gate(CLIPPED_KL.name, self.max_kl, label="KL clipped per item (upper end)"),
            published_gate(ABOVE_CLIP.name, self.max_outliers_pct, label=above),
        )


def standard_gates(
    *,
    max_kl: float = 0.05,
    max_kl_outliers_pct: float = 1.0,
    max_flips_pct: float = 5.0,
    max_accuracy_drop_pct: float = 2.0,
) -> list[Gate | DivergenceGate]:
    """Return the gates of a promotion, each on the upper end of a 95 % interval.

    The KL is in nats, clipped at 1 nat per item; `max_kl_outliers_pct` bounds the share of items above.
    """
    return [
        DivergenceGate(max_kl=max_kl, max_outliers_pct=max_kl_outliers_pct),
        published_gate(FLIPS, max_flips_pct),
        published_gate(DELTA, max_accuracy_drop_pct),
    ]


def gate_values(pooled: Mapping[str, MetricResult]) -> dict[str, float]:
    """Return the unrounded values that gates read, by the names that metrics declare for them (`MetricKey.gate`).

    A value is left out if its interval is missing, as that of a mean KL is where an item is above the clip.
    """
    values: dict[str, float] = {}
    for name, declared in all_keys().items():
        if declared.gate is not None and name in pooled:
            value = declared.gate.read(pooled[name], pooled)
            if value is not None:
                values[declared.gate.name] = value
    return values
