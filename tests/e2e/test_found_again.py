"""What is stored is not computed again: baselines, a variant's evaluation, its answers; and what decides is noticed."""

import json
import os
import re
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from mlflow_compress import demo
from mlflow_compress.commands.evaluate import models as open_models
from mlflow_compress.commands.evaluate.parameters import EvaluateConfig
from mlflow_compress.commands.evaluate.run import run_evaluate
from mlflow_compress.commands.judge.parameters import JudgeConfig
from mlflow_compress.commands.judge.run import run_judge
from mlflow_compress.compression import compress_model
from mlflow_compress.compression import pipeline as compress_run
from mlflow_compress.config import InferenceConfig, SourceConfig
from mlflow_compress.engines import local
from mlflow_compress.errors import ConfigError, JudgeError
from mlflow_compress.home import home
from mlflow_compress.records import Judgments, RunRecords
from mlflow_compress.scoring import engine_identity
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.tracker import Tracker
from tests.compress_models import check_here
from tests.judge_server import judge_server
from tests.task_files import sums, write_rows

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("short_windows")]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return two variants of the demo: unchanged, and rounded to 4 bits."""
    folder = tmp_path_factory.mktemp("checkpoints")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compress_run, "reload_in_fresh_process", check_here)
        compress_model(str(demo.MODEL_DIR), "none", None, [], folder / "none")
        compress_model(str(demo.MODEL_DIR), "rtn", None, [], folder / "rtn")
    return {"none": folder / "none", "rtn": folder / "rtn"}


class Loads:
    """Every model whose weights were loaded: its folder, and which of the models before it were alive then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folders: list[Path] = []
        self.alive_before: list[int] = []
        self._models: list[weakref.ref[Any]] = []
        whole = local.load_model

        def counted(config: Any) -> Any:
            self.alive_before.append(sum(model() is not None for model in self._models))
            loaded = whole(config)
            self.folders.append(Path(config.path))
            self._models.append(weakref.ref(loaded.model))
            return loaded

        monkeypatch.setattr(local, "load_model", counted)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Loads:
    return Loads(monkeypatch)


@pytest.fixture
def config(workdir: Path) -> EvaluateConfig:
    """Return an evaluation of ten choices, two of them in another category, and a corpus of five windows or more."""
    rows = [{**row, "category": "ab"[i > 7]} for i, row in enumerate(sums(10, answer=0))]
    choice = write_rows(workdir / "choice.jsonl", rows)
    (workdir / "text.txt").write_text("The river is old and the bridge is new. " * 34)
    return EvaluateConfig(tasks=f"{choice},{workdir / 'text.txt'}")


def only(tracker: Tracker, stage: str) -> Any:
    [run] = tracker.find_finished(stage)
    return run


def test_a_stored_baseline_is_not_loaded_and_runs_share_one_evaluation(
    tracker: Tracker, config: EvaluateConfig, checkpoints: dict[str, Path], loads: Loads
) -> None:
    run_evaluate(config.with_values(checkpoint=str(checkpoints["none"])))
    assert loads.folders == [demo.MODEL_DIR, checkpoints["none"]]
    assert loads.alive_before == [0, 0]  # the baseline's weights are gone before the variant's are loaded
    run_evaluate(config.with_values(checkpoint=str(checkpoints["rtn"])))
    assert loads.folders[2:] == [checkpoints["rtn"]]
    baseline, evaluations = only(tracker, "baseline"), tracker.find_finished("evaluate")
    evaluation = baseline.data.tags[run_names.EVALUATION]
    assert len(evaluation) == 16 and int(evaluation, 16) >= 0
    assert [run.data.tags[run_names.EVALUATION] for run in evaluations] == [evaluation] * 2
    assert [run.data.metrics[run_names.N_ITEMS] for run in evaluations] == [10] * 2
    assert all(run.data.tags[run_names.BASELINE_RUN] == baseline.info.run_id for run in evaluations)
    unchanged = next(run for run in evaluations if run.data.tags[run_names.VARIANT] == "none")
    assert unchanged.data.metrics["distance/kl_mean"] == unchanged.data.metrics["distance/corpus_kl_max"] == 0


