"""The report page's tables: headline, changed answers, tasks and categories, every pooled value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from mlflow_compress.metrics.core.metric_registry import all_keys
from mlflow_compress.records import MetricResult
from mlflow_compress.report.numbers import NATS, PERCENT, PLAIN, SHARE, interval_text, scale_of, value_text
from mlflow_compress.report.rows import HeadlineRow, Pooled, Sizes, headline_rows, interval_percent

FLIPS_SHOWN = 50
_LONG = 280  # characters of a question that are shown unfolded
_KINDS = {
    "c2w": '<span class="worse nobreak">right → wrong</span>',
    "w2c": '<span class="better nobreak">wrong → right</span>',
    "w2w": '<span class="same">wrong → other wrong</span>',
}


def _or_dash(text: str | None) -> str:
    return '<span class="same">-</span>' if text is None else escape(text)


def table(header: Sequence[str], rows: Sequence[str], *, kind: str = "", numeric: int = 0) -> str:
    """Return a table that scrolls sideways where narrow; the `numeric` columns after the first align right."""
    cells = "".join(
        f'<th scope="col"{" class=n" if 1 <= i <= numeric else ""}>{escape(name)}</th>' for i, name in enumerate(header)
    )
    opening = f'<table class="{kind}">' if kind else "<table>"
    return f'<div class="scroll">{opening}<thead><tr>{cells}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _distinguishable(text: str | None) -> str:
    if text is None:
        return _or_dash(None)
    kind = "worse" if text.endswith("worse") else "better" if text.endswith("better") else ""
    kind = "same" if text.startswith("no") else kind
    return f'<span class="{kind}">{escape(text)}</span>' if kind else escape(text)


def _headline_row(row: HeadlineRow) -> str:
    """Return a row whose cells carry their column's name, which narrow screens show in front of them."""
    cells = [
        ("count", "n", escape(row.n or "")),
        ("n", "Baseline", _or_dash(row.baseline)),
        ("n", "Variant", _or_dash(row.variant)),
        ("d", "Difference", _or_dash(row.difference)),
        ("d", "Noise floor", _or_dash(row.noise)),
        ("", "Distinguishable", _distinguishable(row.distinguishable)),
    ]
    shown = "".join(
        f'<td class="{kind}{" empty" if text in ("", _or_dash(None)) else ""}" data-column="{column}">{text}</td>'
        for kind, column, text in cells
    )
    return f'<tr><th scope="row">{escape(row.label)}<small>{escape(row.meaning)}</small></th>{shown}</tr>'


def headline_section(
    pooled: Pooled, manifest: Sizes | None, gates: Mapping[str, float] | None, notes: Sequence[str]
) -> str:
    """Return the headline table and its notes; distances compare both models and are among the differences."""
    rows = headline_rows(pooled, manifest, gates)
    if not rows:
        return '<h2>Numbers</h2><p class="note">No metric was computed.</p>'
    header = (
        "Metric",
        "n",
        "Baseline",
        "Variant",
        f"Difference [{interval_percent(pooled)} interval]",
        "Noise floor",
        "Distinguishable",
    )
    note = (
        '<p class="note">Distances (flips, KL, same top token, similarity) compare both models and stand in the column '
        "of differences. The noise floor is the same distance of the baseline from itself in a second run. n counts "
        "what a number is from: items, where no other word stands.</p>"
    )
    below = "".join(f'<p class="note">{escape(text)}</p>' for text in notes)
    shown = table(header, [_headline_row(r) for r in rows], kind="headline", numeric=3)
    return "<h2>Numbers</h2>" + note + shown + below


def _question(text: str) -> str:
    if len(text) <= _LONG:
        return escape(text)
    return f"<details><summary>{escape(text[:_LONG])}…</summary>{escape(text)}</details>"


def _flip(row: Mapping[str, Any]) -> str:
    where = " · ".join(str(row[name]) for name in ("task", "category", "item_id") if row[name] is not None)
    gold, baseline, variant = (_or_dash(row[name]) for name in ("gold", "baseline", "variant"))
    kind = _KINDS[row["kind"]]
    return (
        f'<tr><td class="long">{_question(str(row["question"]))}<small>{escape(where)}</small></td><td>{gold}</td>'
        f"<td>{baseline}</td><td>{variant}</td><td>{kind}</td></tr>"
    )


