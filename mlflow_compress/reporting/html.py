"""The report: one self-contained HTML page with verdict, numbers, figures, changed answers and set-up."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlflow_compress.metrics.core.metric_inputs import headline
from mlflow_compress.records import MetricResult
from mlflow_compress.reporting.answers_page import REPORT_SHOWS, ComparedAnswer, account_rows, answer_cards
from mlflow_compress.reporting.headline_text import failures, footnotes
from mlflow_compress.reporting.page_tables import flip_rows, parts_table, value_rows
from mlflow_compress.reporting.rows import Sizes, headline_rows, interval_percent
from mlflow_compress.reporting.templates import TEMPLATES

if TYPE_CHECKING:  # avoids the import of matplotlib
    from mlflow_compress.reporting.figures import Figure


def embedded(figure: Figure) -> dict[str, str]:
    """Return a figure's title and caption, and its PNG file as base64."""
    image = base64.b64encode(figure.path.read_bytes()).decode("ascii")
    return {"base64": image, "title": figure.title, "caption": figure.caption}


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value))
    return str(value)


def setting_pairs(pairs: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return nested settings as pairs of name ("outer: inner") and value, as text."""
    return list(_pairs(pairs))


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
    manifest: Sizes | None = None,
    gates: Mapping[str, float] | None = None,
    n_truncated: int = 0,
    failed_stages: Mapping[str, str] | None = None,
    judge_values: Mapping[str, float] | None = None,
    answers: Sequence[ComparedAnswer] = (),
) -> str:
    """Return the report as one HTML page, with embedded images and without scripts or external files.

    Parameters
    ----------
    title : str
        Title of the page, such as "awq-4bit-g128 against demo".
    verdict : str
        `reporting.verdict.verdict(...)`, which is shown first.
    results : sequence of MetricResult
        `compute_all(inputs)`: pooled, per task and per category. Those named `noise/...` are the noise floor.
    figures : sequence of Figure
        `reporting.figures.draw_all(...)`. Their files are embedded.
    flips : sequence of mapping
        `record_tables.flips_table(inputs)`. The first 50 are shown, the others are counted.
    setup : mapping, optional
        Names and values, possibly nested: method, settings, hashes, calibration, versions, run ids.
    not_computed : mapping of str to str, optional
        Reason by name of the metric that was not computed.
    manifest : Sizes, optional
        The checkpoint's manifest, for the rows about size.
    gates : mapping of str to float, optional
        Values that promotion gates read, by key ("gate/kl_upper").
    n_truncated : int
        Prompts that were too long for the model and lost their beginning.
    failed_stages : mapping of str to str, optional
        Error message by name of the failed stage; shown under the verdict.
    judge_values : mapping of str to float, optional
        Metrics of the judge's run: judgments, those without a rating, calls, tokens, cost.
    answers : sequence of ComparedAnswer, optional
        Answers to the same instructions, largest drop first. The first ten are shown, the others are counted.

    Raises
    ------
    OSError
        A figure's file cannot be read.
    """
    pooled = headline(list(results))
    return TEMPLATES.get_template("report.html.j2").render(
        title=title,
        verdict=verdict,
        failures=failures(failed_stages),
        headline=headline_rows(pooled, manifest, gates),
        interval=interval_percent(pooled),
        notes=footnotes(pooled, gates=gates, n_truncated=n_truncated),
        figures=[embedded(figure) for figure in figures],
        flips=flip_rows(flips),
        n_flips=len(flips),
        answers_compared="distance/flips_pct" in pooled,
        parts=parts_table(results),
        setup=setting_pairs(setup or {}),
        not_computed=list((not_computed or {}).items()),
        values=value_rows(pooled),
        account=account_rows(judge_values or {}),
        answer_cards=answer_cards(answers[:REPORT_SHOWS]),
        n_answers=len(answers),
    )
