"""A search as tables: for a terminal, as Markdown and as CSV. Rows are those of `results.Search.to_rows`."""

from collections.abc import Mapping, Sequence
from typing import Any

from mlflow_compress.records import MetricResult
from mlflow_compress.reporting.numbers import NATS, bytes_text, interval_text, value_text
from mlflow_compress.reporting.tables import Column, Table, csv_text, escape_markdown

_Row = Mapping[str, Any]

_MISS = 0.25


def search_finding(rows: Sequence[_Row]) -> str:
    """Return what was found, in one sentence."""
    searched = [row for row in rows if row["kind"] == "searched"]
    mixed = [row for row in searched if row["against_mix"] is not None]
    n = len(searched)
    said = [f"{n} {'variant' if n == 1 else 'variants'} of mixed precision"]
    if mixed:
        closer, farther = (sum(row["against_mix"] == kind for row in mixed) for kind in ("closer", "farther"))
        said.append(
            f"{closer} of {len(mixed)} closer to the baseline than the linear mix of uniform variants of the same size"
        )
        said += [f"{farther} farther"] if farther else []
    errors = [abs(row["prediction_error"]) for row in searched if row["prediction_error"] is not None]
    if errors:
        said.append(f"predicted KL at most {100 * max(errors):.0f} % off")
    return "; ".join(said)


def search_notes(rows: Sequence[_Row], *, search_text: str, held_out: str) -> list[str]:
    """Return how to read the table, and what a reader must know before a decision."""
    notes = [
        f"KL: mean over {held_out}, which the search has not seen",
        f"Predicted and measured: KL on the search's text, {search_text}",
        "Linear mix: the KL of the uniform variants next to this size, interpolated linearly; the difference is paired",
    ]
    for row in (row for row in rows if row["kind"] == "searched"):
        error = row["prediction_error"]
        if error is not None and abs(error) > _MISS:
            off = f"{100 * error:+.0f} % off: costs of one group at a time need not add up"
            notes.append(f"{row['name']}: the prediction is {off}")
        high = row["search_kl_high"]
        if row["max_kl"] is not None and (high is None or high > row["max_kl"]):
            notes.append(f"{row['name']}: its KL is not surely within the limit; no choice was found that is")
        if row["gap"]:
            notes.append(f"{row['name']}: the solver's bound is {100 * row['gap']:.2g} % below its solution")
    return notes


def search_table(rows: Sequence[_Row]) -> Table:
    """Return every variant with the linear mix of its size."""
    cache = [Column("cache")] if any(row["cache_bytes"] is not None for row in rows) else []
    heads = ("KL [95 %]", "linear mix", "difference [95 %]", "predicted", "measured")
    return Table(
        columns=[
            Column("variant", left=True),
            *map(Column, ("limit", "bits/weight", "size")),
            *cache,
            *map(Column, heads),
        ],
        rows=[
            (
                row["name"],
                row["limit"] or None,
                f"{row['bits_per_weight']:.3f}",
                bytes_text(row["size_bytes"]),
                *(bytes_text(row["cache_bytes"] or 0) for _ in cache),
                _kl(row, "kl", difference=False),
                _nats(row["mix_kl"]),
                _kl(row, "difference"),
                _nats(row["predicted_kl"]),
                _nats(row["search_kl"]),
            )
            for row in rows
        ],
    )


def search_markdown(rows: Sequence[_Row], finding: str, notes: Sequence[str]) -> str:
    """Return the finding, the table and its notes, as Markdown."""
    listed = (f"- {escape_markdown(note)}." for note in notes)
    return "\n".join([f"**{escape_markdown(finding)}.**", "", search_table(rows).markdown(), "", *listed, ""])


def rows_csv(rows: Sequence[_Row]) -> str:
    """Return every value of rows with the same names as CSV: of variants, or of the costs of groups."""
    return csv_text(rows[0], (row.values() for row in rows))


def _kl(row: _Row, name: str, *, difference: bool = True) -> str | None:
    if row[name] is None:
        return None
    result = MetricResult("kl", *(row[f"{name}{end}"] for end in ("", "_low", "_high")))
    return interval_text(result, NATS, difference=difference)


def _nats(value: float | None) -> str | None:
    return None if value is None else value_text(MetricResult("kl", value, None, None), NATS)
