"""The page over variants: its tables from records by hand, its limit, its policy, and that nothing on it is markup."""

import base64
import gzip
import hashlib
import json
import re
from dataclasses import replace
from importlib.resources import files

import numpy as np
import pytest

from mlflow_compress.decide.promotion import Decision, PolicyAnswer
from mlflow_compress.decide.scoreboard import scoreboard
from mlflow_compress.reporting.page import variants_page
from mlflow_compress.reporting.page.page_content import explorer_data, packed, page_data, shared_changes
from tests.page_contents import EXAMPLES, HOSTILE, directed_board, page_content
from tests.report_results import Page


def unpacked(text):
    return json.loads(gzip.decompress(base64.b64decode(text)))


def test_the_changed_answers_are_those_of_the_records_and_a_limit_keeps_the_most_confident():
    content = page_content()
    data = explorer_data(content.items, content.changes)
    assert (data["total"], data["shown"], data["variants"]) == (5, 5, ["near", "far"])
    # Rows of the items that changed: all four. Odds of 9 to 1 are a margin of 80 %, 3 to 1 of 50 %, 1 to 1.5 of 20 %.
    by_id = {item[0]: item for item in data["items"]}
    assert {name: item[8] for name, item in by_id.items()} == {"c0": 500, "c1": 200, "c2": 800, "f0": None}
    assert by_id["c0"][9] == {"p": [750, 250], "choice": 0}
    assert by_id["f0"][9] == {"text": "4"} and by_id["f0"][7] == ["4"]
    near, far = data["changes"]
    place = {item[0]: number for number, item in enumerate(data["items"])}
    # Equal odds are a tie, which the first option wins: wrong before, right now.
    assert near == [[place["c1"], "w2c", 0.125, {"p": [500, 500], "choice": 0}]]
    assert [(data["items"][change[0]][0], change[1]) for change in far] == [
        ("c2", "c2w"),
        ("c0", "c2w"),
        ("c1", "w2c"),
        ("f0", "c2w"),
    ]
    assert far[1][3] == {"p": [200, 800], "choice": 1}
    assert far[3][2:] == [None, {"text": "why"}]
    data = explorer_data(content.items, content.changes, most=2)
    assert (data["total"], data["shown"]) == (5, 2)
    assert [data["items"][change[0]][0] for own in data["changes"] for change in own] == ["c2", "c0"]
    # Both variants changed c1: one of the two changes alone would say that their answers differ.
    assert explorer_data(content.items, content.changes, most=3)["shown"] == 2
    assert [explorer_data(content.items, content.changes, most=n)["shown"] for n in (0, 4, 5)] == [0, 4, 5]


def test_what_prompts_begin_with_stands_once_and_answers_beside_the_baseline_s():
    data = explorer_data(page_content().items, page_content().changes)
    by_id = {item[0]: item for item in data["items"]}
    assert data["prefixes"][by_id["c0"][3]] == EXAMPLES
    assert [by_id[name][4] for name in ("c0", "c1", "c2")] == ["Q: 0 why", "Q: 1 why", "Q: 2 why"]
    assert (data["prefixes"][by_id["f0"][3]], by_id["f0"][4]) == ("", "2 + 2")
    _, values = page_data(page_content())
    assert values["answers"]["prompts"] == [["i1", 0, "asked", "one two three", 9.0]]
    assert values["answers"]["variants"] == {"near": [["one why three", 4.0]], "far": [["one why three", 5.0]]}
    assert values["answers"]["total"] == 1


def test_items_without_an_answer_are_no_difference_and_the_data_stay_within_their_limit():
    content = page_content()
    near, far = (content.changes[name] for name in ("near", "far"))
    assert len(near.unscored) == 0
    # Rows 2 and 3 are c2 and f0; only "far" changed them.
    data = explorer_data(content.items, {"near": replace(near, unscored=np.array([2])), "far": far})
    places = [item[0] for item in data["items"]]
    assert data["unscored"] == [[places.index("c2")], []]
    assert explorer_data(content.items, {"near": replace(near, unscored=np.array([2]))})["unscored"] == [[]]
    whole, _ = page_data(content)
    text, values = page_data(content, most_bytes=len(whole) - 1)
    assert len(text) < len(whole) and 0 < values["changes"]["shown"] < values["changes"]["total"] == 5
    assert unpacked(text) == json.loads(json.dumps(values))
    page = variants_page.render_page(replace(content, notes=["left out"]))
    assert "5 answers changed, over all variants." in page and "left out." in page


