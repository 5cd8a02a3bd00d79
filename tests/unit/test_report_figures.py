"""Figures are drawn for whatever inputs there is, and state what the numbers say."""

import struct
from dataclasses import replace

import matplotlib
import numpy as np
import pytest

from mlflow_compress.decide.gates import DECODE_SPEEDUP, KL, MEMORY_RATIO, SIZE
from mlflow_compress.decide.scoreboard import BITS, scoreboard
from mlflow_compress.metrics import MetricInputs, MetricSettings, compute_all
from mlflow_compress.metrics.greedy_answers import Forks
from mlflow_compress.metrics.margins import share_by_bin
from mlflow_compress.metrics.stats.significance import Flips
from mlflow_compress.records import Items, MetricResult
from mlflow_compress.reporting.figures import draw_all, draw_scoreboard
from mlflow_compress.reporting.plots import distances
from mlflow_compress.reporting.plots.style import RC
from mlflow_compress.reporting.plots.variants import MEMORY_AXIS, SPEED_AXIS, draw_variants
from tests import written_records
from tests.scored_variants import variant

ITEMS = ["size_against_kl", "kl_by_item", "change_by_margin", "flips_by_category", "baseline_and_variant"]
EQUAL = [*ITEMS, "kl_by_position"]
ALL = [*EQUAL, "kl_by_context"]
FAST = MetricSettings(resamples=100, method="percentile")
VARIANTS = [
    {"name": "none", BITS: 16.0, SIZE: 100, KL: 0.0, f"{KL}_low": 0.0, f"{KL}_high": 0.0},
    {"name": "a$b$", BITS: 4.1, SIZE: 30, KL: 0.1, f"{KL}_low": 0.0, f"{KL}_high": 0.2},
    {"name": "mine", BITS: 4.1, SIZE: 30, KL: 0.1},
]


def drawn(figures):
    """Names in order; every file must be a PNG that is wide enough and not blank."""
    for figure in figures:
        data = figure.path.read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        assert 1000 <= struct.unpack(">I", data[16:20])[0] <= 1200
        assert (matplotlib.image.imread(figure.path)[..., :3].min(axis=-1) < 0.5).mean() > 0.002
        assert figure.title and figure.caption.endswith(".")
    return [figure.path.stem for figure in figures]


@pytest.fixture(autouse=True)
def style():
    with matplotlib.rc_context(RC):
        yield


@pytest.fixture(scope="module")
def full():
    found = replace(written_records.inputs(), settings=FAST)
    return found, compute_all(found)


def test_every_figure_of_full_evidence(full, tmp_path):
    before = dict(matplotlib.rcParams)
    with_judge = [*ITEMS, "answers_part", "kl_by_position", "kl_by_context"]
    assert drawn(draw_all(*full, VARIANTS, "mine", tmp_path / "new" / "folder", judged=full[0])) == with_judge
    assert dict(matplotlib.rcParams) == before


def test_identical_models(full, tmp_path):
    same = written_records.identical()
    figures = draw_all(same, compute_all(same), VARIANTS[:1], "none", tmp_path)
    assert drawn(figures) == EQUAL
    titles = {figure.path.stem: figure.title for figure in figures}
    assert titles["kl_by_item"] == "KL is exactly 0 for all 120 items"
    assert titles["change_by_margin"].startswith("No answer changed")
    assert titles["flips_by_category"].startswith("No answer changed")
    assert titles["baseline_and_variant"].startswith("Unchanged")


def test_without_corpus_or_with_nothing_but_a_corpus(full, tmp_path):
    inputs = full[0]
    gone = {"token_scores": None, "token_distances": None}
    items = MetricInputs(replace(inputs.baseline, **gone), replace(inputs.variant, **gone), settings=FAST)
    assert drawn(draw_all(items, compute_all(items), [], "mine", tmp_path / "items")) == ITEMS[1:]
    gone = dict.fromkeys(("items", "option_scores", "option_distances", "generations", "judgments"))
    corpus = MetricInputs(replace(inputs.baseline, **gone), replace(inputs.variant, **gone), settings=FAST)
    figures = draw_all(corpus, compute_all(corpus), [], "mine", tmp_path / "corpus")
    assert drawn(figures) == ["kl_by_item", "kl_by_position", "kl_by_context"]
    assert "681 corpus tokens" in figures[0].caption


def test_a_baseline_alone_has_no_figures(full, tmp_path):
    alone = MetricInputs(full[0].baseline)
    assert draw_all(alone, compute_all(alone), [], "x", tmp_path) == []


def test_single_category(full, tmp_path):
    inputs = full[0]
    rows = [{**r, "category": r["category"] and "law"} for r in inputs.baseline.items.table.to_pylist()]
    items = Items.from_rows(rows)
    one = MetricInputs(replace(inputs.baseline, items=items), replace(inputs.variant, items=items), settings=FAST)
    assert drawn(draw_all(one, compute_all(one), VARIANTS[2:], "mine", tmp_path)) == ALL


