"""Tracking against a real SQLite store: run life cycle, look-ups, registry, saved view."""

import base64
import json
import os
import re
import zlib
from pathlib import Path

import mlflow
import pytest

from mlflow_compress.errors import ConfigError, TrackingError
from mlflow_compress.records import MetricResult
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.model_registry import move_alias, note_decision, previous_alias, registered_name
from mlflow_compress.tracking.tracker import Tracker
from mlflow_compress.tracking.views import LEADERBOARD, how_to_open, save_leaderboard, shared_run_address


def test_a_run_ends_finished_with_what_was_logged(tracker: Tracker) -> None:
    with tracker.run("awq demo", "main", {run_names.VARIANT: "awq"}) as run:
        run.log_params({"bits": 4})
        run.log_results(
            [MetricResult("distance/kl_mean", 0.021312, 0.0193, 0.0233), MetricResult("a/b", 1.0, task="t")]
        )
        run.log_table({"prompt": ["p"], "output": ["o"]}, "outputs.json")
        run.set_note("first line")
    stored = tracker.client.get_run(run.run_id)
    assert stored.info.status == "FINISHED" and stored.info.run_name == "awq demo"
    assert stored.data.metrics == {"distance/kl_mean": 0.021312, "a/b/t": 1.0}  # not rounded by the interval
    assert stored.data.params == {"bits": "4"}
    assert stored.data.tags["mlflow.note.content"] == "first line"
    assert tracker.fetch_json(run.run_id, "outputs.json") == {"columns": ["prompt", "output"], "data": [["p", "o"]]}


def test_opening_the_store_leaves_the_environment_alone(tracker: Tracker) -> None:
    before = dict(os.environ)
    Tracker()
    changed = {name for name in before.keys() | os.environ.keys() if before.get(name) != os.environ.get(name)}
    assert changed <= {"MLFLOW_TRACKING_URI"}  # MLflow's own way to tell child processes


def test_a_table_is_replaced_and_shown_once(tracker: Tracker, tmp_path: Path) -> None:
    drawn = tmp_path / "drawn"
    drawn.mkdir()
    (drawn / "kl.png").write_bytes(b"png")
    with tracker.run("x", "main", {}) as run:
        for value in (1.0, float("nan")):
            run.log_table({"a": [value], "b": ["text"]}, "t.json")
        run.log_figures(drawn, ["kl"])
    assert tracker.fetch_json(run.run_id, "t.json") == {"columns": ["a", "b"], "data": [[None, "text"]]}
    tables = json.loads(tracker.client.get_run(run.run_id).data.tags["mlflow.loggedArtifacts"])
    assert tables == [{"path": name, "type": "table"} for name in ("t.json", "figures.json")]
    [[name, image]] = tracker.fetch_json(run.run_id, "figures.json")["data"]
    assert name == "kl" and (tracker.fetch(run.run_id, "figures") / "kl.png").read_bytes() == b"png"
    assert image["type"] == "image" and image["filepath"] == image["compressed_filepath"] == "figures/kl.png"


@pytest.mark.parametrize(
    ("error", "status"),
    [(ConfigError("broken"), "FAILED"), (OSError("disk"), "FAILED"), (KeyboardInterrupt(), "KILLED")],
)
def test_a_run_never_stays_running(tracker: Tracker, error: BaseException, status: str) -> None:
    with pytest.raises(type(error)), tracker.run("x", "main", {}) as run:
        raise error
    stored = tracker.client.get_run(run.run_id)
    assert stored.info.status == status
    assert stored.data.tags[run_names.ERROR] == (str(error) or "interrupted")


def test_only_finished_runs_with_all_tags_are_found(tracker: Tracker) -> None:
    for fingerprint, fails in [("a", False), ("a", True), ("b", False)]:
        try:
            with tracker.run("baseline", "baseline", {run_names.FINGERPRINT: fingerprint}):
                if fails:
                    raise ConfigError("no")
        except ConfigError:
            pass
    assert len(tracker.find_finished("baseline", **{run_names.FINGERPRINT: "a"})) == 1
    assert len(tracker.find_finished("baseline")) == 2
    assert tracker.find_finished("main") == []


