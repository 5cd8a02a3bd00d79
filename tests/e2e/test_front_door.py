"""The Python front door: every example of its docstrings, with a plain folder and with MLflow's store."""

from __future__ import annotations

import ast
import doctest
import json
from pathlib import Path

import pyarrow as pa
import pytest

import mlflow_compress as mc
from mlflow_compress import api, demo
from mlflow_compress.tracking.folder_store import FolderStore

ORDER = ("methods", "tasks", "run", "promote", "compress", "evaluate", "compare", "load", "judge")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("front_door")


@pytest.fixture(scope="module")
def session(folder: Path) -> dict[str, object]:
    """Names that the examples share, as one notebook does."""
    return {"mc": mc, "folder": folder / "results"}


@pytest.fixture(autouse=True)
def elsewhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.mark.parametrize("name", ORDER)
def test_the_example_of_every_function_runs(name: str, session: dict[str, object]) -> None:
    test = doctest.DocTestParser().get_doctest(getattr(api, name).__doc__, session, name, None, 0)
    assert test.examples
    runner = doctest.DocTestRunner(optionflags=doctest.IGNORE_EXCEPTION_DETAIL)
    runner.run(test, clear_globs=False)
    session |= test.globs
    assert runner.failures == 0


def test_no_tracking_store_was_touched(session: dict[str, object], folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["results"]
    store = FolderStore(folder / "results")
    assert [len(store.find(stage)) for stage in ("quantize", "baseline", "evaluate", "judge")] == [1, 1, 1, 1]


def test_results_are_tables_everywhere(session: dict[str, object]) -> None:
    found, compressed, answers, same = (session[name] for name in ("found", "compressed", "answers", "same"))
    for result in (found, compressed, answers, same, mc.methods(), mc.tasks()):
        frame, table = result.to_pandas(), result.to_arrow()
        assert len(frame) == table.num_rows >= 1 and isinstance(table, pa.Table)
        assert list(frame.columns) == table.column_names
        assert "<table" in result._repr_html_()
        json.dumps(result.to_dict(), allow_nan=False)
    assert found.metrics["distance/flips_pct"] == found["distance/flips_pct"].value
    assert found.records().items is not None
    with pytest.raises(mc.MlflowCompressError, match="This metric was not computed"):
        found["judge/similarity"]


def test_a_baseline_and_a_variant_are_found_again(session: dict[str, object], folder: Path) -> None:
    again = mc.evaluate(session["compressed"], limit=2, store=folder / "results")
    assert again.baseline_found and again.variant_found_in == session["found"].run.run_id
    assert again.metrics == session["found"].metrics


def test_records_alone_are_loaded_from_their_folder(session: dict[str, object]) -> None:
    alone = mc.load(session["found"].records_folder)
    assert alone.baseline is None and alone["quality/accuracy"] == session["found"]["quality/accuracy"]
    baseline = mc.load(session["found"].baseline_run_id, store=session["folder"])
    assert baseline["quality/accuracy"].value == session["found"]["quality/accuracy_baseline"].value


def test_mlflow_and_a_folder_give_the_same_numbers(
    session: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tracked = mc.evaluate(session["compressed"], limit=2)
    assert tracked.results == session["found"].results
    assert mc.load(tracked.run.run_id).metrics == tracked.metrics
    assert mc.compare(tracked, session["found"])["all_flips_pct"] == 0


@pytest.mark.parametrize(
    ("source", "message"),
    [("nothing-of-this-name", "no evaluation of this name"), ("0" * 32, "has no such run")],
)
def test_what_cannot_be_loaded_is_refused(source: str, message: str, session: dict[str, object]) -> None:
    with pytest.raises(mc.MlflowCompressError, match=message):
        mc.load(source, store=session["folder"])
    with pytest.raises(mc.MlflowCompressError, match="holds no evaluation"):
        mc.load(session["compressed"].run.run_id, store=session["folder"])


def test_a_refused_parameter_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(mc.MlflowCompressError, match="Did you mean 'bits'"):
        mc.compress("demo", "rtn", bitz=4, store=tmp_path / "none")
    with pytest.raises(mc.MlflowCompressError, match="'checkpoint' must be given"):
        mc.evaluate(store=tmp_path / "other")
    assert not (tmp_path / "none").exists()


def test_a_run_that_fails_says_so(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    with pytest.raises(RuntimeError), store.run("it", "evaluate", {}) as run:
        raise RuntimeError("broken")
    assert store.look_up(run.run_id).tags["error"] == "broken" and store.find("evaluate") == []


def test_everything_public_is_documented_and_listed() -> None:
    assert set(mc.__all__) <= set(dir(mc))
    for name in mc.__all__:
        if name != "__version__":
            assert getattr(mc, name).__doc__, name
    listed = {*ORDER}
    tree = ast.parse(Path(api.__file__).read_text())
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name[0] != "_"}
    assert functions == listed <= set(mc.__all__)


def test_help_shows_the_parameters() -> None:
    import inspect

    shown = inspect.signature(mc.evaluate).parameters
    assert {"checkpoint", "store", "tasks", "num_fewshot", "limit", "dtype"} <= shown.keys()
    assert shown["num_fewshot"].default == 5
    assert demo.MODEL_DIR.is_dir()
