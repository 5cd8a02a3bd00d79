"""Speed and memory on the scoreboard: columns, fronts, runtimes, and why a variant has none."""

from __future__ import annotations

import csv
import io
from dataclasses import replace

from markupsafe import escape

from mlflow_compress.decide.scoreboard import NO_SPEED_STAGE, SERVING, Scoreboard, ScoredVariant, scoreboard
from mlflow_compress.reporting.page.page_text import choice_sentence
from mlflow_compress.reporting.page.variants_page import render_page
from mlflow_compress.reporting.scoreboard_text import (
    scoreboard_columns,
    scoreboard_csv,
    scoreboard_markdown,
    scoreboard_text,
)
from tests.page_contents import page_content
from tests.scored_variants import VLLM, served, variant

SPEEDUP, _, MEMORY = SERVING
SIMULATED = "the format hqq_packed is only simulated: no kernel computes with it"


def board(*variants: ScoredVariant) -> Scoreboard:
    return scoreboard(variants, baseline="base", evaluation="e" * 16)


FAST = served("awq-4bit", kl=0.02, size=2e6, speedup=1.5, memory=0.6)
CLOSE = served("w8a8", kl=0.01, size=4e6, speedup=1.2, memory=0.8)
SLOW = served("slow", kl=0.03, size=3e6, speedup=0.9, memory=0.5)
NOT_TIMED = variant("hqq-4bit", kl=0.015, size=1e6, not_timed=SIMULATED)


def test_each_cost_has_the_front_that_hand_finds() -> None:
    """Fast and close beat slow in both; slow takes the least memory; what was not timed is on no front but size's."""
    found = board(FAST, CLOSE, SLOW, NOT_TIMED)
    assert found.serving_fronts == {
        SPEEDUP: ("awq-4bit", "w8a8"),  # the fastest first
        MEMORY: ("slow", "awq-4bit", "w8a8"),
    }
    assert found.pareto == ("hqq-4bit", "w8a8")
    assert found.to_dict()["serving_fronts"][MEMORY] == ("slow", "awq-4bit", "w8a8")


def test_columns_have_the_interval_the_runtime_and_the_reason() -> None:
    found = board(FAST, NOT_TIMED)
    assert [c.key for c in found.columns if c.key in SERVING] == list(SERVING) and all(
        c.main for c in found.columns if c.key in SERVING
    )
    for text in (scoreboard_text(found), scoreboard_markdown(found)):
        assert "1.50x [1.40, 1.60]" in text and "0.60x" in text and VLLM in text
        assert f"Not timed: hqq-4bit ({SIMULATED})" in text
        assert "front of decode" not in text  # one timed variant is no choice
    table = scoreboard_columns(found)
    assert table["timed in"] == [None, VLLM] and table["not timed"] == [SIMULATED, None]
    rows = {row["variant"]: row for row in csv.DictReader(io.StringIO(scoreboard_csv(found)))}
    assert float(rows["awq-4bit"][f"{SPEEDUP}:low"]) == 1.4 and rows["awq-4bit"][f"{MEMORY}:low"] == ""
    assert rows["hqq-4bit"][SPEEDUP] == "" and rows["hqq-4bit"]["not_timed"] == SIMULATED


def test_two_timed_variants_have_their_fronts_told() -> None:
    text = scoreboard_text(board(FAST, CLOSE))
    assert "Pareto front of decode speed and KL: awq-4bit, w8a8" in text
    assert "Pareto front of peak memory and KL: awq-4bit, w8a8" in text


def test_a_scoreboard_without_speed_is_as_it_was() -> None:
    """Nobody asked for speed: neither columns nor remarks. Somebody did, and got none: the reason."""
    plain = board(variant("a", kl=0.1, size=1, not_timed=NO_SPEED_STAGE))
    assert "timed" not in scoreboard_text(plain) and "timed in" not in scoreboard_columns(plain)
    assert plain.serving_fronts == {}
    assert "Not timed: hqq-4bit" in scoreboard_text(board(NOT_TIMED))


def test_the_page_shows_speed_where_it_says_what_to_ship() -> None:
    content = page_content()
    near = replace(served("near", kl=0.01, size=4e6, speedup=1.5, memory=0.6), run_id="near" * 8)
    shown = replace(content, board=board(near, variant("far", kl=0.2, size=3e6, run_id="far" * 8)))
    page = render_page(shown)
    assert f"timed in {VLLM}" in page and "Decode speedup (batch 1)" in page
    told = "decodes at 1.50x [1.40, 1.60] the baseline's speed, 0.60x its peak memory"
    assert told in choice_sentence(shown) and str(escape(told)) in page