def test_a_variant_that_was_evaluated_is_found_with_all_its_numbers(
    tracker: Tracker, config: EvaluateConfig, checkpoints: dict[str, Path], loads: Loads
) -> None:
    config = config.with_values(checkpoint=str(checkpoints["rtn"]))
    run_evaluate(config)
    first = only(tracker, "evaluate")
    loads.folders.clear()
    found = run_evaluate(config)
    assert loads.folders == []
    second = next(r for r in tracker.find_finished("evaluate") if r.info.run_id != first.info.run_id)
    assert found.variant_found_in == first.info.run_id
    assert second.data.tags[run_names.SKIPPED] == f"evaluation: found in run {first.info.run_id}"
    assert run_names.SKIPPED not in first.data.tags
    first_values, second_values = (
        {name: value for name, value in run.data.metrics.items() if name != run_names.PROCESSOR}  # what each has cost
        for run in (first, second)
    )
    assert second_values == first_values and first_values["distance/kl_mean"] > 0
    stored = tracker.fetch_json(first.info.run_id, "metrics.json")["results"]
    exact = {row["name"]: row["value"] for row in stored if not row["task"]}
    assert {name: first.data.metrics[name] for name in exact} == exact  # nothing is rounded on the way to the store
    same = (run_names.VERDICT, run_names.VARIANT, run_names.EVALUATION, run_names.BASELINE_RUN, run_names.FINGERPRINT)
    assert [second.data.tags[tag] for tag in same] == [first.data.tags[tag] for tag in same]
    ours, theirs = (tracker.fetch(run.info.run_id, "records") for run in (first, second))
    assert {p.name: p.read_bytes() for p in ours.iterdir()} == {p.name: p.read_bytes() for p in theirs.iterdir()}
    for table in ("metrics.json", "details.json", "flips.json"):
        assert tracker.fetch_json(first.info.run_id, table) == tracker.fetch_json(second.info.run_id, table)
    other = run_evaluate(config.with_values(seed=7))  # another question is another evaluation
    assert str(other.verdict).endswith("; seed 7 (given)")
    assert loads.folders == [demo.MODEL_DIR, checkpoints["rtn"]]


def test_what_decides_numbers_is_in_the_fingerprint(tmp_path: Path) -> None:
    shutil.copytree(demo.MODEL_DIR, tmp_path / "demo")
    known = open_models.light(str(tmp_path / "demo"), SourceConfig(), InferenceConfig()).identity
    assert engine_identity.engine_identity(demo.MODEL_DIR).items() <= known.items()
    assert {"scoring", "attention", "torch", "transformers", "weights", "tokenizer", "dtype"} <= known.keys()
    assert (
        open_models.light(str(demo.MODEL_DIR), SourceConfig(), InferenceConfig()).identity == known
    )  # the folder's name decides nothing
    (tmp_path / "demo" / "generation_config.json").write_text(json.dumps({"eos_token_id": 99}))
    other = open_models.light(str(tmp_path / "demo"), SourceConfig(), InferenceConfig()).identity
    assert {name for name in known if known[name] != other[name]} == {"eos_token_id"}


