"""The Python front door: every example of its docstrings, in a plain folder and in MLflow's store."""

import doctest
import inspect
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import mlflow_compress as mc
from mlflow_compress.commands.command import all_commands
from tests.stores import opened

ORDER = (
    "methods",
    "tasks",
    "policy",
    "plan",
    "resume",
    "run",
    "sweep",
    "search",
    "promote",
    "approve",
    "serve_webhook",
    "report",
    "rollback",
    "history",
    "compress",
    "evaluate",
    "diagnose",
    "compare",
    "forecast",
    "export",
    "verify",
    "card",
    "hub_folder",
    "gc",
    "compare_receipts",
    "load",
    "judge",
    "speed",
    "gate",
)


def test_the_examples_run_and_mean_the_same_in_every_store(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = workdir / "session"  # beside MLflow's store
    here.mkdir()
    monkeypatch.chdir(here)
    # The example of every function, in one session as in a notebook.
    session: dict[str, Any] = {"mc": mc, "folder": here / "results"}
    for name in ORDER:
        test = doctest.DocTestParser().get_doctest(getattr(mc, name).__doc__, session, name, None, 0)
        runner = doctest.DocTestRunner(optionflags=doctest.IGNORE_EXCEPTION_DETAIL)
        runner.run(test, clear_globs=False)
        assert test.examples and runner.failures == 0, name
        session |= test.globs
    found, compressed = session["found"], session["compressed"]

    # Nothing but the folder was written, each kind of work once.
    assert [path.name for path in here.iterdir()] == ["results"]
    store = opened(here / "results")
    # Nothing is done twice. The example of `speed` has a variant of its own, which transformers can time.
    stages = {"quantize": 2, "baseline": 1, "evaluate": 1, "judge": 1, "speed": 1}
    assert {stage: len(store.find(stage)) for stage in stages} == stages

    # Every result is a table.
    for result in (found, compressed, session["answers"], session["same"], mc.methods(), mc.tasks()):
        frame, table = result.to_pandas(), result.to_arrow()
        assert len(frame) == table.num_rows >= 1 and isinstance(table, pa.Table)
        assert list(frame.columns) == table.column_names
        assert "<table" in result._repr_html_()
        json.dumps(result.to_dict(), allow_nan=False)
    assert found.metrics["distance/flips_pct"] == found["distance/flips_pct"].value
    with pytest.raises(mc.MlflowCompressError, match="This metric was not computed"):
        found["judge/similarity"]

    # Baseline and variant are found again.
    again = mc.evaluate(compressed, limit=2, store=here / "results")
    assert again.baseline_found and again.variant_found_in == found.run.run_id
    assert again.results == found.results

    # Records alone, the baseline's run, and what has no evaluation.
    alone = mc.load(found.records_folder)
    assert alone.baseline is None and alone["quality/accuracy"] == found["quality/accuracy"]
    assert alone.records().items is not None
    baseline = mc.load(found.baseline_run_id, store=here / "results")
    assert baseline["quality/accuracy"].value == found["quality/accuracy_baseline"].value
    with pytest.raises(mc.MlflowCompressError, match="has no evaluation"):
        mc.load(compressed.run.run_id, store=here / "results")

    # MLflow's store gives the same numbers.
    tracked = mc.evaluate(compressed, limit=2)
    assert tracked.results == found.results
    assert mc.load(tracked.run.run_id).metrics == tracked.metrics

    # Ids may be as short as we print them.
    assert mc.load(tracked.run.run_id[:8]).metrics == mc.load(found.run.run_id[:8], store=here / "results").metrics
    assert mc.compare(tracked.run.run_id[:8], tracked.run.run_id)["all_flips_pct"] == 0
    assert mc.compare(tracked, found)["all_flips_pct"] == 0


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nothing-of-this-name", "no evaluation of this name"),
        ("0" * 32, "has no such run"),
        ("0" * 8, "has no such run"),
        ("abc", "no evaluation of this name"),
    ],
)
def test_what_cannot_be_loaded_is_refused(source: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(mc.MlflowCompressError, match=message):
        mc.load(source, store=tmp_path)


def test_a_refused_parameter_leaves_no_run_and_a_run_that_fails_says_so(tmp_path: Path) -> None:
    with pytest.raises(mc.MlflowCompressError, match="Did you mean 'bits'"):
        mc.compress("demo", "rtn", bitz=4, store=tmp_path / "none")
    with pytest.raises(mc.MlflowCompressError, match="'checkpoint' must be given"):
        mc.evaluate(store=tmp_path / "other")
    with pytest.raises(mc.MlflowCompressError, match="has no experiments"):
        mc.compress("demo", "rtn", experiment="mine", store=tmp_path / "none")
    assert not (tmp_path / "none").exists() and not list(tmp_path.glob("other/*"))
    store = opened(tmp_path)
    with pytest.raises(RuntimeError), store.run("it", "evaluate", {}) as run:
        raise RuntimeError("broken")
    assert store.look_up(run.run_id).tags["error"] == "broken" and store.find("evaluate") == []


def test_everything_public_is_documented_and_listed_with_its_parameters() -> None:
    assert set(mc.__all__) <= set(dir(mc))
    for name in set(mc.__all__) - {"__version__"}:
        assert getattr(mc, name).__doc__, name
    functions = {command.function.__name__ for command in all_commands().values()}
    assert {*ORDER} == {*functions, "load"} <= set(mc.__all__)
    shown = inspect.signature(mc.evaluate).parameters
    assert {"checkpoint", "store", "tasks", "num_fewshot", "limit", "dtype"} <= shown.keys()
    assert shown["num_fewshot"].default == 5
