"""An evaluation that is interrupted goes on where it was, and ends with the same records."""

import logging
import re
import threading
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path

import pytest

from mlflow_compress.commands.evaluate.baseline import RECORDS, find_or_evaluate
from mlflow_compress.commands.evaluate.models import light
from mlflow_compress.commands.evaluate.parameters import EvaluateConfig
from mlflow_compress.commands.evaluate.run import evaluate_variant, suite_of
from mlflow_compress.commands.shared import get_or_create as workdir_module
from mlflow_compress.commands.shared.get_or_create import get_or_create_run, resumable_workdir, workdirs_folder
from mlflow_compress.commands.shared.named_models import model_path
from mlflow_compress.scoring.engine import Scorer
from mlflow_compress.scoring.generation import decoding
from mlflow_compress.tracking.tracked_run import TrackedRun
from mlflow_compress.tracking.tracker import Tracker
from tests.task_files import sums, write_rows

pytestmark = pytest.mark.usefixtures("short_windows")


def little(folder: Path) -> EvaluateConfig:
    choice = write_rows(folder / "choice.jsonl", sums(6))
    (folder / "text.txt").write_text("The river is old and the bridge is new. " * 15)
    return EvaluateConfig(tasks=f"{choice},{folder / 'text.txt'}")


def evaluate(config: EvaluateConfig, tracker: Tracker) -> bytes:
    found = find_or_evaluate(
        tracker, light(model_path(config.source.model), config.source, config.inference), suite_of(config), config
    )
    folder = tracker.fetch(found.run_id, RECORDS)
    return b"".join(path.read_bytes() for path in sorted(folder.glob("*.parquet")))


def left_behind(tracker: Tracker) -> list[Path]:
    return [path for path in workdirs_folder(tracker.uri).iterdir() if path.is_dir()]


@pytest.mark.parametrize("call", [1, 2])  # the first pass of the corpus, and that of the noise run
def test_an_interrupted_baseline_goes_on(
    call: int, tracker: Tracker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    config = little(tmp_path)
    whole = Scorer.score_corpus
    calls = 0

    def interrupted(self: Scorer, *args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        if calls == call:
            raise KeyboardInterrupt
        return whole(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Scorer, "score_corpus", interrupted)
    with pytest.raises(KeyboardInterrupt):
        evaluate(config, tracker)
    assert tracker.find_finished("baseline") == []
    [left] = left_behind(tracker)
    with caplog.at_level(logging.INFO):
        resumed = evaluate(config, tracker)
    assert re.search(r"options resumes: [1-9]\d* of [1-9]\d* groups are finished", caplog.text)
    assert not left.exists()

    monkeypatch.setattr(Scorer, "score_corpus", whole)
    [run] = tracker.find_finished("baseline")
    tracker.client.delete_run(run.info.run_id)
    assert evaluate(config, tracker) == resumed


def test_answers_that_were_generated_are_not_generated_again(
    tracker: Tracker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("first", "second"):
        rows = ({"id": i, "category": "c", "prompt": f"{name} {i} plus {i} is", "answers": ["4"]} for i in "012")
        write_rows(tmp_path / f"{name}.jsonl", rows)
    little(tmp_path)
    config = EvaluateConfig(tasks=",".join(str(tmp_path / f"{n}.jsonl") for n in ("choice", "first", "second")))
    whole = decoding._with_cache
    grown: list[int] = []

    def interrupted(loaded: object, batch: list[object], *rest: object) -> None:
        if len(grown) == 1:
            raise KeyboardInterrupt
        grown.append(len(batch))
        whole(loaded, batch, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(decoding, "_with_cache", interrupted)
    with pytest.raises(KeyboardInterrupt):
        evaluate(config, tracker)
    assert grown == [3]
    grown += [0]  # no further interruption
    with caplog.at_level(logging.INFO):
        resumed = evaluate(config, tracker)
    assert "3 of 3 answers were already finished" in caplog.text
    assert grown[2:] == [3]

    [run] = tracker.find_finished("baseline")
    tracker.client.delete_run(run.info.run_id)
    assert evaluate(config, tracker) == resumed
    assert grown[3:] == [3, 3]


def test_what_a_variant_answered_stays_until_it_is_stored(
    tracker: Tracker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = little(tmp_path).with_values(checkpoint=model_path("demo"))
    with tracker.run("evaluate demo", "evaluate", {}) as run:
        with pytest.raises(OSError, match="no space"), ExitStack() as kept:
            evaluate_variant(config, suite_of(config), tracker, run, kept)
            raise OSError("no space for the artifacts")
        [left] = left_behind(tracker)
        with ExitStack() as kept:
            evaluate_variant(config, suite_of(config), tracker, run, kept)
            assert left.exists()
        assert not left.exists()


def test_a_kill_just_after_the_end_leaves_no_work_folder(
    tracker: Tracker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def work(run: TrackedRun, folder: Path, resume: Path) -> None:
        (resume / "states").write_text("large")

    whole = workdir_module.shutil.rmtree

    def killed(folder: Path, **options: object) -> None:
        if Path(folder).parent == workdirs_folder(tracker.uri):
            raise KeyboardInterrupt
        whole(folder, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(workdir_module.shutil, "rmtree", killed)
        get_or_create_run(tracker, "baseline", "demo", {"a": 1}, work)
    assert left_behind(tracker) != [] and len(tracker.find_finished("baseline")) == 1
    assert get_or_create_run(tracker, "baseline", "demo", {"a": 1}, work)[1] is False
    assert left_behind(tracker) == []


def test_two_processes_with_the_same_work_do_it_once(
    tracker: Tracker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    begun, waits = threading.Event(), threading.Event()
    done: list[str] = []

    def work(run: TrackedRun, folder: Path, resume: Path) -> None:
        done.append(run.run_id)
        begun.set()
        waits.wait()

    def one() -> tuple[str, bool]:
        return get_or_create_run(tracker, "baseline", "demo", {"a": 1}, work)

    monkeypatch.setattr(workdir_module.logger, "warning", lambda *_: waits.set())
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(one)
        first.add_done_callback(lambda _: begun.set())  # if it fails before its work
        begun.wait()
        second = threads.submit(one)
        try:
            wait([first, second], return_when=FIRST_COMPLETED)
        finally:
            waited = waits.is_set()
            waits.set()
    results = [first.result(), second.result()]
    assert waited and len(done) == 1
    assert sorted(fresh for _, fresh in results) == [False, True]
    assert {run_id for run_id, _ in results} == set(done)


def test_what_is_left_is_there_again_from_another_folder(
    workdir: Path, tracker: Tracker, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyboardInterrupt), resumable_workdir(tracker.uri, "ab") as folder:
        (folder / "part").write_text("1")
        raise KeyboardInterrupt
    assert folder.is_relative_to(workdir / ".mlflow_compress")  # beside the store, wherever a stage is started
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    with resumable_workdir(tracker.uri, "ab") as folder:
        assert (folder / "part").read_text() == "1"
    assert not folder.exists() and list(Path.cwd().iterdir()) == []
