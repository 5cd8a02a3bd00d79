"""What the report says beside the numbers: n, unscored items, noise floor, gates, failed stages, gaps.

What a result shows of itself: a short `repr`, a table in a notebook, and a data frame with labels and units.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlflow_compress as mc
from mlflow_compress.commands.evaluate.result import Evaluation
from mlflow_compress.commands.report.run import VariantsReport
from mlflow_compress.commands.speed.run import SpeedMeasurement
from mlflow_compress.metrics import MetricInputs, compute_all, unmet
from mlflow_compress.metrics.core.account import Account
from mlflow_compress.records import Items, MetricResult
from mlflow_compress.reporting import headline
from mlflow_compress.reporting.details import flips_table
from mlflow_compress.reporting.figures import draw_all
from mlflow_compress.reporting.html import render_report
from mlflow_compress.tracking.tracked_run import NOTE_LIMIT
from tests.page_contents import HOSTILE, page_content
from tests.report_results import FAST, SIZES, Page, by_name, result, rows_of


def test_n_is_in_every_table_with_what_is_unscored():
    flips = result("distance/flips_pct", 5.0, 4.0, 6.0, n=1836, n_unscored=2)
    tokens = result("distance/corpus_kl_mean", 0.01, 0.009, 0.011, n=9180)
    assert rows_of(flips)["Answers flipped"].n == "1,836 (2 unscored)"
    assert rows_of(tokens)["KL, corpus (nats)"].n == "9,180 tokens"
    note = "2 of 1,838 items unscored: an option is longer than the model's context."
    pooled = by_name(flips, replace(flips, name="distance/all_flips_pct"))
    for text in (
        headline.headline_table(pooled),
        headline.note_markdown("v", pooled),
        Page(render_report(**shown(pooled))).text,
    ):
        assert text.count("1,836 (2 unscored)") >= 2
        assert text.count(note) == 1
    assert "unscored:" not in headline.headline_table(by_name(tokens))


def shown(pooled):
    return {"title": "t", "verdict": "v", "results": list(pooled.values())}


def test_the_account_is_the_first_line_after_the_verdict():
    pooled = by_name(result("distance/flips_pct", 5.0, 4.0, 6.0))
    account = Account(asked=320, cut=3, setting={"baseline": "demo"})
    sentence = "Account: all 320 items scored; 3 of 320 prompts were cut to the model's context. Baseline demo."
    assert headline.note_markdown("v", pooled, account=account).splitlines()[:3] == ["v", "", sentence]
    assert f"v {sentence} Numbers" in " ".join(Page(render_report(**shown(pooled), account=account)).text.split())


def test_a_noise_floor_from_a_sample_says_so():
    kl, corpus = result("distance/kl_mean", 0.02, n=1920), result("distance/corpus_kl_mean", 0.01, n=9180)
    floor, again = result("noise/kl_mean", 0.0, n=800), result("noise/corpus_kl_mean", 0.0, n=9180)
    sampled = headline.footnotes(by_name(kl, corpus, floor, again))
    assert sampled == [
        "Noise floor (the baseline against itself in a second run) from 800 items (the distances: 1,920) "
        "and 9,180 corpus tokens."
    ]
    assert headline.footnotes(by_name(kl, replace(floor, n=1920)))[0].endswith("from 1,920 items.")
    assert headline.footnotes(by_name(kl)) == []


def test_the_kl_is_shown_with_what_the_gate_reads():
    kl = result("distance/kl_mean", 0.02, 0.01, 0.05, n=300)
    item, percent = result("distance/kl_share_top_item_pct", 18.4), result("distance/kl_share_top_percent_pct", 30.06)
    clipped = result("distance/kl_clipped_mean", 0.015, 0.01, 0.02, n=300)
    above = result("distance/kl_above_clip_pct", 0.33, 0.06, 1.9, n=300)
    rows = rows_of(kl, item, percent, clipped, above)
    assert rows["KL, items (nats)"].difference == "0.02 [0.01, 0.05]"
    assert rows["KL in largest item / 1 %"].difference == "18.4 % / 30.1 % of the mean"
    assert rows["KL per item, clipped (nats)"].difference == "0.015 [0.010, 0.020]"
    # A mean has no interval where an item is above the clip.
    alone = replace(kl, low=None, high=None)
    rows = rows_of(alone, item, percent, clipped, above)
    assert rows["KL, items (nats)"].difference == "0.0200"
    assert rows["KL per item, clipped (nats)"].difference == "0.015 [0.010, 0.020]"
    assert rows["Items above the clip"].difference == "0.3 % [0.1, 1.9]"
    sentence = "The mean KL has no interval, as items are above the clip: gates read the clipped KL and their share."
    assert sentence in " ".join(headline.footnotes(by_name(alone, item, clipped, above)))
    assert headline.footnotes(by_name(kl, item, clipped, above)) == []
    # Equal models have no tail to distrust; without the values that replace it nothing is claimed about a gate.
    assert headline.footnotes(by_name(replace(alone, value=0.0), replace(clipped, value=0.0))) == []
    assert headline.footnotes(by_name(alone)) == []


def test_generated_answers_read_well():
    generated = by_name(
        result("distance/kl_items", 0.0, n=152),
        result("distance/flips_pct", 4.0, 1.8, 8.3, n=150, n_unscored=2),
        result("quality/accuracy", 0.5, 0.42, 0.58, n=150, n_unscored=2),
        result("quality/accuracy_delta", -0.02, -0.05, 0.01, n=150, n_unscored=2),
    )
    text = headline.headline_table(generated, SIZES)
    assert "not measured: answers are generated" in text
    assert "2 of 152 items unscored: no answer was generated." in text
    assert "not measured: answers are generated" in Page(render_report(**shown(generated))).text
    assert "generated" not in headline.headline_table(by_name(result("distance/corpus_kl_mean", 0.1)))


def test_generated_answers_alone_can_be_drawn_and_reported(full, tmp_path):
    inputs = full[0]
    rows = [row for row in inputs.baseline.items.table.to_pylist() if row["family"] == "exact"]
    gone = {"option_scores": None, "option_distances": None, "token_scores": None, "token_distances": None}
    items = Items.from_rows(rows)
    one, other = (replace(run, items=items, **gone) for run in (inputs.baseline, inputs.variant))
    found = MetricInputs(one, other, settings=FAST)
    results = compute_all(found)
    figures = draw_all(found, results, [], "mine", tmp_path)
    page = render_report(title="t", verdict="v", results=results, figures=figures, flips=flips_table(found))
    assert "trivia" in Page(page).text


def test_a_failed_stage_is_named_with_what_is_missing():
    pooled = by_name(result("distance/flips_pct", 5.0, 4.0, 6.0))
    failed = {"judge": "The endpoint answered 401 <no key>."}
    sentence = (
        "Stage judge failed: The endpoint answered 401 <no key>. Missing: First divergent token, Length of answers, "
    )
    text = Page(render_report(**shown(pooled), failed_stages=failed)).text
    assert text.index("v\n") < text.index(sentence) < text.index("Numbers")
    assert sentence in headline.headline_table(pooled, failed_stages=failed).replace("\n", " ")
    note = headline.note_markdown("v", pooled, failed_stages=failed)
    assert note.splitlines()[2].startswith("**Stage judge failed: The endpoint answered 401 &lt;no key>.")
    assert len(headline.note_markdown("v" * 9000, pooled, failed_stages={"judge": "e" * 9000})) < NOTE_LIMIT
    assert "failed" not in headline.note_markdown("v", pooled)


def test_what_either_stage_computed_is_not_listed_as_missing(full):
    inputs = full[0]
    evaluated = replace(inputs, embeddings=None)
    judged = MetricInputs(
        replace(inputs.baseline, items=None, option_scores=None, token_scores=None),
        replace(inputs.variant, items=None, option_scores=None, token_scores=None),
        embeddings=inputs.embeddings,
    )
    similarity = [r for r in full[1] if r.name == "judge/similarity"]
    rest = [r for r in full[1] if not r.name.startswith("judge/")]
    assert "similarity" in unmet(evaluated) and "accuracy" in unmet(judged)
    timed = dict.fromkeys(("serving_memory", "speed"), "the format is only simulated")
    listed = headline.not_computed([*rest, *similarity], evaluated=unmet(evaluated), judged=unmet(judged), timed=timed)
    assert not {"similarity", "accuracy"} & listed.keys()
    # Without the judge stage its metrics are missing for that reason, whatever the evaluation says of them.
    alone = headline.not_computed(rest, evaluated=unmet(evaluated), judged="the judge stage was not run", timed=timed)
    without = [r for r in rest if not r.name.startswith("speed/")]
    assert headline.not_computed(without, evaluated={}, judged={}, timed=timed) == timed
    assert alone["similarity"] == "the judge stage was not run"
    assert "accuracy" not in alone


def test_the_zeros_of_a_pruned_model_have_a_row_and_a_small_number_is_not_broken_after_its_hyphen():
    pruned = SimpleNamespace(**{**vars(SIZES), "size_ratio": 1.0, "sparsity": 0.5})
    rows = {row.label: row for row in headline.headline_rows({}, pruned)}
    assert (rows["Size"].difference, rows["Zeros in linear weights"].variant) == ("same size", "50 %")
    assert "Zeros in linear weights" not in headline.headline_table({}, SIZES)
    page = render_report(**{**shown(by_name()), "verdict": "KL 2.3e-05 <nats>"})
    assert '<p class="verdict">KL <span class="whole">2.3e-05</span> &lt;nats&gt;</p>' in page


def test_an_evaluation_shows_the_headline_table_and_its_frame_has_labels_and_units(full: Any) -> None:
    found = Evaluation(name="v", baseline="b", verdict=HOSTILE, results=tuple(full[1]), records_folder=Path("records"))
    assert len(found.results) > 100 and len(repr(found).splitlines()) <= 30
    assert "Accuracy " in repr(found) and " pt [" in repr(found)
    page = Page(found._repr_html_())
    assert "Noise floor" in page.text and HOSTILE in page.text and "img" not in page.tags
    frame = found.to_pandas()
    assert frame["name"].is_unique and len(frame) == len(found.pooled) < len(found.results)
    assert not frame.isna().all().any()
    row = frame[frame["name"] == "distance/flips_pct"].iloc[0]
    assert (row["label"], row["unit"]) == ("Answers flipped", "percent") and row["low"] < row["value"] < row["high"]
    assert list(frame.columns) == found.to_arrow().column_names


def test_a_report_shows_the_scoreboard_and_every_list_is_short() -> None:
    content = page_content()
    found = VariantsReport(board=content.board, decision=content.decision, choice="Ship near.", path=Path("page.html"))
    assert "0.010 [0.005, 0.020]" in repr(found) and "0.010" in found._repr_html_()
    frame = found.to_pandas()
    assert frame["Answers flipped (%), high"].tolist() == [2.0, 42.0] and frame["Size (bytes)"].tolist() == [4e6, 3e6]
    assert all(frame[name].notna().any() for name in frame)
    for listing in (mc.methods(), mc.tasks()):
        assert len(repr(listing).splitlines()) <= 30 and len(listing.to_pandas()) == len(listing)


def test_a_timing_shows_its_values_with_intervals_in_one_table() -> None:
    results = (
        MetricResult("speed/decode_tokens_per_second_batch_1", 12.5, 12.0, 13.0, n=5),
        MetricResult("speed/first_token_ms", 20.0, 19.0, 21.0, n=5),
    )
    found = SpeedMeasurement(
        name="v",
        baseline="b",
        results=results,
        records_folder=Path("records"),
        values={"speed/load_seconds": 1.5},
        described={"runtime": "vLLM", "dtype": "bf16"},
    )
    first, head, _, decode, token, load = found.as_text().splitlines()
    assert first.startswith("v in vLLM (bf16), without its baseline: 12.5 tokens per second")
    assert "value [95 % interval]" in head and load == "speed/load_seconds 1.5"
    assert decode.split() == ["speed/decode_tokens_per_second_batch_1", "12.50", "[12.00,", "13.00]", "5", "0"]
    assert token.split() == ["speed/first_token_ms", "20.00", "[19.00,", "21.00]", "5", "0"]
