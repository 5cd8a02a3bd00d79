"""The scoreboard: columns, order, Pareto fronts, correlations, warnings, speed and memory, from values by hand."""

import csv
import io
import json
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import escape

from mlflow_compress.config.policy import KlBounds, Policy
from mlflow_compress.decide import scoreboard as boards
from mlflow_compress.decide.gates import CACHE, CACHE_RATIO, DELTA
from mlflow_compress.decide.separation import ItemScores, item_scores
from mlflow_compress.errors import DataError
from mlflow_compress.metrics import MetricInputs, compute_all, headline
from mlflow_compress.metrics.core.metric_registry import all_keys
from mlflow_compress.metrics.stats.correlation import spearman_exact_p
from mlflow_compress.metrics.stats.stratified import Design
from mlflow_compress.records import MetricResult
from mlflow_compress.reporting import scoreboard_text as board_text
from mlflow_compress.reporting.page.variants_page import choice_sentence, render_page
from tests.metric_records import QUICK, identical, inputs
from tests.page_contents import page_content
from tests.scored_variants import VLLM, scores, served, variant

FLIPS = "distance/flips_pct"
SPEEDUP, _, MEMORY = boards.SERVING
COST = boards.COST_RATIO.name
SIMULATED = "the format hqq_packed is only simulated: no kernel computes with it"


def board(*variants):
    return boards.scoreboard(variants, baseline="base", evaluation="e" * 16)


def test_columns_show_what_the_metrics_declare_and_one_that_nobody_has_is_left_out() -> None:
    """Every main metric is registered, and has a label, which no table can do without."""
    declared, shown = all_keys(), {column.key: column for column in boards.columns()}
    for name in boards.MAIN_METRICS:
        key, column = declared[name], shown[name]
        assert column.main and column.label == key.label != ""
        assert (column.unit, column.direction) == (key.unit, key.direction)
    assert len(shown) == len(boards.columns())
    assert all(column.label and column.meaning for column in boards.columns())
    found = board(variant("a", kl=0.1, size=5), variant("b", size=4, more={FLIPS: 3.0}))
    assert [column.key for column in found.columns] == ["size/bytes", FLIPS, "distance/kl_mean"]
    assert FLIPS not in found.rows[0].cells and found.rows[1].cells[FLIPS].value == 3.0
    assert found.to_dict()["rows"][0]["accuracy_p_holm"] is None


def test_finished_variants_come_first_and_the_closest_on_top() -> None:
    found = board(
        variant("late", status="failed", reason="out of memory"),
        variant("far", kl=0.2, size=1),
        variant("never", status="unsupported", reason="3 bits"),
        variant("near", kl=0.1, size=9),
        variant("unmeasured", size=1),
    )
    assert [row.name for row in found.rows] == ["near", "far", "unmeasured", "late", "never"]
    assert [row.name for row in found.finished] == ["near", "far", "unmeasured"]


def test_a_variant_on_drawn_items_stands_beside_one_that_needed_all_of_them() -> None:
    rng = np.random.default_rng(0)
    every = [scores(rng.random(60) < 0.9, rng.exponential(0.01, 60)) for _ in range(2)]
    some = replace(every[0][np.arange(20)], design=Design(*np.repeat([[0], [60], [20]], 20, axis=1)))
    found = board(variant("drawn", kl=0.01, items=some), variant("whole", kl=0.02, items=every[1]))
    [pair] = found.separations
    assert pair.correctness is not None and pair.correctness.n == 20


def test_items_are_added_where_neighbours_are_open_and_their_difference_matters() -> None:
    rng = np.random.default_rng(1)
    kl = rng.exponential(0.01, 400)
    design = Design(*np.repeat([[0], [400], [100]], 100, axis=1))

    def drawn(by: float, spread: float) -> ItemScores:
        every = scores(np.ones(400), kl + by + spread * rng.normal(size=400))
        return replace(every[np.arange(100)], design=design)

    some = {"a": drawn(0, 0), "b": drawn(0.002, 0.008), "far": drawn(0.3, 0.006), "a twin": drawn(0, 1e-5)}
    rows = [
        variant(name, kl=float(items.kl.mean()), items=items, more={FLIPS: 1.0}, drawn="auto+100")
        for name, items in some.items()
    ]
    found = board(*rows)
    wanted = boards.more_items(found, Policy())
    assert wanted.keys() <= {"a", "b", "a twin"} and "b" in wanted and all(100 < n <= 400 for n, _ in wanted.values())
    assert (
        boards.more_items(found, Policy(kl=KlBounds(max_kl=5.0))) == {}
    )  # a fiftieth of it is more than they differ by
    # Two that surely have more KL than is allowed stay as they are.
    high = {boards.KL: MetricResult(boards.KL, 0.3, 0.2, 0.4)}
    rows = [replace(row, results={**row.results, **high}) for row in rows]
    assert boards.more_items(board(*rows), Policy()) == {}
    assert "Items scored, of 400: " in board_text.scoreboard_text(found)
    assert "far 100 (more, to tell it apart)" in board_text.scoreboard_text(found).replace("\n  ", " ")


