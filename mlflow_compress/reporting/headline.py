"""The headline table of one variant and the sentences under it, for the report, the terminal and the run's note."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlflow_compress.decide.gates import FLIPS, KL
from mlflow_compress.metrics import kl_tail
from mlflow_compress.metrics.core.account import Account
from mlflow_compress.metrics.core.metric_registry import (
    METRICS,
    MetricKey,
    Pooled,
    all_keys,
    headline_keys,
    key,
    leaderboard_keys,
    plugin_keys,
)
from mlflow_compress.metrics.noise import SIGNIFICANT, distinguishable
from mlflow_compress.metrics.stats.significance import OneEnd, holm
from mlflow_compress.metrics.win_rate import is_biased
from mlflow_compress.records import MetricResult
from mlflow_compress.reporting import numbers
from mlflow_compress.reporting.tables import Column, Table, Words, escape_markdown, result_text

if TYPE_CHECKING:
    from mlflow_compress.compression.checkpoint_manifest import CheckpointManifest


def _no(why: str = "") -> Words:
    return Words(f"no: {why}" if why else "no", style="same")


def _separates(result: MetricResult, unchanged: float) -> Words | None:
    """Return whether the interval of a difference excludes `unchanged`, that is, "no change"; None without interval."""
    if result.value == unchanged and (result.low is None or result.low == result.high):
        return _no("exactly the same")
    if result.low is None or result.high is None:
        return None
    if result.low <= unchanged <= result.high:
        return _no()
    direction = key(result.name).direction
    if direction == "neither":
        return Words("yes")
    side = "better" if (result.value > unchanged) == (direction == "higher") else "worse"
    return Words(f"yes, {side}", style=side)


def _above_floor(result: MetricResult, floor: MetricResult | None, unchanged: float) -> Words | None:
    """Return whether a distance exceeds its noise floor, by the floor's paired test, or else by the intervals.

    None without either: from a value alone nobody knows.
    """
    if result.value == unchanged:
        # None in n items does not mean that none exists; a divergence of 0 is that of the same numbers.
        counted = result.low is not None and result.low != result.high and key(result.name).unit != "nats"
        return _no(f"none in {result.n:,}" if counted else "exactly the same")
    if floor is not None and floor.p is not None:
        return Words("yes") if floor.p < SIGNIFICANT else _no("within the noise floor")
    grows = unchanged == 0.0
    near = result.low if grows else result.high
    if near is None:
        return None
    end = None if floor is None else floor.high if grows else floor.low
    edge = unchanged if floor is None else floor.value if end is None else end
    if (near > edge) == grows and near != edge:
        return Words("yes" if floor is not None else "yes, no noise floor measured")
    return _no("overlaps the noise floor" if floor is not None else "")


@dataclass(frozen=True, kw_only=True)
class _HeadlineRow:
    """One row of the headline table, as text. A cell that does not apply is None."""

    label: str  # Name of the metric, and its meaning in one sentence
    meaning: str
    n: str | None = None  # Number of items (tokens, answers), and number of unscored ones
    baseline: str | None = None  # Values of both models, and the difference or distance with its interval
    variant: str | None = None
    difference: str | None = None
    noise: str | None = None  # The noise floor: the same distance between the baseline and a second run of it
    distinguishable: Words | None = None  # "yes" or "no", with a reason if needed


def only_generated(pooled: Pooled) -> bool:
    """Return whether all answers were generated. Such items have flips, but no options and so no KL."""
    items = pooled.get(kl_tail.KL_ITEMS.name)
    return items is not None and items.value == 0


def _count(result: MetricResult, counted: str) -> str:
    """Return the number of items or other units of a result, as in "1,836 (2 unscored)"; "items" is not written."""
    text = f"{result.n:,}" if counted == "items" else f"{result.n:,} {counted}"
    return f"{text} ({result.n_unscored:,} unscored)" if result.n_unscored else text


def _row(declared: MetricKey, pooled: Pooled) -> _HeadlineRow | None:
    """Return the row of a metric: a distance, or both models' values with their difference; None if not computed."""
    baseline_name = f"{declared.name}_baseline"
    each = baseline_name in all_keys()  # whether each model has a value
    baseline, variant = (pooled.get(baseline_name), pooled.get(declared.name)) if each else (None, None)
    change = pooled.get((declared.difference or "") if each else declared.name)
    counted = change or variant or baseline
    if counted is None:
        return None
    scale, floor = numbers.scale_of(declared.unit), pooled.get(declared.floor or "")
    difference = distinguishable = None
    if change is not None:
        unchanged = key(change.name).unchanged
        ratio = each and unchanged == 1.0
        shown = numbers.Scale(decimals=3) if ratio else scale
        difference = ("x" if ratio else "") + numbers.interval_text(change, shown, difference=each and not ratio)
        either_way = each or declared.low < unchanged < declared.high  # such as a win rate
        distinguishable = _separates(change, unchanged) if either_way else _above_floor(change, floor, unchanged)
    elif variant is not None and not declared.difference:  # the interval has no other place
        difference = f"variant {numbers.interval_text(variant, scale, difference=False)}"
    return _HeadlineRow(
        label=declared.label,
        meaning=declared.meaning,
        n=_count(counted, declared.counted),
        baseline=None if baseline is None else numbers.value_text(baseline, scale),
        variant=None if variant is None else numbers.value_text(variant, scale),
        difference=difference,
        noise=None if floor is None else numbers.interval_text(floor, scale, difference=each),
        distinguishable=distinguishable,
    )


