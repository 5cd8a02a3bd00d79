"""A real sweep in which one variant is timed and the other one's format is only simulated."""

import pytest

import mlflow_compress as mc
from mlflow_compress import cli
from mlflow_compress.decide.scoreboard import SERVING
from mlflow_compress.records import MetricResult
from mlflow_compress.tracking.tracker import Tracker

SHORT = ["--speed_args", "repeats=2,prompt_tokens=8,new_tokens=3,threads=1"]


@pytest.mark.slow  # CI runs the timing in test_speed.py
def test_speed_and_memory_reach_the_scoreboard_the_page_and_the_decision(
    tracker: Tracker, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "sweep",
        "--methods=layer-drop,hqq",
        "--bits=8",
        "--limit=1",
        "--judge=false",
        "--task_args",
        "noise_items=5",
        *SHORT,
    ]
    assert cli.main(command) == 0
    shown = capsys.readouterr().out
    assert "timed in" in shown and "Not timed: hqq-8bit-g64; the format hqq_packed is only simulated" in shown

    [sweep] = tracker.find_finished("sweep")
    board = tracker.fetch_json(sweep.info.run_id, "scoreboard.json")
    rows = {row["method"]: row for row in board["rows"]}
    assert set(SERVING) <= rows["layer-drop"]["cells"].keys() and not set(SERVING) & rows["hqq"]["cells"].keys()
    assert rows["layer-drop"]["runtime"].startswith("transformers ") and rows["hqq"]["runtime"] == ""
    [timed] = [run for run in tracker.find_finished("speed") if run.data.tags["method"] == "layer-drop"]
    cells = rows["layer-drop"]["cells"]
    for metric in SERVING:
        found = MetricResult(metric, **{part: cells[metric][part] for part in ("value", "low", "high", "n")})
        assert timed.data.metrics[metric] == found.value
    decode = cells["speed/decode_ratio_batch_1"]
    assert decode["low"] < decode["value"] < decode["high"]
    main = tracker.client.get_run(rows["layer-drop"]["run_id"]).data.metrics
    assert set(SERVING) | {"speed/memory_peak_mb", "speed/decode_tokens_per_second_batch_1"} <= main.keys()

    bounds = {"max_kl": 99, "max_kl_outliers_pct": 100, "max_flips_pct": 100, "max_accuracy_drop_pct": 100}
    found = mc.promote(**bounds, min_decode_speedup=0.001, max_memory_ratio=100, dry_run=True)
    outcomes = {o.candidate.method: o for o in found.decision.outcomes}
    assert outcomes["layer-drop"].passed and found.champion == rows["layer-drop"]["name"]
    assert not outcomes["hqq"].passed and sum("only simulated" in reason for reason in outcomes["hqq"].reasons) == 2
