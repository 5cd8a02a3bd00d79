"""What a result shows of itself: a short `repr`, a table in a notebook, and a data frame with labels and units."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow_compress as mc
from mlflow_compress.commands.evaluate.result import Evaluation
from mlflow_compress.commands.report.run import VariantsReport
from mlflow_compress.commands.speed.run import SpeedMeasurement
from mlflow_compress.records import MetricResult
from tests.page_contents import HOSTILE, page_content
from tests.report_results import Page


def test_an_evaluation_shows_the_headline_table_and_its_frame_has_labels_and_units(full: Any) -> None:
    found = Evaluation(name="v", baseline="b", verdict=HOSTILE, results=tuple(full[1]), records_folder=Path("records"))
    assert len(found.results) > 100 and len(repr(found).splitlines()) <= 30
    assert "Accuracy " in repr(found) and " pt [" in repr(found)
    page = Page(found._repr_html_())
    assert "Noise floor" in page.text and HOSTILE in page.text and "img" not in page.tags
    frame = found.to_pandas()
    assert len(frame) == len(found.results) and not frame.isna().all().any()
    row = frame[frame["name"] == "distance/flips_pct"].iloc[0]
    assert (row["label"], row["unit"]) == ("Answers flipped", "percent") and row["low"] < row["value"] < row["high"]
    assert list(frame.columns) == found.to_arrow().column_names


def test_a_check_reads_the_mean_too_where_it_has_no_interval() -> None:
    """Three items of 300 with 7.9 nats: the clipped mean keeps to the limit, the mean of 0.079 does not."""
    results = (
        MetricResult("distance/kl_mean", 0.079, n=300),
        MetricResult("distance/kl_clipped_mean", 0.01, 0.005, 0.04, n=300),
        MetricResult("distance/kl_above_clip_pct", 1.0, 0.3, 2.9, n=300),
        MetricResult("distance/kl_items", 300.0, n=300),
    )
    found = Evaluation(name="v", results=results, records_folder=Path("records")).check(max_kl_outliers_pct=5)
    assert found.reasons[:2] == (
        "KL (mean): 0.079 > 0.05",
        "KL clipped per item (upper end; the interval of the mean cannot be trusted): 0.04 <= 0.05",
    )


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
    assert first.startswith("v in vLLM (bf16), without its baseline: 12.5 tokens a second")
    assert "value [95 % interval]" in head and load == "speed/load_seconds 1.5"
    assert decode.split() == ["speed/decode_tokens_per_second_batch_1", "12.50", "[12.00,", "13.00]", "5", "0"]
    assert token.split() == ["speed/first_token_ms", "20.00", "[19.00,", "21.00]", "5", "0"]