def _kl_rows(pooled: Pooled) -> list[_HeadlineRow]:
    """Return the rows under the KL of the items: the share of its largest items, and the values that the gate reads."""
    if only_generated(pooled):
        meaning = "KL compares the probabilities of given options."
        return [
            _HeadlineRow(label="KL, items (nats)", meaning=meaning, difference="not measured: answers are generated")
        ]
    rows = []
    item, percent = pooled.get(kl_tail.TOP_ITEM.name), pooled.get(kl_tail.TOP_PERCENT.name)
    if item is not None and percent is not None:
        held = f"{result_text(item)} / {result_text(percent)} of the mean"
        meaning = "How much of the mean KL the item with the largest KL holds, and the largest percent of the items."
        rows.append(
            _HeadlineRow(label="KL in largest item / 1 %", meaning=meaning, n=_count(item, "items"), difference=held)
        )
    return rows + [
        _HeadlineRow(label=k.label, meaning=k.meaning, n=_count(result, k.counted), difference=result_text(result))
        for k in (kl_tail.CLIPPED_KL, kl_tail.ABOVE_CLIP)
        if (result := pooled.get(k.name)) is not None
    ]


def _size_rows(sizes: "CheckpointManifest") -> list[_HeadlineRow]:
    size = _HeadlineRow(
        label="Size",
        meaning="Bytes of the stored tensors.",
        baseline=numbers.bytes_text(sizes.base_size_bytes),
        variant=numbers.bytes_text(sizes.size_bytes),
        difference=numbers.ratio_text(sizes.size_ratio),
    )
    zeros = _HeadlineRow(
        label="Zeros in linear weights",
        meaning="Share of the linear layers' weights that are exactly 0.",
        variant=f"{100 * (sizes.sparsity or 0.0):.0f} %",
        difference="saved dense: no smaller on disk",
    )
    bits = _HeadlineRow(
        label="Bits per weight",
        meaning="Stored bits per weight of the linear layers, scales and zero points included.",
        variant=f"{sizes.bits_per_weight:.2f}",
    )
    rows = [size, *([zeros] if numbers.saved_dense(sizes.size_ratio, sizes.sparsity) else []), bits]
    before, now = sizes.base_cache_bytes_per_token, sizes.cache_bytes_per_token
    if before is None or now is None or before == now:
        return rows
    cache = _HeadlineRow(
        label="Cache per token",
        meaning="Bytes of the keys and values of one token in all layers, scales included.",
        baseline=numbers.bytes_text(round(before)),
        variant=numbers.bytes_text(round(now)),
        difference=numbers.ratio_text(before / now),
    )
    return [*rows, cache]


def headline_rows(pooled: Pooled, sizes: "CheckpointManifest | None" = None) -> list[_HeadlineRow]:
    """Return the rows of the metrics that were computed, in the order that they declare (`MetricKey.headline`)."""
    return [row for row, _ in _rows(pooled, sizes)]


def _rows(pooled: Pooled, sizes: "CheckpointManifest | None") -> list[tuple[_HeadlineRow, bool]]:
    """Return the same, each with whether a terminal shows it where there are too many.

    It shows what MLflow's leaderboard has a column for, what plug-ins measure, and the sizes.
    """
    always = {declared.name for declared in (*leaderboard_keys(), *plugin_keys())}
    rows: list[tuple[_HeadlineRow, bool]] = []
    for headline in headline_keys():
        row = _row(headline, pooled)
        found = [*([] if row is None else [row]), *(_kl_rows(pooled) if headline.name == KL else [])]
        rows += [(one, not always.isdisjoint({headline.name, headline.difference})) for one in found]
    return rows + [(one, True) for one in ([] if sizes is None else _size_rows(sizes))]


def interval_percent(pooled: Pooled) -> str:
    """Return the level of the intervals, as in "95 %"."""
    levels = {result.level for result in pooled.values() if result.low is not None}
    return " / ".join(f"{100 * level:g} %" for level in sorted(levels)) or "95 %"


