"""The report: one self-contained HTML page with verdict, numbers, figures, changed answers and set-up."""

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlflow_compress.metrics.chains import CHAIN_KL
from mlflow_compress.metrics.core.account import Account
from mlflow_compress.metrics.core.metric_inputs import headline
from mlflow_compress.metrics.core.metric_registry import Pooled, all_keys, headline_keys
from mlflow_compress.records import MetricResult
from mlflow_compress.reporting.answers_page import REPORT_SHOWS, ComparedAnswer, account_rows, answer_cards
from mlflow_compress.reporting.headline import (
    failures,
    footnotes,
    for_users,
    headline_rows_table,
    interval_percent,
)
from mlflow_compress.reporting.numbers import scale_of, value_text
from mlflow_compress.reporting.tables import TEMPLATES, Cell, Column, Table, Words, cell_text, result_text
from mlflow_compress.reporting.thoughts import PartedThought
from mlflow_compress.reporting.verdict import slice_findings

if TYPE_CHECKING:
    from mlflow_compress.compression.checkpoint_manifest import CheckpointManifest

_FLIPS_SHOWN = 50
_CHANGES = {
    "c2w": Words("right → wrong", style="worse"),
    "w2c": Words("wrong → right", style="better"),
    "w2w": Words("wrong → other wrong", style="same"),
}


def changes_table(flips: Sequence[Mapping[str, Any]]) -> Table:
    """Return changed answers, each with where its item is from under the question."""
    places = ("model", "task", "category", "item_id")
    heads = ("question", "right answer", "baseline's answer", "variant's answer")
    return Table(
        columns=[*(Column(head, long=True) for head in heads), Column("change", left=True)],
        rows=[
            (
                Words(str(flip["question"]), [str(flip[name]) for name in places if flip.get(name) is not None]),
                *(flip[name] for name in ("gold", "baseline", "variant")),
                _CHANGES[flip["kind"]],
            )
            for flip in flips
        ],
    )


def _parts_table(results: Sequence[MetricResult]) -> Table:
    """Return one row per task, each followed by its categories. A column without any value is left out.

    Each model's value has no interval, because that of the difference is more useful.
    """
    keys = all_keys()
    labels: dict[str, str] = {}
    for key in headline_keys():
        if key.by_task and key.counted == "items":
            labels |= {f"{key.name}_baseline": f"{key.label}, baseline", key.name: key.label}
            labels |= {key.difference: keys[key.difference].label} if key.difference else {}
    parts: dict[tuple[str, str], dict[str, MetricResult]] = {}
    for result in results:
        if result.task is not None and result.name in labels:
            parts.setdefault((result.task, result.category or ""), {})[result.name] = result
    names = [name for name in labels if any(name in values for values in parts.values())]
    rows: list[list[Cell]] = []
    for (task, category), values in sorted(parts.items()):
        most = max(values.values(), key=lambda result: result.n)
        unscored = f" ({most.n_unscored:,} unscored)" if most.n_unscored else ""
        rows.append([category or task, f"{most.n:,}{unscored}"])
        for name in names:
            each = f"{name.removesuffix('_baseline')}_baseline" in keys and name in values
            rows[-1].append(value_text(values[name], scale_of(keys[name].unit)) if each else values.get(name))
    return Table(
        columns=[Column("task and category", left=True), Column("items"), *(Column(labels[name]) for name in names)],
        rows=rows,
        strong=frozenset(i for i, (_, category) in enumerate(sorted(parts)) if not category),
    )


def thoughts_table(results: Sequence[MetricResult]) -> Table:
    """Return the KL by place in the baseline's own thoughts; without rows where none was scored."""
    interval = f"KL in nats [{interval_percent(headline(results))} interval]"
    return Table(
        columns=[Column("place", left=True), Column("tokens"), Column(interval)],
        rows=[(r.category, r.n, r) for r in results if r.name == CHAIN_KL.name and r.category is not None],
    )


_SLICES_SHOWN = 20


