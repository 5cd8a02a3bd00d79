"""Tracking against a real SQLite store: run life cycle, look-ups, registry, saved view."""

import base64
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import zlib
from pathlib import Path

import mlflow
import pytest

from mlflow_compress.errors import ConfigError, TrackingError
from mlflow_compress.records import MetricResult
from mlflow_compress.tracking import artifacts as downloads
from mlflow_compress.tracking import live_processes, run_names
from mlflow_compress.tracking.artifacts import LIMIT_VARIABLE, Downloads, limit_bytes
from mlflow_compress.tracking.live_processes import dead_processes, is_alive, own_name, scratch_folder
from mlflow_compress.tracking.model_registry import move_alias, note_decision, previous_alias, registered_name
from mlflow_compress.tracking.store import whole_id
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
    assert stored.data.tags[run_names.RUN_ERROR] == (str(error) or "interrupted")


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


def test_a_relative_store_is_made_absolute_and_one_set_later_is_the_next_one(
    workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow.set_tracking_uri("sqlite:///mlflow.db")
    assert Tracker().uri == f"sqlite:///{workdir / 'mlflow.db'}" == os.environ["MLFLOW_TRACKING_URI"]
    first = Tracker()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{workdir}/another.db")
    assert Tracker().uri == mlflow.get_tracking_uri() == f"sqlite:///{workdir}/another.db" != first.uri


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
        with tracker.run("x", "main", {run_names.EVALUATION: evaluation, run_names.ON_LEADERBOARD: "shown"}) as run:
            run.log_values({"size/bits_per_weight": 4.0, "distance/kl_mean": 0.1})
        save_leaderboard(tracker.client, run.run_id)
        runs.append(run.run_id)
    state = saved_view(tracker, "leaderboard-aaaaaaaa")
    columns = ["params.`default_policy`", "metrics.`distance/flips_pct`", "metrics.`distance/kl_mean`"]
    assert state["selectedColumns"][:3] == columns == state["columnOrder"][2:5]  # type: ignore[index]
    charts = saved_view(tracker, "charts-aaaaaaaa")
    assert charts["searchFilter"] == state["searchFilter"]
    first, second = charts["compareRunCharts"]  # type: ignore[misc]
    assert (first["xaxis"]["key"], first["yaxis"]["key"]) == ("size/bits_per_weight", "distance/kl_mean")
    assert second["metricKey"] == "distance/kl_mean"  # no chart of what no variant has, such as speed
    shown = tracker.client.search_runs([tracker.experiment_id], filter_string=str(state["searchFilter"]))
    assert [run.info.run_id for run in shown] == runs[:1]
    assert "viewStateShareKey=leaderboard-aaaaaaaa" in how_to_open(tracker.client, tracker.uri, runs[0])
    assert f"runs/{runs[0]}?workflowType=machine_learning" in how_to_open(tracker.client, tracker.uri, runs[0])
    # The plain name is the newest evaluation's.
    assert saved_view(tracker, LEADERBOARD) == saved_view(tracker, "leaderboard-bbbbbbbb")
    said = how_to_open(tracker.client, tracker.uri, tracker.client.create_run(tracker.experiment_id).info.run_id)
    assert f"={LEADERBOARD}\n" in said and said.endswith("viewStateShareKey=charts&compareRunsMode=CHART")


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
    address = shared_run_address(tracker.uri, "1", "r")
    assert address == (root and f"{root}experiments/1/runs/r?workflowType=machine_learning")


def test_no_two_variants_of_an_evaluation_have_one_colour(tracker: Tracker) -> None:
    """Two that were coloured at once by two workers are told apart by the next; a person's colour stays."""
    colour, tags = "mlflow.runColor", {run_names.EVALUATION: "a" * 16, run_names.ON_LEADERBOARD: "shown"}
    mine, *others = [
        tracker.client.create_run(tracker.experiment_id, tags={"stage": "main", **tags, **own}).info.run_id
        for own in ({colour: "#123456"}, {colour: "#abcdef"}, {colour: "#abcdef"}, *({} for _ in range(21)))
    ]
    save_leaderboard(tracker.client, mine)
    found = {run_id: tracker.client.get_run(run_id).data.tags[colour] for run_id in (mine, *others)}
    assert found[mine] == "#123456" and len(set(found.values())) == 24
    assert all(re.fullmatch("#[0-9a-f]{6}", one) for one in found.values())
    save_leaderboard(tracker.client, others[5])
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
    save_leaderboard(tracker.client, run.run_id)
    assert "Leaderboard" not in how_to_open(tracker.client, tracker.uri, run.run_id)


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


@pytest.fixture(autouse=True)
def _another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "_in_use", {})


