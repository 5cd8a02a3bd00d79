"""The page of a diagnosis: what moves most, the map of layers, the controls, and the text on which it moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlflow_compress.metrics.diagnosis.diagnosis_summary import GroupsFound
from mlflow_compress.metrics.diagnosis.moved_texts import ShownText
from mlflow_compress.records import MetricResult
from mlflow_compress.reporting.diagnosing.diagnosis_tables import control_rows, kl_text, ratio_of
from mlflow_compress.reporting.html import embedded, setting_pairs
from mlflow_compress.reporting.templates import TEMPLATES

if TYPE_CHECKING:  # avoids the import of matplotlib
    from mlflow_compress.reporting.figures import Figure


def render_diagnosis(
    *,
    title: str,
    sentence: str,
    found: GroupsFound,
    figures: Sequence[Figure],
    categories: Sequence[MetricResult],
    texts: Sequence[ShownText],
    setup: Mapping[str, Any],
) -> str:
    """Return a diagnosis as one HTML page, with embedded images and without scripts or external files.

    Parameters
    ----------
    title, sentence : str
        Of the page; the sentence is shown first.
    found : GroupsFound
    figures : sequence of Figure
        `reporting.figures.draw_diagnosis(...)`.
    categories : sequence of MetricResult
        KL by task and category; empty where there are no items.
    texts : sequence of ShownText
        The texts that moved most, most first.
    setup : mapping
        Names and values, possibly nested.
    """
    groups = [
        {
            "name": group.name,
            "kl": kl_text(group.kl),
            "share": None if group.share is None else f"{100 * group.share:.1f} %",
            "top": f"{100 * group.top_changed:.2f} %",
            "noise": kl_text(group.noise_kl),
            "against": ratio_of(group.against_noise),
        }
        for group in sorted(found.groups, key=lambda group: -group.kl.value)
    ]
    return TEMPLATES.get_template("diagnosis.html.j2").render(
        title=title,
        sentence=sentence,
        groups=groups,
        controls=control_rows(found),
        figures=[embedded(figure) for figure in figures],
        categories=[(r.task, r.category, f"{r.n:,}", kl_text(r)) for r in categories],
        texts=[_text_row(text) for text in texts],
        setup=setting_pairs(setup),
    )


def _text_row(text: ShownText) -> dict[str, Any]:
    moved = text.moved
    return {
        "where": f"{moved.task}, text {moved.item_id}",
        "kl": f"{moved.kl:.3g}",
        "changed": f"{moved.changed} of {moved.n}",
        "place": moved.first_change,
        "context": text.begins if text.context is None else text.context,
        "actual": text.actual,
        "baseline": text.baseline,
        "variant": text.variant,
    }
