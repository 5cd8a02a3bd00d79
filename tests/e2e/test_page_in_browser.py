"""The page over variants in a headless Chromium: what it shows, that nothing of a model's text runs, accessibility."""

import base64
import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlflow_compress.decide.promotion import Decision
from mlflow_compress.decide.scoreboard import scoreboard
from mlflow_compress.reporting.page.variants_page import render_page
from tests.browser import AXE, Browser, browser, chromium
from tests.page_contents import HOSTILE, directed_board, page_content
from tests.scored_variants import served

pytestmark = [
    pytest.mark.ci,
    pytest.mark.skipif(chromium() is None, reason="there is no Chromium on the path"),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render_page(page_content(HOSTILE)), encoding="utf-8")
    return path.as_uri()


@pytest.fixture(scope="module")
def tab() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


def texts(tab: Browser, selector: str) -> list[str]:
    return list(tab.run(f"[...document.querySelectorAll({selector!r})].map((found) => found.textContent)"))


def test_what_models_wrote_does_not_run_and_the_policy_is_kept(tab: Browser, page: str) -> None:
    tab.show(page)
    tab.ready()
    assert tab.run("window.alarm === undefined")
    assert tab.run("document.querySelectorAll('img').length") == 0
    assert any(HOSTILE in text for text in texts(tab, "#flip-list article"))
    assert any(HOSTILE in text for text in texts(tab, "#answer-list article"))
    assert tab.errors == []  # a refused style or script would stand here
    # The policy refuses what would come into the page by another way.
    tab.run("document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.alarm = 3'}))")
    assert tab.run("window.alarm === undefined") and len(tab.errors) == 1
    tab.errors.clear()


def test_figures_are_drawn_as_vectors_with_a_text_for_readers(tab: Browser, page: str) -> None:
    tab.show(page)
    tab.ready()
    # Two variants in two figures, four models by their answers, and in the figure of direction the choice with its ring.
    assert tab.run("document.querySelectorAll('.plot svg circle').length") == 10
    labels = tab.run("[...document.querySelectorAll('.plot svg')].map((svg) => svg.getAttribute('aria-label'))")
    assert labels[0] == "Answers broken against answers repaired of 2 variants; the table below has the numbers."
    assert labels[1] == "Size against KL, items (nats) of 2 variants; the scoreboard has the numbers."
    assert tab.run("document.querySelectorAll('canvas').length") == 0
    light = tab.run("getComputedStyle(document.querySelector('.plot svg circle')).stroke")
    tab.show(page, dark=True)
    tab.ready()
    assert tab.run("getComputedStyle(document.querySelector('.plot svg circle')).stroke") != light


def test_the_scoreboard_sorts_and_filters_and_the_figures_follow(tab: Browser, page: str) -> None:
    tab.show(page)
    tab.ready()
    names = "[...document.querySelectorAll('.scores tbody tr:not([hidden])')].map((row) => row.cells[0].dataset.value ?? 'base')"
    assert tab.run(names) == ["base", "near", "far"]  # the baseline stays on top
    tab.run("document.querySelector('.scores th[data-key=\"size/bytes\"] button').click()")
    assert tab.run(names) == ["base", "far", "near"]  # 3 MB before 4 MB
    assert tab.run("document.querySelector('.scores th[data-key=\"size/bytes\"]').ariaSort") == "ascending"
    tab.run("document.querySelector('.scores th[data-key=\"size/bytes\"] button').click()")
    assert tab.run(names) == ["base", "near", "far"]
    tab.run(
        "(box => { box.value = 'NEAR'; box.dispatchEvent(new Event('input')); })(document.querySelector('#score-filter'))"
    )
    tab.until("document.querySelector('#score-count').textContent === '1 of 2 variants'")
    assert tab.run(names) == ["base", "near"] and tab.run("document.querySelectorAll('#scatter circle').length") == 1


def test_a_fragment_restores_a_selection(tab: Browser, page: str) -> None:
    tab.show(f"{page}#flips?variant=far&change=c2w&margin=60")
    tab.ready()
    [card] = texts(tab, "#flip-list article")
    assert card.startswith("far right → wrong") and "baseline's margin 80.0 %" in card
    assert "1 changed answer in this selection." in texts(tab, "#flip-count")
    # Each option with both models' probabilities: odds of 9 to 1, and of 1 to 3.
    assert [part in card for part in ("90.0 %", "25.0 %", "10.0 %", "75.0 %")] == [True] * 4
    choose = "(form => { form.elements.margin.value = '0'; form.elements.task.value = 'free';"
    tab.run(f"{choose} form.dispatchEvent(new Event('input')); }})(document.querySelector('#flip-filter'))")
    wanted = "#flips?variant=far&task=free&change=c2w"
    tab.until(f"location.hash === {wanted!r}")
    assert texts(tab, "#flip-link") == [wanted] and "Accepted: 4" in texts(tab, "#flip-list article")[0]