def flips_section(flips: Sequence[Mapping[str, Any]], *, compared: bool) -> str:
    """Return the first changed answers as a table; without any, say so where answers were compared."""
    if not flips:
        return '<h2>Changed answers</h2><p class="note">No answer changed.</p>' if compared else ""
    more = f" The first {FLIPS_SHOWN} are shown, {len(flips) - FLIPS_SHOWN:,} more are in flips.json."
    what = "1 answer" if len(flips) == 1 else f"{len(flips):,} answers"
    note = (
        f'<p class="note">{what} changed, most confident baseline first.{more if len(flips) > FLIPS_SHOWN else ""}</p>'
    )
    header = ("Question", "Right answer", "Baseline's answer", "Variant's answer", "Change")
    return "<h2>Changed answers</h2>" + note + table(header, [_flip(row) for row in flips[:FLIPS_SHOWN]], kind="wide")


_PART_COLUMNS = (
    ("quality/accuracy_baseline", "Baseline", SHARE),
    ("quality/accuracy", "Variant", SHARE),
    ("quality/accuracy_delta", "Difference", SHARE),
    ("distance/flips_pct", "Flipped", PERCENT),
    ("distance/all_flips_pct", "Changed at all", PERCENT),
    ("distance/kl_mean", "KL, nats", NATS),
)


def parts_section(results: Sequence[MetricResult]) -> str:
    """Return one line a task, followed by its categories; only columns that some line fills."""
    parts: dict[tuple[str, str | None], dict[str, MetricResult]] = {}
    wanted = {name for name, _, _ in _PART_COLUMNS}
    for result in results:
        if result.task is not None and result.name in wanted:
            parts.setdefault((result.task, result.category), {})[result.name] = result
    if not parts:
        return ""
    columns = [c for c in _PART_COLUMNS if any(c[0] in found for found in parts.values())]
    rows = []
    for (task, category), found in sorted(parts.items(), key=lambda p: (p[0][0], p[0][1] or "")):
        most = max(found.values(), key=lambda r: r.n)
        unscored = f" ({most.n_unscored:,} unscored)" if most.n_unscored else ""
        cells = [f'<td class="n">{most.n:,}{unscored}</td>']
        for name, _, scale in columns:
            part, text = found.get(name), None
            if part is not None:
                difference = name.endswith("_delta")
                alone = name.startswith("quality/") and not difference
                text = value_text(part, scale) if alone else interval_text(part, scale, difference=difference)
            cells.append(f'<td class="n">{_or_dash(text)}</td>')
        kind = "" if category is not None else ' class="whole"'
        name = task if category is None else category
        rows.append(f'<tr{kind}><th scope="row">{escape(name)}</th>{"".join(cells)}</tr>')
    header = ("Task and category", "Items", *(label for _, label, _ in columns))
    return "<h2>By task and category</h2>" + table(header, rows, kind="wide parts", numeric=len(header) - 1)


def all_values(pooled: Pooled) -> str:
    """Return every pooled value with its interval and meaning, folded."""
    if not pooled:
        return ""
    keys = all_keys()
    rows = []
    for name, result in sorted(pooled.items()):
        declared = keys.get(name)
        scale = scale_of(declared.unit) if declared else PLAIN
        meaning = declared.meaning if declared else ""
        text = interval_text(result, scale, difference=name.endswith(("_delta", "_delta_pct")))
        rows.append(
            f'<tr><th scope="row"><code>{escape(name)}</code><small>{escape(meaning)}</small></th>'
            f'<td class="d">{escape(text)}</td><td class="n">{result.n:,}</td>'
            f'<td class="n">{result.n_unscored:,}</td></tr>'
        )
    header = ("Key", f"Value [{interval_percent(pooled)} interval]", "Items or tokens", "Unscored")
    inner = table(header, rows, kind="wide")
    return f"<h2>Every pooled value</h2><details><summary>{len(pooled)} values</summary>{inner}</details>"