def test_a_baseline_of_other_threads_or_scoring_is_made_again_and_the_difference_is_said_with_its_size(
    tracker: Tracker,
    config: EvaluateConfig,
    checkpoints: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = config.with_values(checkpoint=str(checkpoints["none"]))
    run_evaluate(config)
    first = only(tracker, "baseline").info.run_id
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    run_evaluate(config)
    [said] = [record.getMessage() for record in caplog.records if "computed otherwise" in record.getMessage()]
    size = r"differ by at most (\d\.\de[+-]\d\d) nats"
    found = re.fullmatch(
        rf"The baseline of run {first[:8]} was computed otherwise \(threads \d+ -> 99\), .*{size}", said
    )
    assert found and float(found[1]) == 0.0  # only the number is another: the threads are the same
    evaluations = {run.data.tags[run_names.EVALUATION] for run in tracker.find_finished("baseline")}
    assert len(tracker.find_finished("baseline")) == 2 and len(evaluations) == 1
    monkeypatch.setattr(engine_identity, "SCORING_VERSION", engine_identity.SCORING_VERSION + 1)
    run_evaluate(config)
    newest, *others = tracker.find_finished("baseline")
    assert len(others) == 2 and newest.data.tags[run_names.EVALUATION] not in evaluations


def test_the_noise_floor_is_from_a_sample_and_says_of_how_many(
    tracker: Tracker, config: EvaluateConfig, checkpoints: dict[str, Path]
) -> None:
    config = config.with_values(checkpoint=str(checkpoints["rtn"]))
    run_evaluate(config.with_values(noise_items=4))
    baseline, evaluate = only(tracker, "baseline"), only(tracker, "evaluate")
    noise = RunRecords.read(tracker.fetch(baseline.info.run_id, "noise"))
    assert noise.items is not None and noise.option_scores is not None and len(noise.items) == 4
    assert set(noise.option_scores.column("item_id")) == set(noise.items.column("item_id"))
    for run in (baseline, evaluate):
        stored = tracker.fetch_json(run.info.run_id, "metrics.json")["results"]
        rows = {row["name"]: row for row in stored if row["task"] is None}
        assert (rows["noise/flips_pct"]["n"], rows["noise/flips_pct"]["n_unscored"]) == (4, 0)
        assert (rows["noise/kl_mean"]["n"], rows["noise/kl_mean"]["n_unscored"]) == (4, 0)
        assert rows["noise/corpus_kl_mean"]["n"] == 4 * 31 < rows["quality/perplexity"]["n"]
        assert run.data.params["noise_items"] == "4"
    # The sample decides nothing but the floor: the evaluation is the same, its baseline run another one.
    run_evaluate(config.with_values(noise_items=2))
    both = tracker.find_finished("baseline")
    assert len(both) == 2 and len({run.data.tags[run_names.EVALUATION] for run in both}) == 1
    less = RunRecords.read(tracker.fetch(both[0].info.run_id, "noise"))
    assert less.token_scores is not None and len(less.token_scores) == 2 * 31


@pytest.mark.parametrize("noise_items", [0, 2])
def test_a_suite_whose_answers_are_all_generated_is_evaluated(
    noise_items: int, workdir: Path, tracker: Tracker, checkpoints: dict[str, Path]
) -> None:
    rows = [{"id": str(i), "category": "c", "prompt": f"{i} plus {i} is", "answers": ["4"]} for i in range(3)]
    asked = EvaluateConfig(tasks=write_rows(workdir / "exact.jsonl", rows), noise_items=noise_items)
    for name in ("none", "none", "rtn"):
        run_evaluate(asked.with_values(checkpoint=str(checkpoints[name])))
    baseline = only(tracker, "baseline")
    assert "states" not in {file.path for file in tracker.client.list_artifacts(baseline.info.run_id)}
    runs = tracker.find_finished("evaluate")
    assert len(runs) == 3
    for run in runs:
        stored = tracker.fetch_json(run.info.run_id, "metrics.json")["results"]
        results = {(row["name"], row["task"]): row for row in stored}
        assert results["quality/accuracy", "exact"]["n"] == 3


@pytest.mark.ci
def test_a_judge_that_fails_leaves_answers_that_are_not_generated_again(
    workdir: Path,
    tracker: Tracker,
    checkpoints: dict[str, Path],
    loads: Loads,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    asked = JudgeConfig(
        checkpoint=str(checkpoints["rtn"]),
        instruction_limit=1,
        num_samples=2,
        max_new_tokens=8,
        judge_max_tokens="8",
        judge_model="j",
    )
    monkeypatch.setenv("OPENAI_API_KEY", "none-needed")
    refusal = 401, {"error": {"message": "no such key"}}
    with judge_server(lambda number, body: refusal) as server, pytest.raises(JudgeError):
        run_judge(asked.with_values(judge_base_url=server.base_url))
    assert tracker.find_finished("judge") == [] and len(tracker.find_finished("answers")) == 1
    assert loads.folders == [demo.MODEL_DIR, checkpoints["rtn"]] and loads.alive_before == [0, 0]
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))  # as the project of the stage
    with judge_server(lambda number, body: "Good. Rating: [[7]]", model="j") as server:
        run_judge(asked.with_values(judge_base_url=server.base_url))
        paid = len(server.bodies)
        assert len(loads.folders) == 2 and paid > 0
        run_judge(asked.with_values(judge_base_url=server.base_url))
        assert len(server.bodies) == paid  # grades are kept beside the store
    assert os.listdir() == [] and (home(tracker.uri) / "judgments.jsonl").is_file()  # noqa: PTH208
    [first, second] = tracker.find_finished("judge")
    answers = only(tracker, "answers")
    assert first.data.tags[run_names.SKIPPED] == f"answers: found in run {answers.info.run_id}"
    kept, new = (
        {name: value for name, value in run.data.metrics.items() if name != run_names.PROCESSOR}  # what each has cost
        for run in (first, second)  # the newest first
    )
    assert kept["judge/calls"] == 0 and new["judge/mt_bench"] == 7
    graded = [{k: v for k, v in found.items() if not k.startswith("judge/calls")} for found in (new, kept)]
    assert graded[0] == graded[1]
    # The grades of both models are kept, so that a page can show them beside the answers.
    folders = (run_names.RECORDS, run_names.BASELINE_GRADES)
    own, baselines = (Judgments.read(tracker.fetch(first.info.run_id, folder)) for folder in folders)
    assert own.key_rows() == baselines.key_rows() and len(own) >= paid / 2  # equal answers are graded once
    assert {*own.column("score"), *baselines.column("score")} == {7.0}
    assert tracker.client.get_run(answers.data.tags[run_names.PARENT]).info.status == "FAILED"


@pytest.mark.parametrize("name", ["encoder", "bertscore_model", "model", "checkpoint"])
@pytest.mark.parametrize("value", ["./nowhere", "a/b/c"])
def test_a_relative_path_that_is_not_there_says_where_it_was_looked_for(
    name: str, value: str, workdir: Path, tracker: Tracker, checkpoints: dict[str, Path]
) -> None:
    asked = JudgeConfig(checkpoint=str(checkpoints["none"]), instructions="demo").with_values(**{name: value})
    with pytest.raises(ConfigError, match=f"(?s)'{name}'.*looked for in {workdir}.*{value}"):
        run_judge(asked)