_OF_ENGINE = (("kl_mean", "KL"), ("flips_pct", "flips"), ("corpus_kl_mean", "KL on corpora"))
_OF_SERVER = (("flips_pct", "flips"), ("kl_top100", "KL at least"), ("kl_top20", "KL at least"))


def _sampled(pooled: Pooled, name: str, things: str) -> str | None:
    """Return on how much the noise floor and the distance were measured; None without a floor."""
    distance = pooled.get(name)
    floor = pooled.get(f"noise/{name.partition('/')[2]}")
    if distance is None or floor is None:
        return None
    if floor.n < distance.n:
        return f"{floor.n:,} {things} (the distances: {distance.n:,})"  # others, where the variant's were drawn
    return f"{floor.n:,} {things}"


def _noise(pooled: Pooled) -> list[str]:
    items = _sampled(pooled, KL, "items") or _sampled(pooled, FLIPS, "items")
    parts = [part for part in (items, _sampled(pooled, "distance/corpus_kl_mean", "corpus tokens")) if part]
    return [f"Noise floor (the baseline against itself in a second run) from {' and '.join(parts)}."] if parts else []


def _distances(pooled: Pooled, section: str, named: tuple[tuple[str, str], ...], sentence: str) -> list[str]:
    """Return a sentence about what an engine or a server adds to every distance; none where it was not measured."""
    parts = [
        f"{label} {result_text(result)}"
        for name, label in named
        if (result := pooled.get(f"{section}/{name}")) is not None
    ]
    return [f"{sentence}: {', '.join(parts)}."] if parts else []


def footnotes(pooled: Pooled, *, floors: bool = True) -> list[str]:
    """Return the sentences under the headline table; empty if there are none.

    - `floors`: Whether the table has the column of noise floors.
    """
    notes = []
    if kl_tail.shows_clipped(pooled):
        notes.append(
            "The mean KL has no interval, as items are above the clip: gates read the clipped KL and their share."
        )
    unscored: dict[str, None] = {}
    for shown in headline_keys():
        result = pooled.get(shown.name)
        if result is not None and result.n_unscored and shown.unscored:
            why = "no answer was generated" if shown.counted == "items" and only_generated(pooled) else shown.unscored
            total = result.n + result.n_unscored
            unscored[f"{result.n_unscored:,} of {total:,} {shown.counted} unscored: {why}."] = None
    notes += unscored
    notes += [
        f"The judge is biased: in all {result.n:,} pairs it takes the {name.rpartition('_')[2]} answer, whichever it "
        "is. So its comparisons say nothing of the answers, and there is no win rate."
        for name, result in pooled.items()
        if is_biased(result)
    ]
    if floors:
        notes += _noise(pooled)
    sentence = "vLLM's own distance (transformers from vLLM, the baseline's checkpoint in both)"
    notes += _distances(pooled, "engine", _OF_ENGINE, sentence)
    return notes + _distances(pooled, "served", _OF_SERVER, "The server's own noise (the same prompts asked twice)")


def failures(failed_stages: Mapping[str, str] | None) -> list[str]:
    """Return one sentence per failed stage: its error message and the missing metrics."""
    told = []
    for stage, message in (failed_stages or {}).items():
        # What only this stage computes, and computes unasked
        keys = [key for key in all_keys().values() if key.name.startswith(f"{stage}/") and not key.on_request]
        missing = ", ".join(key.label for key in keys if key.label) or "what it measures"
        told.append(f"Stage {stage} failed: {message.rstrip('.')}. Missing: {missing}.")
    return told


_MOST_ROWS = 16  # of a terminal
_PART_LIMIT = 2000  # characters of a verdict or an error message, so that the table fits after them
_WIDTH = 100
_NUMBERS = ("n", "baseline", "variant")
_NARROW = ("metric", *_NUMBERS, "difference")  # the columns of a terminal and of a note


def headline_rows_table(pooled: Pooled, sizes: "CheckpointManifest | None" = None) -> Table:
    """Return the headline table with all its columns."""
    return _table(pooled, headline_rows(pooled, sizes))


def _table(pooled: Pooled, rows: Sequence[_HeadlineRow]) -> Table:
    difference = f"difference [{interval_percent(pooled)} interval]"
    heads = [Column("metric", left=True, key="metric"), *(Column(name, key=name) for name in _NUMBERS)]
    heads.append(Column(difference, left=True, key="difference"))
    return Table(
        columns=[*heads, Column("noise floor", left=True), Column("distinguishable", left=True)],
        rows=[
            (Words(r.label, [r.meaning]), r.n or "", r.baseline, r.variant, r.difference, r.noise, r.distinguishable)
            for r in rows
        ],
    )


