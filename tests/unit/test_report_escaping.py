"""Text from outside (names of models and tasks, items, answers, errors) is shown as text, wherever it is on the page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import mlflow_compress.reporting
from mlflow_compress.reporting.figures import Figure
from mlflow_compress.reporting.html import render_report
from tests.report_results import Page, result

TEMPLATES = Path(mlflow_compress.reporting.__file__).parent / "templates"


def hostile(place: str) -> str:
    """Return text that would run, or end an attribute, if it were not escaped; `place` tells where it went."""
    return f"<script>alert('{place}')</script>\" onload=\"alert('{place}') {{{{ 7 * 7 }}}}</style>"


def flip(**more: object) -> dict[str, object]:
    texts = {name: hostile(name) for name in ("task", "category", "item_id", "question", "gold", "baseline", "variant")}
    return {**texts, "kind": "c2w", **more}


def test_hostile_text_is_escaped_everywhere(tmp_path: Path) -> None:
    picture = tmp_path / "a.png"
    picture.write_bytes(b"\x89PNG not really")
    long_question = "why? " * 100 + hostile("long_question")
    flips_metric = "distance/flips_pct"
    page = render_report(
        title=hostile("title"),
        verdict=hostile("verdict"),
        results=[
            result(flips_metric, 5.0, 4.0, 6.0),
            result(flips_metric, 5.0, 4.0, 6.0, task=hostile("part_task")),
            result(flips_metric, 5.0, 4.0, 6.0, task=hostile("part_task"), category=hostile("part_category")),
            result(hostile("metric"), 1.0),
        ],
        figures=[Figure(picture, hostile("figure_title"), hostile("figure_caption"))],
        flips=[flip(), flip(question=long_question), flip(question=hostile("start") + "x" * 400)],
        setup={hostile("setup_name"): hostile("setup_value"), "nested": {hostile("inner"): [hostile("listed")]}},
        not_computed={hostile("missing_metric"): hostile("missing_reason")},
        failed_stages={"judge": hostile("failed_stage")},
    )
    parsed = Page(page)
    assert not {"script", "iframe", "object", "link"} & set(parsed.tags)
    assert not [name for name, _ in parsed.attributes if name.startswith("on")]
    assert "<script" not in page and page.count("</style>") == 1
    shown = parsed.text + "\n".join(value for _, value in parsed.attributes)
    places = """title verdict part_task part_category metric figure_title figure_caption task category item_id question
    gold baseline variant long_question start setup_value listed missing_metric missing_reason failed_stage"""
    for place in places.split():
        assert hostile(place) in shown, place
    for place in ("setup_name", "inner"):  # names of settings are shown with spaces
        assert hostile(place).replace("_", " ") in shown, place


def test_no_template_switches_escaping_off() -> None:
    templates = sorted(TEMPLATES.glob("*.j2"))
    assert templates
    for template in templates:
        text = template.read_text(encoding="utf-8")
        assert not re.search(r"\|\s*safe\b|\{%-?\s*autoescape", text), template.name


def test_a_change_of_an_unknown_kind_is_an_error() -> None:
    with pytest.raises(KeyError, match="sideways"):
        render_report(title="t", verdict="v", results=[], flips=[flip(kind="sideways")])
