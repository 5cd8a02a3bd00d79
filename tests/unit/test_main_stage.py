"""The main job around its stages: what is refused before a run is made, what is resumed, what the user is told."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlflow_compress import cli
from mlflow_compress.commands.main.parameters import MainConfig
from mlflow_compress.commands.main.run import check, finished_stages, keep_one_row, resumed
from mlflow_compress.commands.main.stages import Progress
from mlflow_compress.config import as_text, parse
from mlflow_compress.errors import ConfigError
from mlflow_compress.home import home, out_folder
from mlflow_compress.reporting.numbers import duration
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.live_processes import own_host
from mlflow_compress.tracking.store import new_parameters
from mlflow_compress.tracking.tracker import Tracker
from tests.conftest import Fork

ROOT = Path(__file__).parents[2]
IMPORTS = """
import sys
from mlflow_compress.commands.main.parameters import MainConfig
from mlflow_compress.commands.main import run as main
from mlflow_compress.commands.main import summary
main.check(MainConfig())
print([name for name in ("torch", "transformers", "lm_eval", "sentence_transformers", "datasets") if name in sys.modules])
"""


def run_ids(tracker: Tracker) -> list[str]:
    return [run.info.run_id for run in tracker.client.search_runs([tracker.experiment_id])]


def test_what_is_refused_fails_the_run_that_mlflow_has_made(tracker: Tracker, monkeypatch: pytest.MonkeyPatch) -> None:
    given = tracker.client.create_run(tracker.experiment_id).info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", given)
    assert cli.main(["main", "--method", "awk"]) == 2
    run = tracker.client.get_run(given)
    assert run.info.status == "FAILED" and "awk" in run.data.tags[run_names.RUN_ERROR]
    assert run_ids(tracker) == [given]


def test_the_main_job_imports_no_model_library(light_python: Fork) -> None:
    assert light_python("-c", IMPORTS).stdout.strip() == "[]"


def test_parameters_are_shown_resolved() -> None:
    known = check(MainConfig(method="rtn"))
    resolved = {name: known[name] for name in ("bits", "group_size", "tasks", "instructions", "prompt_style")}
    assert resolved == {
        "bits": 4,
        "group_size": 128,
        "tasks": "demo",
        "instructions": "demo",
        "prompt_style": "hendrycks",
    }
    assert known["calibration"] == known["calibration_samples"] == "none"  # rtn is not calibrated
    assert "auto" not in known.values() and "resume" not in known
    calibrated = check(MainConfig(method="awq"))
    assert calibrated["calibration"] == "demo" and calibrated["calibration_samples"] == 32  # awq's default


def test_what_mlflow_logged_as_given_is_resolved_beside_it() -> None:
    there = {"bits": "auto", "data_dir": "''", "model": "'/a b/c'", "seed": "42", "system_prompt": "it's"}
    values = {"bits": "4", "data_dir": "", "model": "/a b/c", "seed": "42", "system_prompt": "it's", "device": "cpu"}
    assert new_parameters(there, values) == {"resolved/bits": "4", "device": "cpu"}
    assert new_parameters({**there, "resolved/bits": "4", "device": "cpu"}, values) == {}


def test_checkpoints_lie_where_they_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_COMPRESS_HOME", raising=False)
    uri = "sqlite:////data/mlflow.db"
    assert out_folder("auto", uri) == home(uri) / "checkpoints"
    assert out_folder("mine", uri) == tmp_path / "mine"


def failed_run(tracker: Tracker, *finished: str) -> str:
    """Return a main run that failed after some stages."""
    with pytest.raises(ConfigError), tracker.run("x", "main", {}) as main:
        main.log_json(as_text(MainConfig(method="rtn", bits="3", seed=7)), run_names.PARAMETERS)
        for stage in ("quantize", "evaluate", "judge"):
            child = tracker.client.create_run(
                tracker.experiment_id, tags={run_names.PARENT: main.run_id, "stage": stage}
            )
            tracker.client.set_terminated(child.info.run_id, "FINISHED" if stage in finished else "FAILED")
        raise ConfigError("broken")
    return main.run_id


def test_a_resumed_run_has_the_parameters_that_it_was_started_with(tracker: Tracker) -> None:
    run_id = failed_run(tracker, "quantize", "evaluate")
    finished = finished_stages(tracker, run_id)
    assert set(finished) == {"quantize", "evaluate"}
    again = resumed(MainConfig(resume=run_id, judge_model="other"), run_id, tracker, finished)
    found = again.values()
    assert [found[name] for name in ("method", "bits", "seed", "judge_model")] == ["rtn", 3, 7, "other"]
    assert again.resume == run_id


def test_what_finished_stages_used_cannot_change(tracker: Tracker) -> None:
    run_id = failed_run(tracker, "quantize")
    with pytest.raises(ConfigError, match=r"'bits' belongs to a finished stage.*Allowed: 3.*Got: '8'"):
        resumed(MainConfig(resume=run_id, bits="8"), run_id, tracker, finished_stages(tracker, run_id))
    again = resumed(MainConfig(resume=run_id, limit=5), run_id, tracker, finished_stages(tracker, run_id))
    assert again.evaluation.limit == 5


def test_only_a_main_run_that_did_not_finish_is_resumed(tracker: Tracker) -> None:
    run_id = failed_run(tracker)
    for status in ("FINISHED", "RUNNING"):
        tracker.client.update_run(run_id, status=status)
        with pytest.raises(ConfigError, match=f"is {status}"):
            resumed(MainConfig(resume=run_id), run_id, tracker, {})
    with tracker.run("x", "promote", {}) as run:
        pass
    tracker.client.update_run(run.run_id, status="FAILED")
    with pytest.raises(ConfigError, match="has no parameters"):
        resumed(MainConfig(resume=run.run_id), run.run_id, tracker, {})


def test_a_reopened_run_that_ends_well_has_no_error_left(tracker: Tracker) -> None:
    run_id = failed_run(tracker)
    tracker.client.set_tag(run_id, run_names.FAILED_STAGE, "judge")
    first, tracker.experiment_id = tracker.experiment_id, tracker.client.create_experiment("of another day")
    with tracker.reopen(run_id):
        assert tracker.experiment_id == first
        assert tracker.client.get_run(run_id).info.status == "RUNNING"
    run = tracker.client.get_run(run_id)
    assert run.info.status == "FINISHED" and not {run_names.RUN_ERROR, run_names.FAILED_STAGE} & set(run.data.tags)


def test_resume_round_trips_through_strings() -> None:
    assert parse(MainConfig, as_text(MainConfig(resume="abc"))).resume == "abc"


def test_the_user_hears_what_happens_and_how_long_it_took_before(tracker: Tracker) -> None:
    heard: list[str] = []
    Progress(tracker, "it's", heard.append).begin("evaluate", 2, 3)
    with tracker.run("x", "evaluate", {run_names.BASE_MODEL: "it's"}) as run:
        pass
    info = tracker.client.get_run(run.run_id).info
    tracker.client.set_terminated(run.run_id, "FINISHED", end_time=info.start_time + 42_000)
    Progress(tracker, "it's", heard.append).begin("evaluate", 2, 3, later=["judge"])
    Progress(tracker, "it's", heard.append).begin("quantize", 1, 2, later=["evaluate"])
    assert heard[0].startswith("[2/3] evaluate: scores both models")
    assert heard[0].endswith(f" (first time for it's on {own_host()}: no estimate)")
    assert heard[1].endswith(f" (about 42 s, as in the last run on {own_host()}; then judge)")
    assert heard[2].endswith("; then evaluate: about 42 s)")


def test_an_estimate_is_that_of_this_machine(tracker: Tracker) -> None:
    heard: list[str] = []
    with tracker.run("x", "evaluate", {run_names.BASE_MODEL: "demo"}) as run:
        pass
    tracker.client.set_tag(run.run_id, run_names.PROCESS, "another-machine-12-0123456789ab")
    Progress(tracker, "demo", heard.append).begin("evaluate", 2, 3)
    assert "no estimate" in heard[0]


def test_durations() -> None:
    assert [duration(seconds) for seconds in (42.4, 100, 5000, 9000)] == ["42 s", "2 min", "83 min", "2.5 h"]


def test_a_reader_that_has_seen_enough_gets_no_traceback() -> None:
    command = f"'{sys.executable}' -m mlflow_compress list methods | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True, env=os.environ)
    assert done.stderr == ""
    assert int(done.stdout) in (0, 141)  # 0 where the reader was slower


def test_a_variant_that_was_judged_later_has_one_row(tracker: Tracker) -> None:
    """Runs whose stages a newer run has too leave the leaderboard; what was judged otherwise, or has grades, stays."""
    evaluated, judged, otherwise = (
        {run_names.EVALUATED_KEY: "e", run_names.ON_LEADERBOARD: "shown", **more}
        for more in ({}, {run_names.JUDGED_KEY: "j"}, {run_names.JUDGED_KEY: "other"})
    )
    runs = []
    for tags in (evaluated, otherwise, evaluated | {run_names.EVALUATED_KEY: "another"}, judged, judged):
        with tracker.run("rtn demo", "main", tags) as run:
            run.log_values({"distance/kl_mean": 0.1} | ({"judge/mt_bench": 7.0} if len(runs) == 3 else {}))
            runs.append(run.run_id)
    keep_one_row(tracker, runs[-1], judged)
    rows = [tracker.run_of(run).data.tags[run_names.ON_LEADERBOARD] for run in runs]
    assert rows == [f"see run {runs[-1]}", "shown", "shown", "shown", "shown"]