def end_use() -> None:
    """Let go of every entry, as the end of the process does."""
    for lock in downloads._in_use.values():
        lock.release()
    downloads._in_use.clear()


class Server:
    """Gives files of 100 bytes and counts the downloads."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, folder: Path) -> None:
        self.asked += 1
        (folder / "part").mkdir()
        (folder / "part" / "data").write_bytes(b"x" * 100)


def entries(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_dir()}


def test_an_entry_is_downloaded_once_and_by_the_next_process_not_at_all(tmp_path: Path) -> None:
    server, cache = Server(), Downloads(tmp_path / "cache", 10_000)
    first = cache.get("a", server)
    assert (first / "part" / "data").read_bytes() == b"x" * 100
    assert cache.get("a", server) == first
    end_use()
    assert cache.get("a", server) == first and server.asked == 1


def test_a_changed_copy_is_downloaded_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server, cache = Server(), Downloads(tmp_path, 10_000)
    data = cache.get("a", server) / "part" / "data"
    end_use()
    data.write_bytes(b"y" * 100)  # the same size: only its digest tells
    assert (cache.get("a", server) / "part" / "data").read_bytes() == b"x" * 100
    assert server.asked == 2 and "was changed" in caplog.text


def test_an_interrupted_download_leaves_nothing(tmp_path: Path) -> None:
    cache = Downloads(tmp_path, 10_000)

    def broken(folder: Path) -> None:
        (folder / "half").write_bytes(b"x")
        raise OSError("the line went dead")

    with pytest.raises(OSError, match="went dead"):
        cache.get("a", broken)
    assert entries(tmp_path) == set()
    (tmp_path / "b.partial").mkdir()  # of a process that was killed
    cache.get("a", Server())
    assert entries(tmp_path) == {"a"}


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    server, cache = Server(), Downloads(tmp_path, 250)
    for number, key in enumerate("ab"):
        cache.get(key, server)
        os.utime(tmp_path / f"{key}.json", (number, number))
    end_use()
    cache.get("a", server)  # now b is the older one
    end_use()
    cache.get("c", server)
    assert entries(tmp_path) == {"a", "c"} and server.asked == 3


def test_what_this_process_uses_stays_even_above_the_limit(tmp_path: Path) -> None:
    server, cache = Server(), Downloads(tmp_path, 150)
    for key in "abc":
        cache.get(key, server)
    assert entries(tmp_path) == {"a", "b", "c"}
    end_use()
    cache.get("d", server)
    assert entries(tmp_path) == {"d"}


def test_what_another_process_uses_stays_until_it_ends_even_killed(tmp_path: Path) -> None:
    code = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        from mlflow_compress.tracking.artifacts import Downloads
        Downloads(Path(sys.argv[1]), 150).get("theirs", lambda folder: (folder / "data").write_bytes(b"x" * 100))
        print("ready", flush=True)
        sys.stdin.read()
        """
    )
    command, pipe = [sys.executable, "-c", code, str(tmp_path)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as other:
        try:
            assert other.stdout is not None and other.stdout.readline() == "ready\n"
            os.utime(tmp_path / "theirs.json", (0, 0))
            cache = Downloads(tmp_path, 150)
            cache.get("ours", Server())
            assert entries(tmp_path) == {"theirs", "ours"}
        finally:
            other.send_signal(signal.SIGKILL)
    cache.get("ours too", Server())
    assert entries(tmp_path) == {"ours", "ours too"}


@pytest.mark.parametrize("text", ["", "much", "0", "-1", "nan", "inf"])
def test_a_limit_that_is_none_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, text)
    with pytest.raises(ConfigError, match=LIMIT_VARIABLE):
        limit_bytes()


def test_the_limit_is_twenty_gigabytes_or_what_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LIMIT_VARIABLE, raising=False)
    assert limit_bytes() == 20_000_000_000
    monkeypatch.setenv(LIMIT_VARIABLE, "0.5")
    assert limit_bytes() == 500_000_000