def test_the_front_is_what_nobody_beats_in_both() -> None:
    points = {"small": (1.0, 9.0), "close": (8.0, 2.0), "worse": (8.0, 3.0), "twin": (8.0, 2.0), "middle": (4.0, 4.0)}
    assert boards.pareto_front(points) == ("small", "middle", "close", "twin")
    assert boards.pareto_front({}) == ()


def test_a_smaller_cache_is_smaller_too() -> None:
    """Of three with the same weights, the closest has a plain cache; the farthest is beaten by one with the same cache."""
    caches = {"plain": (0.1, None), "small": (0.3, 100.0), "beaten": (0.4, 100.0)}
    rows = [variant(name, kl=kl, size=1e6) for name, (kl, _) in caches.items()]
    rows = [
        row if bytes_ is None else replace(row, sizes={**row.sizes, CACHE: bytes_, CACHE_RATIO: 4.0})
        for row, (_, bytes_) in zip(rows, caches.values(), strict=True)
    ]
    found = board(*rows)
    assert found.pareto == ("plain", "small")
    assert "* no other variant is both as small in weights and cache and as close" in board_text.scoreboard_text(found)
    assert board(rows[0], variant("other", kl=0.3, size=1e6)).pareto == ("plain",)


@QUICK
@given(st.dictionaries(st.text(min_size=1), st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12))
def test_whoever_is_not_on_the_front_is_beaten_by_someone_on_it(points: dict[str, tuple[int, int]]) -> None:
    front = boards.pareto_front(points)
    beats = lambda a, b: a[0] <= b[0] and a[1] <= b[1] and a != b  # noqa: E731
    assert not any(beats(points[a], points[b]) for a in front for b in front)
    for name in points.keys() - set(front):
        assert any(beats(points[other], points[name]) for other in front)


def test_p_values_of_the_accuracy_are_corrected_over_variants() -> None:
    """0.02, 0.01 and 0.5: Holm gives 2 x 0.02, 3 x 0.01 (and 0.04 is not below 0.03), 0.5."""
    p = "quality/mcnemar_p"
    found = board(*(variant(n, kl=k, more={p: v}) for n, k, v in (("a", 1, 0.02), ("b", 2, 0.01), ("c", 3, 0.5))))
    assert [row.accuracy_p for row in found.rows] == [0.02, 0.01, 0.5]
    assert [row.accuracy_p_holm for row in found.rows] == pytest.approx([0.04, 0.03, 0.5])
    assert [row.accuracy_moved for row in found.rows] == [True, True, False]
    assert board(variant("a", kl=1)).rows[0].accuracy_moved is None


def test_correlations_are_between_ranks_of_main_metrics_or_missing_with_the_reason() -> None:
    """Flips and KL rank four variants alike: +1. Of the 24 orders, this one and its reverse are as extreme: p = 1/12."""
    rows = [variant(str(i), kl=k, more={FLIPS: f}) for i, (k, f) in enumerate(((1, 10), (2, 20), (3, 90), (4, 91)))]
    [found] = board(*rows, variant("z", kl=9)).correlations
    assert {found.first, found.second} == {FLIPS, "distance/kl_mean"}
    assert (found.value, found.n, found.low) == (1.0, 4, None)
    assert found.p == pytest.approx(1 / 12)
    [few] = board(*(variant(str(i), kl=i, more={FLIPS: i}) for i in range(3))).correlations
    assert few.value is None and few.p is None and few.reason == "3 variants have both, at least 4 are needed"
    [same] = board(*(variant(str(i), kl=i, more={FLIPS: 1.0}) for i in range(5))).correlations
    assert same.value is None and same.reason == "one of them is the same for all variants"
    more = {FLIPS: 1.0, "distance/js_mean": 2.0}
    found = board(*(variant(str(i), kl=i, more={n: i * k for n, k in more.items()}) for i in range(5))).correlations
    assert {(c.first, c.second) for c in found} == {(FLIPS, "distance/kl_mean")}


