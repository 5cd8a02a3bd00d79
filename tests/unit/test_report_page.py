"""The page and the tables: escaping, nothing loaded from elsewhere, limits, missing metrics.

Text from outside (names of models and tasks, items, answers, errors) is shown as text, wherever it is on the page.
"""

import re
from dataclasses import replace
from pathlib import Path

import pytest

import mlflow_compress.reporting
from mlflow_compress.metrics import compute_all, headline, unmet
from mlflow_compress.reporting.details import flips_table
from mlflow_compress.reporting.headline import headline_rows, headline_table, note_markdown
from mlflow_compress.reporting.html import Figure, render_report
from mlflow_compress.tracking.tracked_run import NOTE_LIMIT
from tests import metric_records
from tests.report_results import SIZES, Page, result, rows_of


@pytest.fixture(scope="module")
def identical(full):
    found = metric_records.identical(full[0])
    return found, compute_all(found)


def test_flips_are_capped_and_counted_and_an_unknown_kind_is_an_error():
    answers = dict.fromkeys(("category", "gold", "baseline", "variant"))
    row = {"task": "t", "item_id": "i", "question": "q" * 400, **answers}
    flips = [{**row, "kind": "w2w"}] * 60
    text = Page(render_report(title="t", verdict="v", results=[], flips=flips)).text
    assert "60 answers changed" in text and "The first 50 are shown, 10 more" in text
    assert text.count("wrong → other wrong") == 50
    with pytest.raises(KeyError, match="sideways"):
        render_report(title="t", verdict="v", results=[], flips=[flip(kind="sideways")])


def test_identical_models_say_so(identical):
    inputs, results = identical
    text = Page(render_report(title="t", verdict="v", results=results, flips=flips_table(inputs))).text
    assert "No answer changed." in text
    assert "yes" not in {str(row.distinguishable) for row in headline_rows(headline(results))}
    assert str(rows_of(*headline(results).values())["KL, items (nats)"].distinguishable) == "no: exactly the same"


def test_without_any_metric_nothing_is_invented():
    text = Page(render_report(title="t", verdict="v", results=[])).text
    assert "No metric was computed." in text
    assert "No answer changed" not in text  # nothing was compared
    assert headline_table({}).splitlines()[0].split() == [
        "metric",
        "n",
        "baseline",
        "variant",
        "difference",
        "[95",
        "%",
        "interval]",
    ]


def test_what_was_not_computed_is_listed_with_its_reason(full):
    reasons = unmet(replace(full[0], embeddings=None))
    text = Page(render_report(title="t", verdict="v", results=full[1], not_computed=reasons)).text
    assert reasons and all(reason in text for reason in reasons.values())


def test_a_distance_is_held_against_its_noise_floor():
    kl = result("distance/kl_mean", 0.020, 0.018, 0.022)
    assert str(rows_of(kl)["KL, items (nats)"].distinguishable) == "yes, no noise floor measured"
    # The floor's upper end decides: 0.018 > 0.002, but 0.018 < 0.019.
    assert str(rows_of(kl, result("noise/kl_mean", 0.001, 0.0005, 0.002))["KL, items (nats)"].distinguishable) == "yes"
    within = rows_of(kl, result("noise/kl_mean", 0.015, 0.012, 0.019))["KL, items (nats)"]
    assert str(within.distinguishable) == "no: overlaps the noise floor"
    assert within.noise == "0.015 [0.012, 0.019]"
    # Agreement falls with distance: its upper end must lie below the floor's lower end.
    top = result("distance/top1_agreement", 0.90, 0.88, 0.92)
    floor = result("noise/top1_agreement", 0.95, 0.91, 0.97)
    assert str(rows_of(top, floor)["Same top token, items"].distinguishable) == "no: overlaps the noise floor"
    # Ten questions have no interval, and of their chains there is no paired test: nobody knows.
    few = rows_of(result("reasoning/chain_kl", 0.064), result("noise/chain_kl", 0.0))["KL, own thoughts (nats)"]
    assert (few.difference, few.distinguishable) == ("0.0640", None)


def test_a_difference_is_held_against_its_interval_and_direction():
    worse = rows_of(result("quality/accuracy_delta", -0.05, -0.08, -0.02))["Accuracy"]
    assert (worse.difference, str(worse.distinguishable)) == ("-5.0 pt [-8.0, -2.0]", "yes, worse")
    assert worse.baseline is None  # not computed, so not shown
    ratio = rows_of(result("quality/perplexity_ratio", 0.99, 0.985, 0.995))["Perplexity"]
    assert str(ratio.distinguishable) == "yes, better"  # below 1, and lower is better
    assert (
        str(rows_of(result("uncertainty/set_size_delta", 0.1, -0.1, 0.3))["Conformal set size"].distinguishable) == "no"
    )


def test_the_text_table_fits_a_terminal(full):
    lines = headline_table(headline(full[1]), SIZES).splitlines()
    assert lines.index(lines[1], 2) - 2 <= 22  # rows before the rule above the notes, with the two that a gate reads
    assert max(map(len, lines)) <= 100
    column = lines[0].index("difference")
    for line in lines[2 : lines.index(lines[1], 2)]:
        assert line[column - 2 : column] == "  " and line[column] != " "


def test_the_note_starts_with_the_verdict_and_fits(full):
    note = note_markdown("a | b: <x>", headline(full[1]), SIZES)
    lines = note.splitlines()
    assert lines[0] == "a \\| b: &lt;x>"
    assert len(note) < NOTE_LIMIT
    table = lines[2 : lines.index("", 2)]
    assert len(table) > 10
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 6 for line in table)
    assert len(note_markdown("v" * 20_000, headline(full[1]), SIZES)) < NOTE_LIMIT


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
        manifest=SIZES,
    )
    parsed = Page(page)
    assert not {"script", "iframe", "object", "link", "base"} & set(parsed.tags)
    assert not [name for name, _ in parsed.attributes if name.startswith("on") or name in ("href", "srcset")]
    assert all(value.startswith("data:image/png;base64,") for name, value in parsed.attributes if name == "src")
    assert "<script" not in page and page.count("</style>") == 1 and not re.search(r"url\(|@import", page)
    shown = parsed.text + "\n".join(value for _, value in parsed.attributes)
    places = """title verdict part_task part_category metric figure_title figure_caption task category item_id question
    gold baseline variant long_question start setup_value listed missing_metric missing_reason failed_stage"""
    for place in places.split():
        assert hostile(place) in shown, place
    for place in ("setup_name", "inner"):  # names of settings are shown with spaces
        assert hostile(place).replace("_", " ") in shown, place
    assert parsed.text.index(hostile("verdict")) < parsed.text.index("Numbers")
    assert "15.7 MB" in parsed.text and "3.6x smaller" in parsed.text


def test_no_template_switches_escaping_off() -> None:
    templates = sorted(TEMPLATES.glob("*.j2"))
    assert templates
    for template in templates:
        text = template.read_text(encoding="utf-8")
        assert not re.search(r"\|\s*safe\b|\{%-?\s*autoescape", text), template.name
