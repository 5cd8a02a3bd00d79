"""Answers side by side, and the page to rate them, in a headless Chromium."""

import csv
import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlflow_compress.commands.rate.run import read_ratings
from mlflow_compress.reporting.answers_page import rating_page, render_answers
from tests.browser import AXE, Browser, browser, chromium
from tests.unit.test_human_ratings import pairs, sheet_of

pytestmark = [
    pytest.mark.ci,
    pytest.mark.skipif(chromium() is None, reason="there is no Chromium on the path"),
]
HOSTILE = "<img src=x onerror='window.alarm = 1'><script>window.alarm = 2</script>"
# What the page would save becomes a text that the test can read.
HOOK = "URL.createObjectURL = (blob) => { blob.text().then((text) => { window.saved = text; }); return '#saved'; }; 0"


@pytest.fixture(scope="module")
def tab() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("pages")
    found = [replace(pair, variant=f"{pair.variant} {HOSTILE} {'long ' * 900}") for pair in pairs(4, turns=2)]
    sheet, rows, _ = sheet_of(found)
    made = {"answers": render_answers("small against base", found), "rate": rating_page(sheet, rows)}
    for name, text in made.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: (folder / f"{name}.html").as_uri() for name in made}


@pytest.mark.parametrize("name", ["answers", "rate"])
@pytest.mark.parametrize("width", [1600, 400])
def test_nothing_of_a_models_text_runs_and_nothing_is_wider_than_the_window(
    tab: Browser, pages: dict[str, str], name: str, width: int
) -> None:
    tab.show(pages[name], width=width)
    tab.until("document.readyState === 'complete' && document.querySelectorAll('article').length === 8")
    assert tab.run("window.alarm === undefined && document.querySelectorAll('img').length === 0")
    assert HOSTILE in tab.run("document.body.textContent")
    assert tab.run("document.documentElement.scrollWidth <= window.innerWidth")
    assert tab.errors == []


def test_choices_are_kept_and_saved_as_ratings_reads_them(tab: Browser, pages: dict[str, str], tmp_path: Path) -> None:
    _, rows, _ = sheet_of(pairs(4, turns=2))
    progress = "document.getElementById('progress')?.textContent"

    def reopen() -> None:
        tab.show(pages["rate"])
        tab.until(f"{progress}?.endsWith('of 8 rated')")

    def rate() -> dict[str, str]:
        wanted = dict(zip(ids, ["A", "B", "tie", "both bad"], strict=False))
        for row, choice in wanted.items():
            tab.run(f"document.querySelector('#{row} input[value=\"{choice}\"]').click()")
        tab.run("rater.value = 'Anna B.'; rater.dispatchEvent(new Event('input', {bubbles: true}))")
        assert tab.run(progress) == "4 of 8 rated"
        return wanted

    reopen()
    assert tab.run(progress) == "0 of 8 rated"
    ids = list(tab.run("[...document.querySelectorAll('article')].map((pair) => pair.id)"))
    assert len(ids) == len(rows)
    wanted = rate()
    reopen()
    # The storage writes in its own time, and begins anew in the first moments of a new profile: so more than once.
    while (tab.run(progress), tab.run("rater.value")) != ("4 of 8 rated", "Anna B."):
        rate()
        reopen()
    tab.run(HOOK)
    tab.run("document.querySelector('.bar button').click()")
    saved = str(tab.until("window.saved"))
    assert [row["id"] for row in csv.DictReader(io.StringIO(saved))] == ids
    (tmp_path / "anna.csv").write_text(saved, encoding="utf-8", newline="")
    assert read_ratings([tmp_path / "anna.csv"], ids) == {"anna": wanted}
    assert tab.errors == []


@pytest.mark.skipif(not AXE.is_file(), reason="axe is not there: run `npm ci` in tools/page_libraries")
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("name", ["answers", "rate"])
def test_axe_finds_no_violation(tab: Browser, pages: dict[str, str], name: str, dark: bool) -> None:
    tab.show(pages[name], dark=dark)
    tab.until("document.readyState === 'complete' && document.querySelectorAll('article').length === 8")
    tab.run("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    tab.run(AXE.read_text(encoding="utf-8") + ";0")
    found: list[dict[str, Any]] = tab.run("axe.run(document).then((done) => done.violations)")
    assert [(rule["id"], [node["html"][:120] for node in rule["nodes"]]) for rule in found] == []
    tab.errors.clear()
