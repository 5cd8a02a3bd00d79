"""Answers side by side, in a headless Chromium."""

from collections.abc import Iterator
from typing import Any

import pytest

from mlflow_compress.reporting.answers_page import ComparedAnswer, render_answers
from tests.browser import AXE, Browser, browser, chromium

pytestmark = [
    pytest.mark.ci,
    pytest.mark.skipif(chromium() is None, reason="there is no Chromium on the path"),
]
HOSTILE = "<img src=x onerror='window.alarm = 1'><script>window.alarm = 2</script>"


@pytest.fixture(scope="module")
def tab() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "answers.html"
    pairs = [
        ComparedAnswer(
            item_id=f"q{i}",
            turn=turn,
            category="writing" if i % 2 else "math",
            question=f"Question {i}.{turn}",
            baseline=f"text {i}.{turn}",
            variant=f"other {i}.{turn} {HOSTILE} {'long ' * 900}",
            grades_baseline={"": 5.0},
            grades_variant={"": 5.0},
        )
        for i in range(4)
        for turn in range(2)
    ]
    path.write_text(render_answers("small against base", pairs), encoding="utf-8")
    return path.as_uri()


@pytest.mark.parametrize("width", [1600, 400])
def test_nothing_of_a_models_text_runs_and_nothing_is_wider_than_the_window(
    tab: Browser, page: str, width: int
) -> None:
    tab.show(page, width=width)
    tab.until("document.readyState === 'complete' && document.querySelectorAll('article').length === 8")
    assert tab.run("window.alarm === undefined && document.querySelectorAll('img').length === 0")
    assert HOSTILE in tab.run("document.body.textContent")
    assert tab.run("document.documentElement.scrollWidth <= window.innerWidth")
    assert tab.errors == []


@pytest.mark.skipif(not AXE.is_file(), reason="axe is not there: run `npm ci` in tools/page_libraries")
@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_no_violation(tab: Browser, page: str, dark: bool) -> None:
    tab.show(page, dark=dark)
    tab.until("document.readyState === 'complete' && document.querySelectorAll('article').length === 8")
    tab.run("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    tab.run(AXE.read_text(encoding="utf-8") + ";0")
    found: list[dict[str, Any]] = tab.run("axe.run(document).then((done) => done.violations)")
    assert [(rule["id"], [node["html"][:120] for node in rule["nodes"]]) for rule in found] == []
    tab.errors.clear()