def _slices_table(results: Sequence[MetricResult]) -> Table:
    """Return the distances in slices that differ most from the others, smallest corrected p-value first."""
    heads = ("slice", "measured")
    numbers = (f"value [{interval_percent(headline(results))} interval]", "others", "corrected p")
    return Table(
        columns=[*(Column(head, left=True) for head in heads), Column("n"), *map(Column, numbers)],
        rows=[
            (one.name, one.measured.rstrip(","), one.result.n, one.result, one.others_text, f"{one.result.p:.2g}")
            for one in slice_findings(results)[:_SLICES_SHOWN]
        ],
    )


def value_table(pooled: Pooled) -> Table:
    """Return every pooled value, sorted by key."""
    keys = all_keys()
    interval = f"value [{interval_percent(pooled)} interval]"
    return Table(
        columns=[Column("key", left=True), Column(interval, left=True), Column("items or tokens"), Column("unscored")],
        rows=[
            (
                Words(name, [keys[name].meaning] if name in keys else (), style="code"),
                result_text(result),
                result.n,
                result.n_unscored,
            )
            for name, result in sorted(pooled.items())
        ],
    )


@dataclass(frozen=True)
class Figure:
    """A drawn figure: its PNG file, a title with the finding, and a caption that explains how to read it."""

    path: Path
    title: str
    caption: str


def embedded(figure: Figure) -> dict[str, str]:
    """Return a figure's title and caption, and its PNG file as base64."""
    image = base64.b64encode(figure.path.read_bytes()).decode("ascii")
    return {"base64": image, "title": figure.title, "caption": figure.caption}


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value))
    if value is None:
        return "none"
    return cell_text(value) if isinstance(value, bool | float) else str(value)


def settings_table(settings: Mapping[str, Any]) -> Table:
    """Return nested settings by name ("outer: inner")."""
    return Table.of_pairs(_pairs(settings))


def _pairs(pairs: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for name, value in pairs.items():
        words = f"{prefix}{str(name).replace('_', ' ')}"
        if isinstance(value, Mapping):
            if value:
                yield from _pairs(value, f"{words}: ")
            else:
                yield words, "none"
        else:
            yield words, _shown(value)


def render_report(
    *,
    title: str,
    verdict: str,
    results: Sequence[MetricResult],
    figures: Sequence[Figure] = (),
    flips: Sequence[Mapping[str, Any]] = (),
    setup: Mapping[str, Any] | None = None,
    not_computed: Mapping[str, str] | None = None,
    manifest: "CheckpointManifest | None" = None,
    account: Account | None = None,
    failed_stages: Mapping[str, str] | None = None,
    judge_values: Mapping[str, float] | None = None,
    answers: Sequence[ComparedAnswer] = (),
    thoughts: Sequence[PartedThought] = (),
) -> str:
    """Return the report as one HTML page, with embedded images and without scripts or external files.

    Of `flips` (`details.flips_table`) and of `answers` the first are shown and the others are counted.
    """
    pooled = headline(results)
    return TEMPLATES.get_template("report.html.j2").render(
        title=title,
        verdict=verdict,
        users=for_users(pooled),
        account="" if account is None else account.sentence,
        failures=failures(failed_stages),
        headline=headline_rows_table(pooled, manifest),
        notes=footnotes(pooled),
        figures=[embedded(figure) for figure in figures],
        flips=changes_table(flips[:_FLIPS_SHOWN]),
        n_flips=len(flips),
        answers_compared="distance/flips_pct" in pooled,
        parts=_parts_table(results),
        thoughts=thoughts_table(results),
        parted_thoughts=thoughts,
        slices=_slices_table(results),
        n_slices=len(slice_findings(results)),
        setup=settings_table(setup or {}),
        not_computed=Table.of_pairs((not_computed or {}).items()),
        values=value_table(pooled),
        judge_account=Table.of_pairs(account_rows(judge_values or {})),
        answer_cards=answer_cards(answers[:REPORT_SHOWS]),
        n_answers=len(answers),
    )
