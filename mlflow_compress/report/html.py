"""One self-contained HTML page about a variant: verdict, numbers, figures, changed answers, set-up, gaps."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from mlflow_compress.metrics.core.compute import headline
from mlflow_compress.records import MetricResult
from mlflow_compress.report.footnotes import failures, footnotes
from mlflow_compress.report.page_style import CSS
from mlflow_compress.report.page_tables import all_values, flips_section, headline_section, parts_section
from mlflow_compress.report.rows import Sizes

if TYPE_CHECKING:  # the page needs a figure's path and words, not matplotlib
    from mlflow_compress.report.figures import Figure

# Whatever is in the records, the page loads nothing and runs nothing.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def _figure(figure: Figure) -> str:
    image = base64.b64encode(figure.path.read_bytes()).decode("ascii")
    return (
        f'<figure><img src="data:image/png;base64,{image}" alt="{escape(figure.title)}">'
        f"<figcaption>{escape(figure.caption)}</figcaption></figure>"
    )


def _figures(figures: Sequence[Figure]) -> str:
    return "<h2>Figures</h2>" + "".join(map(_figure, figures)) if figures else ""


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


def _pairs(pairs: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """Flatten nested settings into "outer: inner" lines."""
    for name, value in pairs.items():
        words = f"{prefix}{str(name).replace('_', ' ')}"
        if isinstance(value, Mapping):
            if value:
                yield from _pairs(value, f"{words}: ")
            else:
                yield words, "none"
        else:
            yield words, _shown(value)


def _list(pairs: Iterable[tuple[str, str]]) -> str:
    rows = (
        f'<tr><th scope="row">{escape(name)}</th><td><code>{escape(value)}</code></td></tr>' for name, value in pairs
    )
    return f'<table class="pairs"><tbody>{"".join(rows)}</tbody></table>'


def _setup(setup: Mapping[str, Any]) -> str:
    return f"<h2>Set-up</h2>{_list(_pairs(setup))}" if setup else ""


def _gaps(not_computed: Mapping[str, str]) -> str:
    if not not_computed:
        return '<h2>Not computed</h2><p class="note">Every metric was computed.</p>'
    return f"<h2>Not computed, and why</h2>{_list(not_computed.items())}"


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
) -> str:
    """Return one HTML page that loads nothing: images are inside, there is no script and no address to fetch.

    Parameters
    ----------
    title : str
        What is compared, as in "awq-4bit-g128 against demo".
    verdict : str
        `report.verdict.verdict(...)`; stands first.
    results : sequence of MetricResult
        `metrics.compute_all(evidence)`, pooled, by task and by category; `noise/...` among them become the noise floor.
    figures : sequence of Figure
        `report.figures.draw_all(...)`; the files are read and embedded.
    flips : sequence of mapping
        `metrics.tables.flips_table(evidence)`; the first 50 are shown, the rest counted.
    setup : mapping, optional
        Names and values, nested where it helps: method, settings, hashes, calibration, versions, run ids.
    not_computed : mapping of str to str, optional
        Metric to the reason why it was not computed.
    manifest : Sizes, optional
        The compression manifest, for the rows about size.
    gates : mapping of str to float, optional
        What a promotion reads of these results, by key ("gate/kl_upper").
    n_truncated : int
        Prompts of which the model read the end only.
    failed_stages : mapping of str to str, optional
        Name of a stage that failed to its error message; stands under the verdict.

    Raises
    ------
    OSError
        When a figure's file cannot be read.
    """
    pooled = headline(list(results))
    body = "".join(
        (
            f'<h1>{escape(title)}</h1><p class="verdict">{escape(verdict)}</p>',
            *(f'<p class="failed">{escape(text)}</p>' for text in failures(failed_stages)),
            headline_section(pooled, manifest, gates, footnotes(pooled, gates=gates, n_truncated=n_truncated)),
            _figures(figures),
            flips_section(flips, compared="distance/flips_pct" in pooled),
            parts_section(results),
            _setup(setup or {}),
            _gaps(not_computed or {}),
            all_values(pooled),
        )
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head>\n<body><main>{body}</main></body></html>\n"
    )