def test_the_explorer_opens_on_the_choice_and_compares_any_two_variants(
    tab: Browser, page: str, tmp_path: Path
) -> None:
    tab.show(page)
    tab.ready()
    assert texts(tab, "#flip-link") == ["#flips?variant=near"]
    # "near" changed c1 alone, and "far" did the same: they differ where "far" changed more.
    tab.show(f"{page}#flips?variant=far&against=near")
    tab.ready()
    assert texts(tab, "#flip-count") == ["3 answers in this selection that differ from near's."]
    cards = texts(tab, "#flip-list article")
    assert all(card.startswith("far against near right → wrong") for card in cards)
    assert "near is right or wrong as the baseline is." in cards[2]  # the answer in words
    tab.show(f"{page}#flips?variant=near&against=far&task=choice")
    tab.ready()
    cards = texts(tab, "#flip-list article")
    assert len(cards) == 2 and all(card.startswith("near against far wrong → right") for card in cards)
    assert all("near answers as the baseline does." in card for card in cards)
    # Without a variant, each one is compared.
    tab.show(f"{page}#flips?against=far&change=w2c")
    tab.ready()
    assert texts(tab, "#flip-count") == ["3 answers in this selection that differ from far's."]
    # To c2 "near" has no answer: it does not differ there.
    content = page_content()
    near, far = content.variants
    near = replace(near, changes=replace(near.changes, unscored=np.array([2])))
    (tmp_path / "p.html").write_text(render_page(replace(content, variants=[near, far])), encoding="utf-8")
    tab.show(f"{(tmp_path / 'p.html').as_uri()}#flips?variant=far&against=near")
    tab.ready()
    assert texts(tab, "#flip-count") == ["2 answers in this selection that differ from near's."]
    assert tab.errors == []


def test_a_cell_opens_the_answers_that_it_counts(tab: Browser, page: str) -> None:
    tab.show(page)
    tab.ready()
    cells = "[aria-labelledby=categories] td a"
    # Of the three questions, "near" flipped one and "far" all.
    assert tab.run(f"[...document.querySelectorAll({cells!r})].map((cell) => cell.title)") == [
        "1 changed answer",
        "3 changed answers",
    ]
    tab.run(f"document.querySelectorAll({cells!r})[1].click()")
    assert tab.run("location.hash") == "#flips?variant=far&task=choice&category=animals&change=flip"
    assert texts(tab, "#flip-count") == ["3 changed answers in this selection."]
    assert tab.run("document.activeElement.id") == "flips"


def test_answers_have_their_differences_marked_and_their_grades(tab: Browser, page: str) -> None:
    tab.show(page)
    tab.ready()
    assert texts(tab, "#answer-list del") == ["two"] and "script" in "".join(texts(tab, "#answer-list ins"))
    assert texts(tab, "#answer-list h4") == ["Baseline · grade 9.0 of 10", "near · grade 4.0 of 10"]


def test_on_a_phone_nothing_sticks_out_and_intervals_are_seen(tab: Browser, page: str) -> None:
    tab.show(page, width=400)
    tab.ready()
    assert tab.run("document.documentElement.scrollWidth") <= 400
    places = tab.run("""[...document.querySelectorAll('.scores .interval')].map((found) => {
      const { left, right, height } = found.getBoundingClientRect();
      return [left, right, height];
    })""")
    assert len(places) == 6 and all(0 <= left < right <= 400 and height > 0 for left, right, height in places)
    assert all(
        width <= 400 for width in tab.run("[...document.querySelectorAll('.plot svg')].map((svg) => svg.clientWidth)")
    )


def test_without_scripts_the_page_is_tables(tab: Browser, page: str) -> None:
    tab.show(page, scripts=False)
    seen = "[...document.querySelectorAll(%r)].map((found) => found.checkVisibility())"
    tab.until("document.readyState === 'complete' && document.querySelector('.scores') !== null")
    assert tab.run(seen % ".scores, .heat, .static table, .pairs") == [True] * 9
    assert set(tab.run(seen % ".needs-script")) == {False}


@pytest.mark.parametrize("width", [1300, 1600])
def test_the_table_of_slices_is_not_cut_off(tab: Browser, page: str, width: int) -> None:
    tab.show(page, width=width)
    tab.ready()
    table = "document.querySelector('[aria-labelledby=slices] table')"
    assert tab.run(f"{table}.scrollWidth <= {table}.parentElement.clientWidth")