DIES = """
import os, signal, sys
from pathlib import Path
from mlflow_compress.tracking.live_processes import scratch_folder
from mlflow_compress.tracking.store import whole_id
from mlflow_compress.tracking.tracker import Tracker
tracker = Tracker()
stage = sys.argv[1]
with tracker.run("x", stage, {}) as run, scratch_folder(tracker.uri) as folder:
    (folder / "half").write_text("half")
    run.log_json({"method": "rtn"}, "parameters.json")
    run.log_file(folder / "half", "records")
    tracker.client.create_logged_model(tracker.experiment_id, name="half", source_run_id=run.run_id)
    print(run.run_id, flush=True)
    if sys.argv[2] == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.stdin.read()
"""


def processes(workdir: Path) -> list[str]:
    return sorted(path.name for path in (workdir / ".mlflow_compress" / "processes").rglob("*") if path.is_file())


@pytest.mark.ci
@pytest.mark.slow  # two processes that import MLflow
def test_the_next_command_closes_what_a_killed_process_left(workdir: Path) -> None:
    started = [
        subprocess.Popen(
            [sys.executable, "-c", DIES, stage, how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for stage, how in (("main", "dies"), ("evaluate", "lives"))
    ]
    ids = [process.stdout.readline().strip() for process in started if process.stdout]
    assert started[0].wait() == -signal.SIGKILL
    tracker = Tracker()
    killed, living = (tracker.client.get_run(run_id) for run_id in ids)
    assert (killed.info.status, living.info.status) == ("KILLED", "RUNNING")
    assert killed.data.tags[run_names.RUN_ERROR] == "the process was killed"
    # The parameters stay, because `resume` reads them. Half of the results does not.
    assert [entry.path for entry in tracker.client.list_artifacts(ids[0])] == ["parameters.json"]
    models = tracker.client.search_logged_models([killed.info.experiment_id])
    assert [model.source_run_id for model in models] == [ids[1]]
    assert living.data.tags[run_names.PROCESS] in "".join(processes(workdir))
    assert killed.data.tags[run_names.PROCESS] not in "".join(processes(workdir))  # its scratch folder too

    started[1].communicate("")
    assert tracker.client.get_run(ids[1]).info.status == "FINISHED"
    assert not any(living.data.tags[run_names.PROCESS] in name for name in processes(workdir))


def test_a_process_knows_itself_alive(tracker: Tracker) -> None:
    name = own_name(tracker.uri)
    assert str(os.getpid()) in name and is_alive(tracker.uri, name)
    with dead_processes(tracker.uri) as dead:
        assert name not in dead
    assert not is_alive(tracker.uri, "host-1-0123456789ab")


def test_a_dead_process_is_forgotten_only_when_its_runs_are_closed(tracker: Tracker) -> None:
    own_name(tracker.uri)
    [mine] = (path for path in live_processes._place(tracker.uri).iterdir() if path.suffix == ".lock")
    left = mine.with_name("host-1-0123456789ab.lock")  # nobody holds it
    left.touch()
    with pytest.raises(OSError, match="away"), dead_processes(tracker.uri) as dead:
        assert dead == ["host-1-0123456789ab"]
        raise OSError("the store is away")
    with dead_processes(tracker.uri) as dead:
        assert dead == ["host-1-0123456789ab"]
    with dead_processes(tracker.uri) as dead:
        assert dead == []
    assert mine.exists()


def test_scratch_folders_go_with_their_block_and_runs_name_their_process_until_they_end(tracker: Tracker) -> None:
    with scratch_folder(tracker.uri) as folder:
        (folder / "a").write_text("1")
    assert not folder.exists()
    with tracker.run("x", "quantize", {}) as run:
        assert live_processes.open_runs(tracker.uri) == {run.run_id}
        assert tracker.client.get_run(run.run_id).data.tags[run_names.PROCESS] == own_name(tracker.uri)
    assert live_processes.open_runs(tracker.uri) == frozenset()


def test_the_beginning_of_two_ids_is_refused() -> None:
    with pytest.raises(TrackingError, match=r"begin so\. Allowed: abcdef1, abcdef2"):
        whole_id("abcdef", ["abcdef2", "abcdef1"])
