"""What a result shows of itself: a short `repr`, a table in a notebook, and a data frame with labels and units."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow_compress as mc
from mlflow_compress.commands.evaluate.result import Evaluation
from mlflow_compress.commands.report.result import VariantsReport
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
    row = frame[frame["name"] == "distance/kl_mean"].iloc[0]
    assert (row["label"], row["unit"]) == ("KL, items (nats)", "nats") and row["low"] < row["value"] < row["high"]
    assert list(frame.columns) == found.to_arrow().column_names


def test_a_report_shows_the_scoreboard_and_every_list_is_short() -> None:
    content = page_content()
    found = VariantsReport(board=content.board, decision=content.decision, path=Path("page.html"))
    assert "0.010 [0.005, 0.020]" in repr(found) and "0.010" in found._repr_html_()
    frame = found.to_pandas()
    assert frame["Answers flipped (%), high"].tolist() == [2.0, 42.0] and frame["Size (bytes)"].tolist() == [4e6, 3e6]
    assert all(frame[name].notna().any() for name in frame)
    for listing in (mc.methods(), mc.tasks()):
        assert len(repr(listing).splitlines()) <= 30 and len(listing.to_pandas()) == len(listing)