def headline_table(
    pooled: Pooled,
    manifest: "CheckpointManifest | None" = None,
    *,
    failed_stages: Mapping[str, str] | None = None,
) -> str:
    """Return the headline table as aligned text, as many rows as a terminal has room for, failed stages and notes."""
    rows = _rows(pooled, manifest)
    shown = [row for row, always in rows if always or len(rows) <= _MOST_ROWS]
    lines = _table(pooled, shown).only(*_NARROW).lines(widest=_WIDTH)
    left_out = len(rows) - len(shown)
    more = [f"{left_out} more rows are in the report and in the run's note."] if left_out else []
    notes = failures(failed_stages) + footnotes(pooled, floors=False) + more
    wrapped = [line for note in notes for line in textwrap.wrap(note, _WIDTH)]
    return "\n".join([*lines, *([lines[1], *wrapped] if wrapped else [])])


def noticed(pooled: Mapping[str, MetricResult]) -> list[tuple[MetricKey, MetricResult, bool]]:
    """Return what users of the model notice and has an interval, each with whether it surely changed (after Holm)."""
    there = [(declared, pooled[name]) for name, declared in all_keys().items() if declared.noticed and name in pooled]
    sure = [(declared, result) for declared, result in there if result.low is not None and result.high is not None]
    adjusted = holm([_p_value(*one) for one in sure]).tolist() if sure else []
    changed = []
    for (declared, result), p in zip(sure, adjusted, strict=True):
        floor = None if declared.is_difference else pooled.get(str(declared.floor))
        changed.append((declared, result, p < SIGNIFICANT and (floor is None or distinguishable(result, floor))))
    return changed


def for_users(pooled: Mapping[str, MetricResult]) -> str:
    """Return one sentence on what users of the model notice, first what surely changed; empty where it is unknown."""
    changes = noticed(pooled)
    if not changes:
        return ""
    changed, others = [], []
    for declared, result, sure in changes:
        if sure:
            text = numbers.interval_text(result, numbers.scale_of(declared.unit), difference=declared.is_difference)
            changed.append(f"{declared.noticed} {text}")
        else:
            others.append(declared.noticed)
    rest = f"no significant change in {', '.join(others)}" if others else ""
    return f"For users: {'; '.join(filter(None, [*changed, rest]))}."


def _p_value(declared: MetricKey, result: MetricResult) -> float:
    """Return the two-sided p-value of "nothing changed", by the ends of the interval."""
    if result.value == declared.unchanged:
        return 1.0
    ends = [
        OneEnd(value=result.value, end=end, low=declared.low, high=declared.high, upper=upper)
        for end, upper in ((result.low, False), (result.high, True))
        if end is not None
    ]
    return min(1.0, 2.0 * min(end.p_value(declared.unchanged) for end in ends))


def note_markdown(
    sentence: str,
    pooled: Pooled,
    manifest: "CheckpointManifest | None" = None,
    *,
    account: Account | None = None,
    failed_stages: Mapping[str, str] | None = None,
) -> str:
    """Return a run's note as Markdown of at most 8000 characters: sentences, failed stages, table, notes."""
    head = [escape_markdown(sentence)[:_PART_LIMIT], ""]
    if users := for_users(pooled):
        head += [escape_markdown(users)[:_PART_LIMIT], ""]
    if account is not None:
        head += [escape_markdown(account.sentence)[:_PART_LIMIT], ""]
    for failure in failures(failed_stages):
        head += [f"**{escape_markdown(failure)[:_PART_LIMIT]}**", ""]
    table = headline_rows_table(pooled, manifest).only(*_NARROW).markdown()
    return "\n".join([*head, table, *(f"\n{escape_markdown(note)}" for note in footnotes(pooled))])


def not_computed(
    results: Iterable[MetricResult],
    *,
    evaluated: Mapping[str, str],
    judged: Mapping[str, str] | str,
    timed: Mapping[str, str] | str,
) -> dict[str, str]:
    """Return the reason for each metric without a result, given by the stage that computes it."""
    of_stage: dict[str, Mapping[str, str] | str] = {"judge/": judged, "speed/": timed}
    computed = {result.name for result in results}
    reasons_by_name: dict[str, str] = {}
    for name, metric in METRICS.items():
        keys = {key.name for key in metric.keys}
        if computed & keys:
            continue
        reasons = next((r for prefix, r in of_stage.items() if all(k.startswith(prefix) for k in keys)), evaluated)
        reason = reasons if isinstance(reasons, str) else reasons.get(name)
        if reason is not None:
            reasons_by_name[name] = reason
    return reasons_by_name