@QUICK
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=4, max_size=7))
def test_the_exact_p_value_is_a_share_of_orders_that_no_monotone_change_moves(pairs: list[tuple[int, int]]) -> None:
    x, y = (np.array(side, dtype=float) for side in zip(*pairs, strict=True))
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        with pytest.raises(DataError):
            spearman_exact_p(x, y)
        return
    p = spearman_exact_p(x, y)
    assert 0 < p <= 1
    assert p == spearman_exact_p(np.exp(x), -(y**3)) == spearman_exact_p(y, x)


def test_fewer_bits_that_beat_more_are_told() -> None:
    rng = np.random.default_rng(0)
    near = scores([1] * 300, rng.exponential(0.01, 300))
    far = scores([1] * 300, rng.exponential(0.5, 300))
    found = board(
        variant("rtn-3bit", kl=0.01, size=1, bits=3, items=near), variant("rtn-4bit", kl=0.5, size=2, bits=4, items=far)
    )
    [warning] = found.warnings
    assert warning.kind == "fewer_bits_beat_more" and warning.variants == ("rtn-3bit", "rtn-4bit")
    assert warning.text == "rtn-3bit has fewer bits than rtn-4bit and a smaller KL (0.01 < 0.5)"
    other = board(variant("awq-3bit", kl=0.01, bits=3), variant("rtn-4bit", kl=0.5, bits=4))
    assert other.warnings == ()  # another method


def test_equals_and_what_has_no_results_are_told() -> None:
    same = scores([1, 0, 1], [0.1, 0.2, 0.3])
    found = board(
        variant("a", kl=0.2, items=same),
        variant("b", kl=0.2, items=same),
        variant("c", status="failed", reason="killed by SIGKILL"),
        variant("d", status="unsupported", reason="hqq takes 1, 2, 3, 4, 8 bits"),
    )
    assert [(w.kind, w.text) for w in found.warnings] == [
        ("failed", "c failed: killed by SIGKILL"),
        ("unsupported", "d was not started: hqq takes 1, 2, 3, 4, 8 bits"),
        ("not_told_apart", "a and b cannot be told apart by their KL"),
    ]


def test_a_variant_that_lacks_scores_is_told() -> None:
    """It has the smallest KL, of the few items that were scored: it is neither the closest nor on the front."""
    lacks = replace(variant("few", kl=0.01, size=1), lacking=("46 % of the items have no score > 1 %",))
    found = board(lacks, variant("near", kl=0.1, size=9))
    assert [warning.kind for warning in found.warnings] == ["no_verdict"] and found.pareto == ("near",)
    assert board_text.finding(found) == (
        "no verdict on few: 46 % of the items have no score > 1 %; 2 variants against base; "
        "closest is near with a KL of 0.100; on the Pareto front of size and KL: near"
    )


def test_the_legend_says_who_is_worse_no_worse_or_open() -> None:
    """9 of 100 items are discordant: maybe 12.2 % of all, of which 3,600 settle every change with a margin of 2."""
    ends = {"a": (-0.05, -0.08, -0.02), "b": (0.0, -0.009, 0.009), "c": (0.0, -0.03, 0.03), "d": (0.0, None, None)}
    variants = [
        replace(
            variant(name, kl=0.1, size=5),
            results={DELTA: MetricResult(DELTA, *change, n=100), FLIPS: MetricResult(FLIPS, 9.0, 5.0, 15.0, n=100)},
        )
        for name, change in ends.items()
    ]
    lacks = replace(variants[0], name="e", lacking=("46 % of the items have no score > 1 %",))
    found = boards.scoreboard([*variants, lacks], baseline="base", evaluation="e" * 16, margin=2.0)
    assert [line for line in board_text.scoreboard_text(found).splitlines() if line.startswith("Accuracy ")] == [
        "Accuracy no worse than 2 points: b",
        "Accuracy open (items that would settle it): c (3,600)",
        "Accuracy worse: a",
    ]
    assert {row.name: row.harm.word if row.harm else None for row in found.rows} == {
        "a": "worse", "b": "no worse", "c": "open", "d": None, "e": None
    }  # fmt: skip
    assert found.to_dict()["rows"][2]["harm"]["items"] == 3_600


