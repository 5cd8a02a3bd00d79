"""`mlflow-compress forecast`: flips on items that a variant was not run on."""

from pathlib import Path

import pyarrow.compute as pc
import pytest

import mlflow_compress as mc
from mlflow_compress import cli
from mlflow_compress.commands.evaluate.result import Evaluation
from mlflow_compress.errors import AlignmentError, ConfigError
from mlflow_compress.records import Items, OptionScores, RunRecords
from tests import metric_records


def evaluation(folder: Path, name: str, n: int, *, of: str = "m", elsewhere: bool = False) -> Evaluation:
    """Return an evaluation of a variant of `of`; `elsewhere`, all its tasks have other names."""
    full = metric_records.inputs(n)
    for part, run in (("b", full.baseline), ("q", full.variant)):
        tables = [x.table for x in (run.items, run.option_scores)]
        if elsewhere:
            tables = [
                x.set_column(0, "task", pc.binary_join_element_wise("other", x.column("task"), "_")) for x in tables
            ]
        RunRecords(items=Items(tables[0]), option_scores=OptionScores(tables[1])).write(folder / name / part)
    return Evaluation(
        name=name,
        results=(),
        records_folder=folder / name / "q",
        baseline=of,
        baseline_records_folder=folder / name / "b",
    )


def test_the_same_records_under_other_names_are_expected_to_flip_alike(tmp_path: Path) -> None:
    ran, other = evaluation(tmp_path, "run", 200), evaluation(tmp_path, "other", 200, elsewhere=True)
    found = mc.forecast(ran, other)
    whole, *tasks = found.flips
    assert [x.task for x in tasks] == ["other_mmlu", "other_mmlu_six", "other_piqa"]
    assert sum(x.n for x in tasks) == whole.n == found.n_run == 600
    items = ran.items().query("task in ['mmlu', 'mmlu_six', 'piqa']")
    seen = 100 * (items.baseline_correct != items.variant_correct).mean()
    assert whole.value == pytest.approx(seen, abs=0.5)  # the prior of the model is weak
    assert whole.low is not None and whole.high is not None and whole.low < seen < whole.high
    assert "from 600 that were run" in found.as_text() and found.to_rows()[0]["task"] is None


def test_a_forecast_that_cannot_be_made_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran, other = evaluation(tmp_path, "run", 12), evaluation(tmp_path, "other", 12, of="another", elsewhere=True)
    with pytest.raises(AlignmentError, match="differ in their baseline"):
        mc.forecast(ran, other)
    with pytest.raises(ConfigError, match="run on all of them"):
        mc.forecast(ran, ran)
    assert cli.main(["forecast", str(tmp_path / "run" / "q"), str(tmp_path / "other" / "q")]) == 2
    assert "needs the evaluation of a variant" in capsys.readouterr().err
