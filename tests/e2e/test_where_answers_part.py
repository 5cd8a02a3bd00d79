"""Where answers part, and the baseline's own text as a corpus: identities, and what is decoded only once."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import mlflow_compress as mc
from mlflow_compress import demo
from mlflow_compress.commands.evaluate.result import AnswerEvaluation, Evaluation
from mlflow_compress.commands.sweep.parameters import SweepConfig
from mlflow_compress.commands.sweep.run import run_sweep
from mlflow_compress.compression import compress_model, pipeline
from mlflow_compress.compression.method import method_config
from mlflow_compress.errors import ConfigError
from mlflow_compress.metrics.greedy_answers import answer_places, first_difference
from mlflow_compress.records import RunRecords
from mlflow_compress.tracking.run_names import RECORDS
from mlflow_compress.tracking.tracker import Tracker
from tests.compress_models import check_here
from tests.stores import opened, runs_in

pytestmark = [pytest.mark.ci, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the demo unchanged, and rounded to 3 bits."""
    made = tmp_path_factory.mktemp("variants")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "reload_in_fresh_process", check_here)
        compress_model(str(demo.MODEL_DIR), "none", None, [], made / "none")
        compress_model(str(demo.MODEL_DIR), "rtn", method_config("rtn", bits=3), [], made / "rtn")
    return made


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def judged(folder: Path, store: Path) -> Callable[[str], AnswerEvaluation]:
    def judge(name: str) -> AnswerEvaluation:
        small = {"answer_args": {"instruction_limit": 1, "num_samples": 2, "max_new_tokens": 8, "judge_max_tokens": 24}}
        return mc.judge(folder / name, judges="divergent_tokens", store=store, **small)

    return judge


def test_the_baseline_against_itself_never_parts(judged: Callable[[str], AnswerEvaluation]) -> None:
    found = judged("none")
    assert found["judge/identical_answers_pct"].value == 100.0
    assert found["judge/share_of_divergent_tokens_pct"].value == 0.0
    assert found["judge/kl_greedy"].value == found["judge/kl_to_fork"].value == 0.0
    assert "judge/first_divergent_token" not in found.pooled and "judge/kl_behind_fork" not in found.pooled


def test_the_first_divergent_token_is_the_first_under_teacher_forcing(
    judged: Callable[[str], AnswerEvaluation], store: Path
) -> None:
    found = judged("rtn")
    judged("none")
    runs = opened(store)
    [kept] = runs.find("baseline-greedy")  # both variants were held against the same answers
    baseline, variant = RunRecords.read(runs.fetch(kept.run_id, RECORDS)), found.records()
    places = answer_places(baseline.greedy_answers, variant.greedy_scores)
    other = variant.greedy_scores.column("argmax") != variant.greedy_scores.column("target")
    tokens = [records.greedy_answers.table.column("tokens").to_pylist() for records in (baseline, variant)]
    parted = 0
    for row, (ours, theirs) in enumerate(zip(*tokens, strict=True)):
        events = np.sort(places.index[(places.answer == row) & other])
        first = first_difference(ours, theirs)
        assert first == (int(events[0]) if len(events) else None)
        parted += first is not None
    assert 0 < parted == round(len(tokens[0]) * (1 - found["judge/identical_answers_pct"].value / 100))
    assert (variant.greedy_distances.column("kl") > 0).all()


@pytest.fixture(scope="module")
def evaluated(folder: Path, store: Path) -> Callable[..., Evaluation]:
    def evaluate(name: str, **more: object) -> Evaluation:
        return mc.evaluate(
            folder / name,
            tasks="traces",
            task_args={"trace_max_new_tokens": 12, "trace_prompts": 4, **more},
            store=store,
        )

    return evaluate


def test_all_variants_are_scored_on_the_same_traces(evaluated: Callable[..., Evaluation], store: Path) -> None:
    same, moved = evaluated("none"), evaluated("rtn")
    assert same.evaluation_id == moved.evaluation_id and moved.baseline_found
    [run] = opened(store).find("baseline-traces")
    traces = RunRecords.read(opened(store).fetch(run.run_id, RECORDS)).traces
    assert traces is not None and len(traces) == 4
    assert moved.records().traces == traces
    n_tokens = sum(len(row["tokens"]) for row in traces.table.to_pylist())
    for found in (same, moved):
        assert found["distance/traces_kl"].n == found["quality/perplexity"].n == n_tokens
    assert same["distance/traces_kl"].value == same["distance/corpus_kl_mean"].value == 0.0
    assert moved["distance/traces_kl"].value == pytest.approx(moved["distance/corpus_kl_mean"].value) != 0.0
    places = [r for r in moved.results if r.name == "distance/traces_kl" and r.category is not None]
    assert [r.category for r in places][:2] == ["token 1", "tokens 2-3"]
    assert sum(r.n for r in places) == n_tokens


def test_other_traces_are_another_evaluation(evaluated: Callable[..., Evaluation]) -> None:
    ids = {
        evaluated("none", **more).evaluation_id
        for more in (
            {},
            {"trace_samples": 2},
            {"trace_temperature": 0.5},
            {"trace_prompts": 3},
        )
    }
    assert len(ids) == 4


def test_wrong_traces_are_refused_before_a_run_is_made(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'trace_instructions' names neither a set nor a file"):
        mc.evaluate(
            folder / "none", tasks="traces", task_args={"trace_instructions": "nothing"}, store=tmp_path / "empty"
        )
    with pytest.raises(ConfigError, match=r"has no few-shot examples.*traces@3"):
        mc.evaluate(folder / "none", tasks="traces@3", store=tmp_path / "empty")
    assert not runs_in(tmp_path / "empty")


def test_a_dry_run_of_a_sweep_writes_no_traces(tracker: Tracker) -> None:
    plan = run_sweep(SweepConfig(methods="rtn", bits="4", tasks="traces", judge=False, dry_run=True))
    assert plan.evaluation and not tracker.client.search_runs([tracker.experiment_id])
