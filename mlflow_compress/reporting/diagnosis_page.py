"""The page of a diagnosis: what moves most, the map of layers, the controls, and the text on which it moves."""

from collections.abc import Mapping, Sequence
from typing import Any

from mlflow_compress.metrics.diagnosis import GroupMove, GroupsFound, ShownText
from mlflow_compress.records import MetricResult
from mlflow_compress.reporting.html import Figure, embedded, settings_table
from mlflow_compress.reporting.numbers import NATS, PLAIN_SCALE, Scale, interval_text
from mlflow_compress.reporting.tables import TEMPLATES, Column, Table, Words


def _sortable(result: MetricResult | None) -> str | None:
    """Return a KL of a column: with three digits, whatever its interval, so that the order can be seen."""
    if result is None:
        return None
    bounds = "" if result.low is None or result.high is None else f" [{result.low:.2g}, {result.high:.2g}]"
    return f"{result.value:#.3g}{bounds}"


def _text(result: MetricResult | None, scale: Scale) -> str | None:
    return None if result is None else interval_text(result, scale, difference=False)


def group_row(group: GroupMove) -> dict[str, Any]:
    """Return a group's numbers as plain values, for tables and files."""
    return {
        "group": group.name,
        "kind": group.kind,
        "layer": group.layer,
        **_bounds("kl", group.kl),
        "share_of_sum": group.share,
        "top_changed": group.top_changed,
        **_bounds("kl_noise", group.noise_kl),
        **_bounds("against_noise", group.against_noise),
        "no_noise_because": group.no_noise,
        "tokens": group.kl.n,
    }


def _bounds(name: str, result: MetricResult | None) -> Mapping[str, float | None]:
    values = (None, None, None) if result is None else (result.value, result.low, result.high)
    return dict(zip((name, f"{name}_low", f"{name}_high"), values, strict=True))


def groups_table(results: GroupsFound) -> Table:
    """Return every group of weights, the one that moves most first."""
    heads = (Column("share of the sum"), Column("top token changed"), Column("KL of noise"))
    return Table(
        columns=[
            Column("group", left=True, key="group"),
            Column("KL", left=True, key="kl"),
            *heads,
            Column("times its noise", key="against_noise"),
        ],
        rows=[
            (
                group.name,
                _sortable(group.kl),
                None if group.share is None else f"{100 * group.share:.1f} %",
                f"{100 * group.top_changed:.2f} %",
                _sortable(group.noise_kl),
                _text(group.against_noise, PLAIN_SCALE),
            )
            for group in sorted(results.groups, key=lambda group: -group.kl.value)
        ],
    )


def diagnosis_sentence(name: str, results: GroupsFound) -> str:
    """Return what moves most, and how the parts add up."""
    largest = results.largest
    text = f"{name}: KL {_text(results.whole, NATS)} nats per token. "
    text += f"{largest.name} moves most, {_text(largest.kl, NATS)}"
    if largest.share is not None:
        text += f", {100 * largest.share:.0f} % of the sum of its {len(results.groups)} groups"
    if results.additivity is not None:
        text += f". All groups together move {_text(results.additivity, PLAIN_SCALE)} times the sum of single groups"
    return f"{text}."


def control_rows(results: GroupsFound) -> list[tuple[str, str]]:
    """Return the controls of a diagnosis as pairs of a name and a value."""
    rows = [
        ("without any swap", "exactly 0" if results.no_swap == 0 else f"{results.no_swap:.3g}"),
        ("whole variant (nats)", str(_text(results.whole, NATS))),
        ("all groups swapped together (nats)", str(_text(results.together, NATS))),
        ("sum of the groups (nats)", f"{results.sum_of_parts:.4g}"),
        ("together / sum: additivity", _text(results.additivity, PLAIN_SCALE) or "not defined: the sum is 0"),
        ("groups / noise of the same size", _text(results.noise_ratio, PLAIN_SCALE) or "not measured"),
    ]
    missing = [group for group in results.groups if group.no_noise is not None]
    if missing:
        rows.append(("groups without a noise control", f"{len(missing)}: {missing[0].no_noise}"))
    return rows


def render_diagnosis(
    *,
    title: str,
    sentence: str,
    results: GroupsFound,
    figures: Sequence[Figure],
    categories: Sequence[MetricResult],
    texts: Sequence[ShownText],
    setup: Mapping[str, Any],
    advice: str,
) -> str:
    """Return a diagnosis as one HTML page, with embedded images and without scripts or external files."""
    return TEMPLATES.get_template("diagnosis.html.j2").render(
        title=title,
        sentence=sentence,
        advice=advice,
        groups=groups_table(results),
        controls=Table.of_pairs(control_rows(results)),
        figures=[embedded(figure) for figure in figures],
        categories=Table(
            columns=[Column("task", left=True), Column("category", left=True), Column("items"), Column("KL")],
            rows=[(r.task, r.category, r.n, _sortable(r)) for r in categories],
        ),
        texts=_texts_table(texts),
        setup=settings_table(setup),
    )


def _texts_table(texts: Sequence[ShownText]) -> Table:
    heads = ("KL", "changed", "at")
    return Table(
        columns=[
            Column("text", left=True),
            *map(Column, heads),
            Column("after", long=True),
            *(Column(head, long=True) for head in ("text has", "baseline", "variant")),
        ],
        rows=[
            (
                f"{text.moved.task}, text {text.moved.item_id}",
                f"{text.moved.kl:.3g}",
                f"{text.moved.changed} of {text.moved.n}",
                text.moved.first_change,
                text.begins if text.context is None else text.context,
                *map(_token, (text.actual, text.baseline, text.variant)),
            )
            for text in texts
        ],
    )


def _token(text: str | None) -> Words | None:
    """Return a token with its spaces and line ends visible."""
    return None if text is None else Words(text.replace(" ", "␣").replace("\n", "⏎"), style="code")