@pytest.mark.skipif(not AXE.is_file(), reason="axe is not there: run `npm ci` in tools/page_libraries")
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1600, 400])
def test_axe_finds_no_violation(tab: Browser, page: str, width: int, dark: bool) -> None:
    tab.show(page, width=width, dark=dark)
    tab.ready()
    tab.run("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    tab.run(AXE.read_text(encoding="utf-8") + ";0")
    found: list[dict[str, Any]] = tab.run("axe.run(document).then((done) => done.violations)")
    assert [(rule["id"], [node["html"][:120] for node in rule["nodes"]]) for rule in found] == []
    assert tab.run("axe.run(document).then((done) => done.passes.length)") > 20
    tab.errors.clear()


def test_a_sandboxed_frame_shows_the_page_as_mlflow_does(tab: Browser, page: str, tmp_path: Path) -> None:
    # MLflow's artifact view makes a blob of the file, and shows it in a frame that may run scripts and nothing else.
    outer = tmp_path / "outer.html"
    frame = "<iframe sandbox='allow-scripts' width=900 height=900></iframe>"
    outer.write_text(f"<title>outer</title>{frame}", encoding="utf-8")
    # A frame of another origin cannot be looked into. So this copy tells what it shows; its policy allows that script too.
    told = "[document.documentElement.dataset.ready, document.body.innerText]"
    script = f"setInterval(() => parent.postMessage({told}, '*'), 50)"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    html = Path(page.removeprefix("file://")).read_text(encoding="utf-8")
    html = html.replace("script-src ", f"script-src 'sha256-{digest}' ", 1) + f"<script>{script}</script>"
    tab.show(outer.as_uri())
    tab.until("document.querySelector('iframe') !== null")
    tab.run("window.heard = null; addEventListener('message', (event) => { window.heard = event.data; }); 0")
    blob = f"new Blob([{json.dumps(html)}], {{type: 'text/html'}})"
    tab.run(f"document.querySelector('iframe').src = URL.createObjectURL({blob})")
    ready, text = tab.until("window.heard && window.heard[0] && window.heard")
    assert int(ready) > 0 and "MLflow shows this page in a frame that opens no links" in text
    assert "1 changed answer in this selection." in text  # of the policy's choice


def test_the_figure_of_direction_names_ties_and_follows_the_filter(tab: Browser, tmp_path: Path) -> None:
    content = replace(page_content(), board=directed_board(), decision=Decision(champion=None, outcomes=()))
    (tmp_path / "p.html").write_text(render_page(content), encoding="utf-8")
    tab.show((tmp_path / "p.html").as_uri())
    tab.ready()
    # "a" is worse, a triangle; "b" is no worse and filled; "c" is open. None is chosen.
    groups = "[...document.querySelectorAll('#direction g')].map((part) => part.getAttribute('fill')).filter(Boolean)"
    assert tab.run("document.querySelectorAll('#direction circle').length") == 2
    assert {"var(--accent)", "var(--page)", "var(--worse)"} <= set(tab.run(groups))
    assert texts(tab, "#direction-ties") == ["Dotted: ties, which neither KL nor right answers tell apart: a and b."]
    tab.run(
        "(box => { box.value = 'c'; box.dispatchEvent(new Event('input')); })(document.querySelector('#score-filter'))"
    )
    tab.until("document.querySelectorAll('#direction circle').length === 1")
    assert texts(tab, "#direction-ties") == [""] and tab.errors == []


def test_logarithmic_axes_say_what_they_cannot_show(tab: Browser, page: str) -> None:
    tab.show(page)
    tab.ready()
    # Sizes and KL are above 0: both variants stay.
    for side in ("x", "y"):
        tab.run(f"(box => {{ if (!box.checked) box.click(); }})(document.querySelector('#scatter-log-{side}'))")
    assert tab.run("document.querySelectorAll('#scatter circle').length") == 2
    assert "Filled and joined: the Pareto front" in texts(tab, "#scatter-caption")[0]
    # With a filter that leaves nothing, the figure says so.
    tab.run(
        "(box => { box.value = 'none'; box.dispatchEvent(new Event('input')); })(document.querySelector('#score-filter'))"
    )
    tab.until("document.querySelector('#score-count').textContent === '0 of 2 variants'")
    assert texts(tab, "#scatter-caption") == ["No variant of the scoreboard's selection has both numbers."]
    assert tab.errors == []


def test_buttons_choose_what_stands_against_the_distance(tab: Browser, page: str, tmp_path: Path) -> None:
    timed = [served("near", kl=0.01, size=4e6, speedup=1.5, memory=0.6), served("far", 0.2, 3e6, 1.2, 0.5)]
    board = scoreboard([replace(v, run_id=v.name * 8) for v in timed], baseline="base", evaluation="e")
    (tmp_path / "timed.html").write_text(render_page(replace(page_content(), board=board)), encoding="utf-8")
    tab.show((tmp_path / "timed.html").as_uri())
    tab.ready()
    assert texts(tab, "#scatter-presets button") == ["KL by size", "KL by speed", "KL by memory"]
    label = "document.querySelector('#scatter svg').getAttribute('aria-label')"
    # "near" is faster and closer, and takes more memory.
    for number, start, on_front in ((1, "Decode speedup (batch 1)", 1), (2, "Peak memory (to baseline)", 2)):
        tab.run(f"document.querySelectorAll('#scatter-presets button')[{number}].click()")
        assert tab.run(label).startswith(f"{start} against KL, items (nats) of 2 variants")
        assert tab.run("document.querySelectorAll('#scatter circle[fill=\"var(--accent)\"]').length") == on_front
    assert "Decode speedup (batch 1) (" not in "".join(texts(tab, "#scatter"))
    tab.show(page)
    tab.ready()
    assert texts(tab, "#scatter-presets button") == []  # there is nothing to choose
    assert tab.errors == []