def test_the_variants_finding_by_hand():
    # "mine" (4.1 bits, KL 0.1): only "b" is at most as large and at most as far.
    b = {"name": "b", BITS: 4.0, KL: 0.05}
    title = draw_variants([VARIANTS[0], VARIANTS[2], b], "mine").title
    alone = draw_variants([VARIANTS[0], VARIANTS[2]], "mine")
    single = draw_variants([VARIANTS[2], {"name": "no size", KL: 0.1}], "mine")
    assert title == "mine: KL 0.1 at 4.10 bits per weight; b is both as small and as close"
    assert alone.title.endswith("no other of 2 variants is both as small and as close")
    assert single.title == "mine: KL 0.1 at 4.10 bits per weight"
    assert "1 without size or KL is left out" in single.caption
    rows = [{"name": n, SIZE: size, KL: kl} for n, size, kl in (("a", 4e6, 0.1), ("b", 4e6, 0.3), ("c", 5e6, 0.01))]
    plain, cache = (draw_variants(rows, None, front=front) for front in ("ac", "abc"))
    assert plain is not None and "smaller caches" not in plain.caption
    assert cache is not None and "; those above its line have smaller caches" in cache.caption
    assert draw_variants([{"name": "x", KL: None, SIZE: 3}], "x") is None


def test_the_finding_on_speed_and_on_memory_by_hand():
    # "mine" decodes at 1.2x with KL 0.1: "fast" is faster and closer. It takes 0.8 of the memory: "fast" takes more.
    rows = [
        {"name": "mine", KL: 0.1, DECODE_SPEEDUP: 1.2, MEMORY_RATIO: 0.8},
        {"name": "fast", KL: 0.05, DECODE_SPEEDUP: 1.3, MEMORY_RATIO: 0.9},
        {"name": "not timed", KL: 0.01, SIZE: 4},
    ]
    speed = draw_variants(rows, "mine", costs=(SPEED_AXIS,), fewest=2)
    memory = draw_variants(rows, "mine", costs=(MEMORY_AXIS,), fewest=2)
    alone = draw_variants(rows[::2], "mine", costs=(SPEED_AXIS,), fewest=2)
    front = draw_variants(rows, None, costs=(SPEED_AXIS,), front=["fast"])
    start = "mine: KL 0.1 at 1.20x the baseline's decode speed"
    assert speed.title == f"{start}; fast is both as fast and as close"
    assert memory.title.endswith(
        "0.80x the baseline's peak memory; no other of 2 variants is both as small in memory and as close"
    )
    assert "faster is further right" in speed.caption and "1 without decode speed or KL is left out" in speed.caption
    assert alone is None
    assert front.title == "1 of 2 variants is on the Pareto front of decode speed and KL"


def test_the_scoreboard_draws_a_front_for_each_cost_that_two_variants_have(tmp_path):
    timed = {"speed/decode_ratio_batch_1": 1.5, "speed/memory_peak_ratio": 0.7}
    two = [variant("a", kl=0.1, size=3e6, more=timed), variant("b", kl=0.2, size=2e6, more=timed)]
    size, speed, memory = "pareto_front", "pareto_front_speed", "pareto_front_memory"
    for rows, names in ((two, [size, speed, memory]), ([two[0], variant("c", kl=0.2, size=2e6)], [size])):
        board = scoreboard(rows, baseline="base", evaluation="e")
        found = [figure.path.stem for figure in draw_scoreboard(board, tmp_path) if figure.path.stem != "correlations"]
        assert found == names


def test_of_models_that_think_the_size_stands_with_the_tokens_to_a_right_answer(tmp_path):
    cost, kl = "reasoning/tokens_per_right_ratio", "reasoning/chain_kl"
    row = {"name": "mine", BITS: 4.1, kl: 0.1, cost: 1.4, f"{cost}_low": 1.2, f"{cost}_high": 1.6}
    drawing = draw_variants([row, {"name": "b", BITS: 5.0, kl: 0.2}], "mine")
    assert drawing.title == (
        "mine: KL 0.1 at 4.10 bits per weight, but 1.40x [1.20, 1.60] as many tokens to a right answer; "
        "no other of 2 variants is both as small and as close"
    )
    assert "own thoughts" in drawing.canvas.axes[0].get_ylabel()
    two = [variant(name, size=size, more={kl: 0.1, cost: size}) for name, size in (("a", 2), ("b", 3))]
    found = draw_scoreboard(scoreboard(two, baseline="base", evaluation="e"), tmp_path)
    titles = {figure.path.stem: figure.title for figure in found}
    assert titles["pareto_front_tokens"] == (
        "1 of 2 variants is on the Pareto front of tokens to a right answer and KL"
    )