def test_two_variants_of_one_name_are_refused() -> None:
    with pytest.raises(DataError, match="Two variants have one name"):
        board(variant("a"), variant("a"))


def test_the_order_of_the_variants_does_not_matter() -> None:
    rng = np.random.default_rng(3)
    given_ = [
        variant(
            f"v{i}",
            kl=float(rng.random()),
            size=float(rng.random()),
            items=scores(rng.integers(0, 2, 50), rng.random(50)),
        )
        for i in range(6)
    ]
    first = json.dumps(board(*given_).to_dict(), allow_nan=False)
    again = random.Random(1).sample(given_, len(given_))
    assert json.dumps(board(*again).to_dict(), allow_nan=False) == first


def test_real_records_give_the_arrays_behind_the_headline_values() -> None:
    """The mean of the items' KL is the headline's, and the share of right ones its accuracy."""
    full = inputs()
    pooled, found = headline(compute_all(full)), item_scores(full)
    assert np.nanmean(found.kl) == pytest.approx(pooled["distance/kl_mean"].value)
    assert np.nanmean(found.correct) == pytest.approx(pooled["quality/accuracy"].value)
    unchanged = item_scores(identical(full))
    assert np.nanmax(unchanged.kl) == 0
    assert np.array_equal(
        unchanged.correct, item_scores(MetricInputs(full.baseline, full.baseline)).correct, equal_nan=True
    )


def real_board():
    full = inputs()
    results = headline(compute_all(full))
    more = {"results": results, "items": item_scores(full), "sizes": {"size/bytes": 2e6, "size/ratio": 4.0}}
    one = type(variant("x"))(
        name="rtn-4bit", method="rtn", bits=4.0, run_id="1" * 32, seconds={"evaluate": 3.2}, **more
    )
    bad = variant("awq|<b>3*", method="awq", status="failed", reason="=1+1 <script>\nsecond line")
    return board(one, bad)


def test_text_markdown_and_csv_show_the_same_and_escape_what_is_not_theirs() -> None:
    found = real_board()
    text, markdown = board_text.scoreboard_text(found), board_text.scoreboard_markdown(found)
    head = text.partition("---")[0].splitlines()
    assert head[-1].startswith("variant") and "[95\u00a0%]" in head[-1]
    assert (
        "rtn-4bit  " in text and "rtn-4bit *" not in text and "failed" in text
    )  # a star on every variant tells none apart
    assert "<b>" not in markdown and "<script>" not in markdown and "awq\\|&lt;b>3\\*" in markdown
    widths = {line.count("|") - line.count("\\|") for line in markdown.splitlines() if line.startswith("|")}
    assert len(widths) == 1
    rows = list(csv.DictReader(io.StringIO(board_text.scoreboard_csv(found))))
    assert float(rows[0]["distance/kl_mean"]) == found.rows[0].cells["distance/kl_mean"].value
    assert float(rows[0]["distance/flips_pct:high"]) == found.rows[0].cells["distance/flips_pct"].high
    assert rows[1]["reason"].startswith("'=1+1") and rows[1]["distance/kl_mean"] == ""
    table = board_text.scoreboard_columns(found)
    assert len({len(column) for column in table.values()}) == 1 and table["status"][1].startswith("failed: ")


def measured(name: str, size: float, **values: float):
    """Return a variant with every main metric, each with an interval."""
    results = {
        key: MetricResult(key, values.get(key, 12.34), 11.234, 13.456, n=1620)
        for key in [
            *boards.MAIN_METRICS,
            *boards.SERVING,
            "quality/accuracy",
            "quality/accuracy_baseline",
            "uncertainty/uacc_baseline",
        ]
    }
    results |= {DELTA: MetricResult(DELTA, -0.0123, -0.0246, 0.0012, n=1620)}
    sizes = {"size/bytes": size, "size/ratio": 4e9 / size, "size/bits_per_weight": 4.126}
    return replace(
        variant(name, runtime=VLLM), results=results, sizes=sizes, seconds={"quantize": 30.0, "evaluate": 1234.5}
    )


