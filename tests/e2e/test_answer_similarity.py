"""The similarity of all variants' answers: in a real sweep, and where a variant was embedded by another encoder."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from mlflow_compress import cli
from mlflow_compress.commands.report.parameters import ReportConfig
from mlflow_compress.commands.report.run import run_report
from mlflow_compress.judges.encoders import embedded_folder
from mlflow_compress.records import Embeddings
from mlflow_compress.tracking.tracker import Tracker

FEW = [
    "--limit=1",
    "--task_args",
    "noise_items=5",
    "--answer_args",
    "instruction_limit=1,num_samples=2,max_new_tokens=8",
]
FEW += ["--answer_args", "judge_max_tokens=8", "--judges=similarity"]


@pytest.mark.slow
def test_a_sweep_shows_how_alike_its_variants_answer_and_leaves_out_another_encoder(
    tracker: Tracker, tmp_path: Path
) -> None:
    assert cli.main(["sweep", *FEW, "--methods", "rtn", "--bits", "8,3"]) == 0
    [sweep] = tracker.find_finished("sweep")
    files = {file.path for file in tracker.client.list_artifacts(sweep.info.run_id, "figures")}
    assert files >= {"figures/answer_similarity.png", "figures/answer_map.png"}
    text = tracker.client.download_artifacts(sweep.info.run_id, "answer_similarity.csv", str(tmp_path))
    head, *rows = csv.reader(Path(text).read_text(encoding="utf-8").splitlines())
    names = ["baseline", "baseline, second sample", "rtn-8bit-g128", "rtn-3bit-g128"]
    assert head == ["model", *names, "component_1", "component_2"] and [row[0] for row in rows] == names
    matrix = np.array([row[1:5] for row in rows], dtype=float)
    # The first row is what each variant's own run says. Both average products of vectors of 384 numbers in float32.
    mains = {run.data.tags["variant"]: run for run in tracker.find_finished("main")}
    for place, name in enumerate(names[2:], start=2):
        assert matrix[0, place] == pytest.approx(mains[name].data.metrics["judge/similarity"], abs=2 * 384 * 2.0**-24)
    [*judges] = tracker.find_finished("judge")
    kept = Embeddings.read(tracker.fetch(judges[0].info.run_id, "embeddings") / "variant")
    assert set(kept.table.column("encoder_id").to_pylist()) == {judges[0].data.params["encoder_id"]}

    # The same encoder under another pooling is another encoder, whatever its folder is called.
    other = tmp_path / "encoder"
    shutil.copytree(embedded_folder(), other)
    pooling = json.loads((other / "1_Pooling" / "config.json").read_text())
    pooling |= {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    (other / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    assert cli.main(["main", *FEW, "--method", "rtn", "--bits", "4", "--answer_args", f"encoder={other}"]) == 0
    runs = ",".join(run.info.run_id for run in tracker.find_finished("main"))
    found = run_report(ReportConfig(runs=runs, output=str(tmp_path / "report.json")))
    [warning] = [w for w in found.board.warnings if w.kind == "unlike_answers"]
    assert warning.variants == ("rtn-4bit-g128",) and "embedded by" in warning.text
    cells = {row.name: row.cells for row in found.board.rows}
    assert "judge/similarity" not in cells["rtn-4bit-g128"] and "judge/similarity" in cells["rtn-8bit-g128"]
    values = json.loads((tmp_path / "report.json").read_text())["answer_similarity"]
    assert set(values["models"]) == set(names) and list(values["left_out"]) == ["rtn-4bit-g128"]
    np.testing.assert_array_equal(np.array(values["values"]), matrix)