def test_variants_share_changed_answers():
    together, by_count = shared_changes(page_content().changes, 4)
    assert together.tolist() == [[1, 1], [1, 4]]  # both changed c1
    assert by_count == {1: 3, 2: 1}
    table = variants_page.shared_table(page_content())
    assert (table.n_items, table.table.shades) == (
        4,
        [[variants_page.LEVELS, variants_page.LEVELS], [variants_page.LEVELS // 4, variants_page.LEVELS]],
    )
    assert "Of 4 items, 3 changed under one variant only, 1 under all 2." in " ".join(
        Page(variants_page.render_page(page_content())).text.split()
    )


def test_scores_have_the_baseline_and_the_heat_map_each_category_once():
    content = page_content()
    table = variants_page.scores_table(content)
    assert [str(row[0]) for row in table.rows] == ["base (baseline)", "near", "far"] and table.strong == {1}
    assert str(table.rows[0][1]) == "8 MB"  # 4 MB are half of it
    text = Page(variants_page.render_page(replace(content, board=replace(content.board, n_items=3)))).text
    assert "Of 4 items of all tasks (the scoreboard has the 3 of multiple choice), 3 changed" in " ".join(text.split())
    heat = variants_page.heat_map(page_content())
    assert [column.label for column in heat.columns[2:]] == ["near", "far"]
    assert [[str(cell) for cell in row] for row in heat.rows] == [
        ["choice: animals", "3", "1.0 [0.5, 2.0]", "21.0 [10.5, 42.0]"]
    ]
    assert heat.rows[0][0].value == "task=choice&category=animals"  # by which a cell opens the answers that it counts
    assert list(heat.shades) == [[None, round(variants_page.LEVELS / 21), variants_page.LEVELS]]


def test_flips_and_the_change_of_accuracy_say_how_many_answers_broke():
    table = variants_page.direction_table(replace(page_content(), board=directed_board()))
    assert [[str(cell) for cell in row] for row in table.rows] == [
        # 3 % flipped and 1 % lost: 2 % broke, 1 % were repaired. The same KL and as many right answers are a tie.
        ["a", "2.00", "1.00", "-1.0 pt [-1.8, -0.2]", "worse", "b"],
        ["b", "1.00", "1.00", "+0.0 pt [-0.8, 0.8]", "no worse than 1 point", "a"],
        ["c", "9.00", "3.00", "-6.0 pt [-12.5, 0.5]", table.rows[2][4], "None"],
    ]
    assert table.rows[2][4].startswith("open (about ")
    _, values = page_data(replace(page_content(), board=directed_board()))
    assert values["scores"]["ties"] == [["a", "b"]]
    assert [row["harm"]["word"] for row in values["scores"]["rows"]] == ["worse", "no worse", "open"]


REFUSED = PolicyAnswer(word="fails", why="no")


def test_the_first_sentence_says_what_the_gates_choose():
    content = page_content()
    assert (
        variants_page.choice_sentence(content)
        == "Ship near: 1.0 % [0.5, 2.0] of answers flipped, KL 0.010 [0.005, 0.020], 2.00x smaller, "
        "accuracy no worse than 1 point."
    )
    assert variants_page.choice_reason(content) == "It is the only one of 2 variants that passes the default policy."
    outcomes = content.decision.outcomes
    none = replace(content, decision=Decision(champion=None, outcomes=tuple(o for o in outcomes if not o.passed)))
    assert variants_page.choice_sentence(none) == "Ship none of them yet: no variant passes the default policy."
    assert variants_page.choice_reason(none) == (
        "The closest to the baseline, far, fails: KL 0.21 > 0.05; flips 21 % > 5."
    )
    # A control is named only where there is nothing else.
    first = content.board.rows[0].name
    assert first == "near"
    both = tuple(
        replace(o, passed=False, answer=REFUSED, candidate=replace(o.candidate, compresses=o.candidate.name != first))
        for o in outcomes
    )
    controlled = replace(content, decision=Decision(champion=None, outcomes=both))
    assert variants_page.choice_reason(controlled) == "The closest that is compressed, far, fails: no."
    alone = replace(
        content, decision=Decision(champion=None, outcomes=tuple(o for o in both if o.candidate.name == first))
    )
    assert variants_page.choice_reason(alone) == "The closest to the baseline, near, fails: no."
    empty = replace(
        content, board=scoreboard([], baseline="b", evaluation=None), decision=Decision(champion=None, outcomes=())
    )
    assert variants_page.choice_sentence(
        empty
    ) == "No variant has results, so there is nothing to ship." and not variants_page.choice_reason(empty)
    assert len(variants_page.gate_texts([])) == 0 and len(content.gates) == 3


def test_the_policy_names_the_scripts_and_the_style_of_the_page():
    page = variants_page.render_page(page_content(HOSTILE))
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    [style] = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    [policy] = re.findall(r'http-equiv="Content-Security-Policy" content="(.*?)"', page)
    assert len(scripts) == 2 and page.count("<script") == 3  # and the data, which is no script
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (*scripts, style)]
    policy = policy.replace("&#39;", "'")
    assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy and "http" not in policy
    assert policy.split("; ")[1:3] == [
        f"script-src 'sha256-{digests[0]}' 'sha256-{digests[1]}'",
        f"style-src 'sha256-{digests[2]}'",
    ]


def test_what_models_wrote_is_never_markup():
    page = variants_page.render_page(page_content(HOSTILE))
    assert HOSTILE not in page and "<img" not in page
    parsed = Page(page)
    assert "img" not in parsed.tags and HOSTILE in parsed.text
    assert not [name for name, _ in parsed.attributes if name.startswith("on") or name in ("src", "style")]
    [data] = re.findall(r'<script type="application/octet-stream" id="data">(.*?)</script>', page)
    assert re.fullmatch("[A-Za-z0-9+/=]+", data)
    assert HOSTILE in unpacked(data)["changes"]["items"][0][5]


def test_every_label_and_every_link_leads_somewhere():
    page = variants_page.render_page(page_content())
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    targets = re.findall(r'aria-labelledby="([^"]+)"', page) + re.findall(r'href="#([^"]+)"', page)
    assert targets and set(targets) <= set(ids)
    scripts = (files("mlflow_compress.reporting.page") / "scripts").iterdir()
    wanted = set(re.findall(r'byId\("([\w-]+)"\)', "".join(path.read_text(encoding="utf-8") for path in scripts)))
    assert wanted and wanted <= set(ids)


def test_the_slice_that_moves_most_is_named_for_each_variant():
    # Of 4 items with 1 % and 21 % of flips, 2 have 2 % and 42 %: the others have none.
    table = variants_page.worst_slices(page_content())
    assert [(name, said.text, said.notes) for name, said in table.rows] == [
        ("near", "choice/law: flips 2.0 % [1.0, 3.0], others 0 %", ["corrected p 0.01"]),
        ("far", "choice/law: flips 42.0 % [21.0, 63.0], others 0 %", ["corrected p 0.01"]),
    ]
    assert "The slice that moves most" in variants_page.render_page(page_content())
    assert "choice/law: flips" in variants_page.page_markdown(page_content())
    assert [row["variant"] for row in variants_page.content_values(page_content())["worst_slices"]] == ["near", "far"]


def test_a_page_without_items_has_neither_explorer_nor_heat_map():
    content = page_content()
    bare = [
        replace(v, changes=None, answers=None, results=[r for r in v.results if r.task is None])
        for v in content.variants
    ]
    text = Page(variants_page.render_page(replace(content, items=None, answers=None, variants=bare))).text
    assert "Scoreboard" in text and "Changed answers" not in text and "Flips by category" not in text


def test_the_libraries_have_their_licences():
    folder = files("mlflow_compress.reporting.page") / "vendor"
    licences = (folder / "LICENSES.txt").read_text(encoding="utf-8")
    first = (folder / "libraries.min.js").read_text(encoding="utf-8").splitlines()[0]
    packages = {"Plot": "@observablehq/plot", "jsdiff": "diff"}
    named = re.findall(r"(Plot|jsdiff) ([\d.]+)", first)
    assert len(named) == 2 and all(f"\n{packages[name]} {version}\n" in licences for name, version in named)
    assert licences.count("Permission to use, copy, modify") >= 10


@pytest.mark.parametrize("text", ["why", HOSTILE, "a | b\nc"])
def test_the_tables_as_markdown(text):
    lines = variants_page.page_markdown(page_content(text)).splitlines()
    assert lines[0].startswith("**Ship near: ")
    head = lines.index("| flips, % | items | near | far |")
    assert lines[head + 2] == "| choice: animals | 3 | 1.0 [0.5, 2.0] | 21.0 [10.5, 42.0] |"
    assert "| near | 1 | 1 |" in lines and "| far | 1 | 4 |" in lines
    assert "<script" not in "\n".join(lines)
    tables = [line for line in lines if line.startswith("|")]
    assert tables and all(line.endswith("|") for line in tables)


def test_the_tables_as_json():
    values = json.loads(json.dumps(variants_page.content_values(page_content()), allow_nan=False))
    assert values["choice"].startswith("Ship near")
    assert values["gates"][0] == {"variant": "near", "passed": True, "rank": 1, "failed": []}
    assert values["shared_changes"]["together"] == [[1, 1], [1, 4]]
    assert values["flips_by_category"][0]["variants"]["far"] == {"value": 21.0, "low": 10.5, "high": 42.0, "n": 3}
    assert [row["cells"] for row in values["made"]] == [{"method": "rtn", "bits": "8"}, {"method": "rtn", "bits": "4"}]
    assert values["items_by_task"] == [
        {"task": "choice", "family": "lettered", "n": 3},
        {"task": "free", "family": "exact", "n": 1},
    ]


def test_packed_data_have_no_markup_and_no_time_in_them():
    assert packed({"a": HOSTILE}) == packed({"a": HOSTILE}) and unpacked(packed({"a": HOSTILE})) == {"a": HOSTILE}