@pytest.mark.parametrize("value", ["it's", 'say "x"', "both ' and \"", "a\\", "%", "O'Neil/llama"])
def test_names_with_quotes_are_found(value: str, tracker: Tracker) -> None:
    for name in (value, "another"):
        with tracker.run("x", "main", {run_names.BASE_MODEL: name}):
            pass
    [found] = tracker.find_finished("main", **{run_names.BASE_MODEL: value})
    assert found.data.tags[run_names.BASE_MODEL] == value


def test_the_run_of_mlflow_run_is_filled_once(tracker: Tracker, monkeypatch: pytest.MonkeyPatch) -> None:
    given = tracker.client.create_run(tracker.experiment_id).info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", given)
    with tracker.run("outer", "evaluate", {}) as outer, tracker.run("inner", "baseline", {}, own=False) as inner:
        pass
    assert outer.run_id == given != inner.run_id
    assert "MLFLOW_RUN_ID" not in os.environ


def test_an_unwritable_store_is_one_clear_error(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:////proc/nowhere/mlflow.db")
    mlflow.set_tracking_uri("sqlite:////proc/nowhere/mlflow.db")
    with pytest.raises(TrackingError, match=r"tracking store cannot be used.*Set MLFLOW_TRACKING_URI"):
        Tracker()


def test_a_relative_store_is_made_absolute_for_child_processes(workdir: Path) -> None:
    mlflow.set_tracking_uri("sqlite:///mlflow.db")
    assert Tracker().uri == f"sqlite:///{workdir / 'mlflow.db'}" == os.environ["MLFLOW_TRACKING_URI"]


def test_lost_artifacts_are_an_error_with_a_way_out(tracker: Tracker) -> None:
    with tracker.run("x", "baseline", {}) as run:
        pass
    with pytest.raises(TrackingError, match="Delete that run"):
        tracker.fetch(run.run_id, "records")


def test_the_alias_moves_and_keeps_where_it_stood(tracker: Tracker) -> None:
    name = registered_name("org/model")
    assert name == "compressed-org-model"
    assert registered_name("it's\"") == "compressed-it-s-"  # quotes would end a value in MLflow's filters
    tracker.client.create_registered_model(name)
    versions = [str(tracker.client.create_model_version(name, source=f"runs:/x{i}").version) for i in range(3)]
    previous = previous_alias("champion")
    for _ in range(2):  # the second time nothing moves
        move_alias(tracker, name, "champion", versions[0])
    assert previous not in tracker.client.get_registered_model(name).aliases
    move_alias(tracker, name, "champion", versions[2])
    aliases = tracker.client.get_registered_model(name).aliases
    assert {key: str(value) for key, value in aliases.items()} == {"champion": versions[2], previous: versions[0]}


def saved_view(tracker: Tracker, key: str) -> dict[str, object]:
    """Return a saved view as MLflow's pages read it."""
    tag = tracker.client.get_experiment(tracker.experiment_id).tags[f"mlflow.sharedViewState.{key}"]
    envelope = json.loads(tag)
    assert envelope.keys() == {"name", "createdAt", "state"}
    return dict(json.loads(zlib.decompress(base64.b64decode(envelope["state"].removeprefix("deflate;")))))


def test_every_evaluation_has_a_leaderboard_of_its_own(tracker: Tracker) -> None:
    runs = []
    for evaluation in ("a" * 16, "b" * 16):
        with tracker.run("x", "main", {run_names.EVALUATION: evaluation}) as run:
            run.log_values({"size/bits_per_weight": 4.0, "distance/kl_mean": 0.1})
        save_leaderboard(tracker, run.run_id)
        runs.append(run.run_id)
    state = saved_view(tracker, "leaderboard-aaaaaaaa")
    assert state["searchFilter"] == f"tags.`stage` = 'main' and tags.`evaluation` = '{'a' * 16}'"
    columns = ["params.`accuracy`", "metrics.`distance/flips_pct`", "metrics.`distance/kl_mean`"]
    assert state["selectedColumns"][:3] == columns == state["columnOrder"][2:5]  # type: ignore[index]
    charts = saved_view(tracker, "charts-aaaaaaaa")
    assert charts["searchFilter"] == state["searchFilter"]
    first, second = charts["compareRunCharts"]  # type: ignore[misc]
    assert (first["xaxis"]["key"], first["yaxis"]["key"]) == ("size/bits_per_weight", "distance/kl_mean")
    assert second["metricKey"] == "distance/kl_mean"  # no chart of what no variant has, such as speed
    shown = tracker.client.search_runs([tracker.experiment_id], filter_string=str(state["searchFilter"]))
    assert [run.info.run_id for run in shown] == runs[:1]
    assert "viewStateShareKey=leaderboard-aaaaaaaa" in how_to_open(tracker, runs[0])
    assert f"runs/{runs[0]}?workflowType=machine_learning" in how_to_open(tracker, runs[0])
    # The plain name is the newest evaluation's.
    assert saved_view(tracker, LEADERBOARD) == saved_view(tracker, "leaderboard-bbbbbbbb")
    assert f"viewStateShareKey={LEADERBOARD}\n" in how_to_open(tracker)
    assert how_to_open(tracker).endswith("viewStateShareKey=charts&compareRunsMode=CHART")


@pytest.mark.parametrize(
    ("uri", "root"),
    [
        ("https://me:secret@mlflow.example.org/team/", "https://mlflow.example.org/team/#/"),
        ("http://10.0.0.7:5000", "http://10.0.0.7:5000/#/"),
        ("http://127.0.0.1:5000", ""),
        ("http://localhost:5000", ""),
        ("http://[::1]:5000", ""),
        ("sqlite:////data/mlflow.db", ""),
        ("postgresql://me:secret@db/mlflow", ""),
    ],
)
def test_a_page_that_is_passed_on_links_to_a_store_that_others_reach(tracker: Tracker, uri: str, root: str) -> None:
    tracker.uri = uri
    address = shared_run_address(tracker, "1", "r")
    assert address == (root and f"{root}experiments/1/runs/r?workflowType=machine_learning")


def test_no_two_variants_of_an_evaluation_have_one_colour(tracker: Tracker) -> None:
    """Two that were coloured at once by two workers are told apart by the next; a person's colour stays."""
    colour, tags = "mlflow.runColor", {run_names.EVALUATION: "a" * 16}
    mine, *others = [
        tracker.client.create_run(tracker.experiment_id, tags={"stage": "main", **tags, **own}).info.run_id
        for own in ({colour: "#123456"}, {colour: "#abcdef"}, {colour: "#abcdef"}, *({} for _ in range(21)))
    ]
    save_leaderboard(tracker, mine)
    found = {run_id: tracker.client.get_run(run_id).data.tags[colour] for run_id in (mine, *others)}
    assert found[mine] == "#123456" and len(set(found.values())) == 24
    assert all(re.fullmatch("#[0-9a-f]{6}", one) for one in found.values())
    save_leaderboard(tracker, others[5])
    assert {run_id: tracker.client.get_run(run_id).data.tags[colour] for run_id in found} == found


def test_a_version_tells_the_newest_decision_in_words(tracker: Tracker) -> None:
    tracker.client.create_registered_model("m")
    version = str(tracker.client.create_model_version("m", source="runs:/x", description="Flips 3 %.").version)
    for words in ("a is now 'champion'.", "b " + 5000 * "x"):
        note_decision(tracker, "m", version, "r" * 32, words, {})
        described = tracker.client.get_model_version("m", version).description
        assert described == f"Flips 3 %.\n\n**Decision:** {words}"[:5000]


def test_a_run_without_an_evaluation_saves_no_leaderboard_and_links_to_none(tracker: Tracker) -> None:
    with tracker.run("x", "main", {}) as run:
        pass
    save_leaderboard(tracker, run.run_id)
    assert "Leaderboard" not in how_to_open(tracker, run.run_id)


def test_a_parameter_that_mlflow_has_logged_as_auto_shows_its_value_beside(tracker: Tracker) -> None:
    with tracker.run("x", "main", {}) as run:
        tracker.client.log_param(run.run_id, "bits", "auto")
        tracker.client.log_param(run.run_id, "tasks", "auto")
        for _ in range(2):
            run.log_params({"bits": 4, "tasks": "auto", "group_size": 128})
    assert tracker.client.get_run(run.run_id).data.params == {
        "bits": "auto",
        "resolved/bits": "4",
        "tasks": "auto",
        "group_size": "128",
    }