def test_kl_by_position_and_by_context_states_both_ends():
    parts = {"tokens 8-15": 0.4, "token 1": 0.1, "tokens 2-3": 0.2, "tokens 4-7": 0.3, "reasoning": 0.2, "answer": 0.3}
    found = {
        name: MetricResult(
            name="distance/traces_kl", value=kl, low=kl / 2, high=2 * kl, n=5, task="traces", category=name
        )
        for name, kl in parts.items()
    }
    whole = MetricResult(name="distance/traces_kl", value=0.25, low=0.2, high=0.3, n=30)
    drawing = distances.draw_positions(whole, found)
    ends = "0.1 at the first token and 0.4 at tokens 8-15"
    assert drawing.title == f"KL on text that the baseline wrote: 0.25 nats per token, {ends}"
    [axes] = drawing.canvas.axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["token 1", "tokens 2-3", "tokens 4-7", "tokens 8-15", "reasoning", "answer"]

    def part(kl, name=None):
        return MetricResult(name="distance/corpus_kl_mean", value=kl, n=5, task="corpus", category=name)

    parts = {name: part(kl, name) for name, kl in (("tokens 256-287", 0.1), ("tokens 288-319", 0.4))}
    drawing = distances.draw_contexts(part(0.25), parts)
    assert drawing.title == "KL as the context grows: 0.1 nats at tokens 256-287, 0.4 at tokens 288-319"
    [axes] = drawing.canvas.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == list(parts)


def test_ends_whose_intervals_overlap_are_not_told_apart():
    def ends(first, last):
        found = [
            MetricResult(
                name="distance/corpus_kl_mean", value=0.2, low=low, high=high, n=5, task="corpus", category=name
            )
            for name, (low, high) in (("tokens 0-1", first), ("tokens 2-3", last))
        ]
        return distances.draw_contexts(found[0], {part.category: part for part in found}).title

    assert ends((0.1, 0.2), (0.2, 0.3)).endswith(" (not told apart)")
    assert ends((0.1, 0.2), (0.21, 0.3)).endswith("0.2 at tokens 2-3")


def test_labels_do_not_overlap():
    crowd = [{"name": f"method-{i}-4bit-g128", BITS: 4.0 + 0.04 * i, KL: 0.1 + 0.004 * i} for i in range(8)]
    canvas = draw_variants([*crowd, {"name": "far", BITS: 8.0, KL: 0.001}], crowd[3]["name"]).canvas
    axes = canvas.axes[0]
    boxes = [t.get_window_extent() for t in axes.texts if t.get_text()]
    assert len(boxes) == 9
    overlaps = [(i, j) for i in range(9) for j in range(i) if boxes[i].overlaps(boxes[j])]
    assert overlaps == []
    frame = axes.get_window_extent()
    assert all(frame.x0 <= box.x0 and box.x1 <= frame.x1 for box in boxes)


def test_findings_of_margins_zeros_forks_and_many_categories_by_hand():
    # Below 0.5: margins 0.1 (changed), 0.2 (not); above: 0.8, 0.9 (neither) -> 50 % against 0 %.
    bins, wrong = (share_by_bin([0.1, 0.2, 0.8, 0.9], events) for events in ([1, 0, 0, 0], [0, 1, 0, 0]))
    assert distances.draw_margin(bins, wrong, level=0.95).title == (
        "50.0 % of answers with a margin below 0.5 changed, 0.0 % above it"
    )
    drawing = distances.draw_divergence(np.array([0.0, 0.0, 0.01, 0.02, 0.03]), unit="item")
    one = distances.draw_divergence(np.array([0.5]), unit="item")
    assert drawing.caption.endswith("2 items with a KL of exactly 0.")
    assert one.caption.endswith("no items with a KL of exactly 0.")
    # Of four answers two part, at tokens 2 and 4: half have parted by token 4.
    forks = Forks(np.array([2, 4, 6, 9]), np.array([True, True, False, False]))
    title = distances.draw_answers_part(forks, level=0.95).title
    same = distances.draw_answers_part(Forks(np.array([3]), np.array([False])), level=0.95).title
    assert title == "Half of the greedy answers have diverged by token 4; 2 of 4 greedy answers are the same to the end"
    assert same == "1 of 1 greedy answers are the same to the end"
    groups = [(f"c{i:02d}", Flips(n=100, n_correct=0, c2w=i, w2c=1, w2w=None)) for i in range(distances.MOST + 7)]
    drawing = distances.draw_categories(groups)
    assert drawing.caption.endswith("7 further categories are not drawn.")
    assert drawing.title == "Answers changed most in c30 (31.0 %), least in c00 (1.0 %)"