def test_models_that_think_are_as_close_as_on_the_baselines_own_thoughts() -> None:
    """Where no item has a KL: near has the smaller one of thoughts; far is smaller, and both are on the front."""
    made = {"near": (0.001, -0.01, 1.05, 9), "far": (0.2, -0.4, 2.5, 5)}
    found = board(
        *(
            variant(name, size=size, more={boards.CHAIN_KL.name: kl, boards.PASS_DELTA.name: delta, COST: cost})
            for name, (kl, delta, cost, size) in made.items()
        )
    )
    assert [row.name for row in found.rows] == ["near", "far"] and found.pareto == ("far", "near")
    assert found.serving_fronts == {COST: ("near",)}
    assert board_text.finding(found).endswith("closest is near with a KL of 0.00100 on the baseline's own thoughts")
    assert "Pareto front of tokens to a right answer and KL: near" in board_text.legend(found)
    lines = board_text.scoreboard_text(found).splitlines()
    assert all(any(text in line for line in lines) for text in ("-40.0 pt", "2.50x", "0.200"))
    baseline = MetricResult("reasoning/pass_at_1_baseline", 0.84, n=8)
    one = variant("near", more={boards.PASS_DELTA.name: -0.01, "reasoning/pass_at_1": 0.83})
    text = board_text.scoreboard_text(board(replace(one, results=one.results | {baseline.name: baseline})))
    assert "right 84.0 %" in text
    assert board(variant("a", kl=0.1)).distance == "distance/kl_mean"


def test_a_terminal_of_120_columns_shows_what_decides_and_names_the_rest() -> None:
    names = [f"smoothquant-{bits}bit-g128-sym-layers-{bits}" for bits in (8, 6, 4)]
    found = board(*(measured(name, 1e9 + i) for i, name in enumerate(names)))
    text = board_text.scoreboard_text(found)
    assert max(map(len, text.splitlines())) <= 120
    head, _, rows = text.partition("---")
    for kept in ("Accuracy", "flipped", "KL"):
        assert kept in head
    assert rows.count("12.3 % [11.2, 13.5]") == 3  # the flips of every variant, with their interval
    [told] = [line for line in text.split("\n\n") if line.startswith("Not shown here, but on the page: ")]
    assert "UAcc" in told and "Answers flipped" not in told
    assert "UAcc" in board_text.scoreboard_markdown(found)  # Markdown has room for all


def test_the_baseline_has_a_row_with_its_own_values_and_no_distances() -> None:
    one = measured("a", 1e9)
    baseline = MetricResult("quality/accuracy_baseline", 0.696, 0.67, 0.72, n=1620)
    found = board(replace(one, results=one.results | {baseline.name: baseline}))
    assert found.baseline_cells["quality/accuracy"].value == 0.696 and found.baseline_cells["size/bytes"].value == 4e9
    assert not {FLIPS, "distance/kl_mean", DELTA} & set(found.baseline_cells)
    [row] = [line for line in board_text.scoreboard_text(found).splitlines() if line.startswith("base (baseline)")]
    assert "4 GB" in row and "accuracy 69.6 %" in row and row.split().count("-") >= 2
    assert board(variant("a", kl=0.1)).baseline_cells == {}


def test_the_finding_is_one_sentence() -> None:
    found = board(
        variant("near", kl=0.1, size=9),
        variant("small", kl=0.3, size=1),
        variant("beaten", kl=0.4, size=2),
        variant("bad", status="failed", reason="x"),
    )
    assert board_text.finding(found) == (
        "3 of 4 variants against base; closest is near with a KL of 0.100; on the Pareto front of size and KL: small, near"
    )
    text = board_text.scoreboard_text(found)
    assert "near *" in text and "small *" in text and "beaten *" not in text
    every = board(variant("near", kl=0.1, size=9), variant("small", kl=0.3, size=1))
    assert board_text.finding(every) == "2 variants against base; closest is near with a KL of 0.100"
    assert board_text.finding(board(variant("bad", status="failed", reason="x"))) == "None of 1 variants has results"


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
    assert [c.key for c in found.columns if c.key in boards.SERVING] == list(boards.SERVING) and all(
        c.main for c in found.columns if c.key in boards.SERVING
    )
    for text in (board_text.scoreboard_text(found), board_text.scoreboard_markdown(found)):
        assert "1.50x [1.40, 1.60]" in text and "0.60x" in text and VLLM in text
        assert f"Not timed: hqq-4bit; {SIMULATED}" in text
        assert "front of decode" not in text  # one timed variant is no choice
    table = board_text.scoreboard_columns(found)
    assert table["timed in"] == [None, VLLM] and table["not timed"] == [SIMULATED, None]
    rows = {row["variant"]: row for row in csv.DictReader(io.StringIO(board_text.scoreboard_csv(found)))}
    assert float(rows["awq-4bit"][f"{SPEEDUP}:low"]) == 1.4 and rows["awq-4bit"][f"{MEMORY}:low"] == ""
    assert rows["hqq-4bit"][SPEEDUP] == "" and rows["hqq-4bit"]["not_timed"] == SIMULATED


def test_speed_has_fronts_and_remarks_only_where_it_was_asked_for() -> None:
    text = board_text.scoreboard_text(board(FAST, CLOSE))
    assert "Pareto front of decode speed and KL: awq-4bit, w8a8" in text
    assert "Pareto front of peak memory and KL: awq-4bit, w8a8" in text
    # Nobody asked for speed: neither columns nor remarks. Somebody did, and got none: the reason.
    plain = board(variant("a", kl=0.1, size=1, not_timed=boards.NO_SPEED_STAGE))
    assert "timed" not in board_text.scoreboard_text(plain) and "timed in" not in board_text.scoreboard_columns(plain)
    assert plain.serving_fronts == {}
    assert f"Not timed: every variant; {SIMULATED}" in board_text.scoreboard_text(board(NOT_TIMED))


def test_the_page_shows_speed_where_it_says_what_to_ship() -> None:
    content = page_content()
    near = replace(served("near", kl=0.01, size=4e6, speedup=1.5, memory=0.6), run_id="near" * 8)
    shown = replace(content, board=board(near, variant("far", kl=0.2, size=3e6, run_id="far" * 8)))
    page = render_page(shown)
    assert f"timed in {VLLM}" in page and "Decode speedup (batch 1)" in page
    told = "decodes at 1.50x [1.40, 1.60] the baseline's speed, 0.60x its peak memory"
    assert told in choice_sentence(shown) and str(escape(told)) in page


def test_a_kl_without_an_interval_is_shown_clipped() -> None:
    """What gates read of it stands in its place: as text, in the finding, in the choice and as columns of the CSV."""
    bounded = {"distance/kl_clipped_mean": 0.8, "distance/kl_above_clip_pct": 2.0}
    whole = variant("b", kl=2, more=bounded)
    kl = replace(whole.results["distance/kl_mean"], low=1.9, high=2.1)
    found = board(variant("a", kl=1, more=bounded), replace(whole, results={**whole.results, kl.name: kl}))
    lines = board_text.scoreboard_text(found).splitlines()
    assert next(line.split() for line in lines if line.startswith(("a ", "b ")))[-2:] == ["0.800", "c"]
    assert any(line.startswith("b ") and line.endswith("[1.90, 2.10]") for line in lines)
    assert any(line.startswith("c KL clipped at 1 nat per item") and line.endswith(": a 2.00 %") for line in lines)
    assert "closest is a with a clipped KL of 0.800" in board_text.finding(found)
    content = replace(page_content(), board=found)
    champion = replace(content.decision.outcomes[0].candidate, name="a")
    chosen = replace(content, decision=replace(content.decision, champion=champion))
    assert "clipped KL 0.800" in choice_sentence(chosen)
    [a, b] = csv.DictReader(io.StringIO(board_text.scoreboard_csv(found)))
    assert (a["distance/kl_mean"], a["distance/kl_clipped_mean"], b["distance/kl_clipped_mean"]) == ("1", "0.8", "")


def test_a_seed_that_was_given_is_told() -> None:
    found = board(replace(variant("a", kl=1), seed="7"), replace(variant("b", kl=2), seed="7"), variant("c", kl=3))
    [warning] = found.warnings
    assert (warning.kind, warning.variants) == ("given_seed", ("a", "b"))
    assert warning.text == "seed 7 was given: of many seeds, one may show the wanted result"
