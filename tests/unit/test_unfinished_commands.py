"""Commands that did not end: noted on disk while they run, listed, and done again."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import mlflow
import pytest

import mlflow_compress as mc
from mlflow_compress.commands.command import all_commands
from mlflow_compress.commands.judge.parameters import JudgeConfig
from mlflow_compress.commands.promote.parameters import PromoteConfig
from mlflow_compress.commands.resume.parameters import ResumeConfig
from mlflow_compress.commands.resume.run import run_resume
from mlflow_compress.commands.shared.get_or_create import unfinished_until_ended
from mlflow_compress.config import parameters
from mlflow_compress.errors import (
    ConfigError,
    JudgeError,
    MachineError,
    StageError,
    StoreAwayError,
    TrackingError,
)
from mlflow_compress.home import VARIABLE
from mlflow_compress.paths import STARTED_IN
from mlflow_compress.tracking import projects, run_names
from mlflow_compress.tracking.experiment import search_runs
from mlflow_compress.tracking.live_processes import run_not_closed, run_opened
from mlflow_compress.tracking.tracker import Tracker
from mlflow_compress.tracking.unfinished_commands import noted, unfinished_commands
from mlflow_compress.tracking.waiting import WAIT_VARIABLE
from tests.conftest import Fork

AWAY = StoreAwayError("the server is away")


@pytest.fixture(autouse=True)
def any_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `promote` take baselines of which the store has no run: what it does is replaced here."""
    monkeypatch.setattr("mlflow_compress.commands.promote.command.require_tag", lambda *_: None)


def leave(uri: str, error: BaseException, **parameters: str) -> None:
    with pytest.raises(type(error)), noted(uri, "promote", parameters):
        assert parameters not in [left.parameters for left in unfinished_commands(uri)]  # it runs now
        raise error


BROKEN_OFF = [
    KeyboardInterrupt(),
    SystemExit(1),
    AWAY,
    MachineError("the disk is full"),
    RuntimeError("nobody has foreseen it"),
    StageError("Stage judge was killed by SIGKILL", stage="judge", broke_off=True),
]
OVER = [ConfigError("it would come again"), JudgeError("the budget is spent"), StageError("no such key", stage="judge")]


@pytest.mark.parametrize("error", BROKEN_OFF, ids=repr)
def test_what_did_not_end_is_listed(tracker: Tracker, error: BaseException) -> None:
    leave(tracker.uri, error, model="demo")
    [left] = unfinished_commands(tracker.uri)
    assert (left.command, left.parameters) == ("promote", {"model": "demo"})
    assert json.loads(left.path.read_text())["command"] == "promote"  # notes are JSON for people


def test_what_has_ended_or_was_run_again_is_not_listed(tracker: Tracker) -> None:
    for error in OVER:
        leave(tracker.uri, error, model="demo")
    with noted(tracker.uri, "promote", {"model": "demo"}):
        pass
    assert unfinished_commands(tracker.uri) == []
    leave(tracker.uri, AWAY, model="demo")
    leave(tracker.uri, AWAY, model="other")
    with noted(tracker.uri, "promote", {"model": "demo"}):
        pass
    assert [left.parameters["model"] for left in unfinished_commands(tracker.uri)] == ["other"]


def test_stages_of_a_command_are_not_noted(tracker: Tracker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STARTED_IN, "/somewhere")
    leave(tracker.uri, AWAY, model="demo")
    assert unfinished_commands(tracker.uri) == []


def test_the_experiment_of_that_moment_is_kept(tracker: Tracker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    leave(tracker.uri, AWAY, experiment="auto")
    assert unfinished_commands(tracker.uri)[0].parameters == {"experiment": "mine"}


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"command": "promote"}', '{"command": 1, "parameters": [], "process": ""}']
)
def test_a_damaged_note_is_named(tracker: Tracker, text: str) -> None:
    leave(tracker.uri, AWAY, model="demo")
    [left] = unfinished_commands(tracker.uri)
    left.path.write_text(text)
    with pytest.raises(TrackingError, match=rf"cannot be read.*{left.path.name}.*Delete it"):
        unfinished_commands(tracker.uri)


def test_passwords_are_not_noted(tracker: Tracker) -> None:
    judging = JudgeConfig(judge_base_url="https://me:secret@host/v1", encoder_base_url="https://me:secret@encoder/v1")
    with pytest.raises(StoreAwayError), unfinished_until_ended(judging):
        raise AWAY
    [left] = unfinished_commands(tracker.uri)
    kept = left.path.read_text()
    assert "secret" not in kept and "host/v1" in kept and "encoder/v1" in kept


def test_resume_does_them_again(tracker: Tracker, monkeypatch: pytest.MonkeyPatch) -> None:
    for model in ("one", "two"):
        with pytest.raises(StoreAwayError), unfinished_until_ended(PromoteConfig(model=model)):
            raise AWAY
    listed = run_resume(ResumeConfig(dry_run=True))
    assert [one.command for one in listed.commands] == ["promote --model one", "promote --model two"]
    assert listed.summary == "2 commands: 2 unfinished" and listed.exit_code == 0

    ran: list[str] = []

    class Found:
        summary = "promoted"

    def again(config: PromoteConfig) -> Found:
        ran.append(config.model)
        if config.model == "two":
            raise ConfigError("there is no such model")
        return Found()

    monkeypatch.setattr("mlflow_compress.commands.promote.run.run_promote", again)
    done = run_resume(ResumeConfig())
    assert ran == ["one", "two"]
    assert [(one.state, one.outcome) for one in done.commands] == [
        ("finished", "promoted"),
        ("failed", "there is no such model."),
    ]
    assert done.exit_code == 1 and len(done.to_pandas()) == 2
    assert run_resume(ResumeConfig()).summary.startswith("Nothing to resume")


def test_what_breaks_off_again_stays_and_holds_up_nothing(tracker: Tracker, monkeypatch: pytest.MonkeyPatch) -> None:
    for model in ("one", "two"):
        leave(tracker.uri, RuntimeError("nobody has foreseen it"), model=model)

    def again(config: PromoteConfig) -> SimpleNamespace:
        if config.model == "one":
            raise RuntimeError("nobody has foreseen it")
        return SimpleNamespace(summary="promoted")

    monkeypatch.setattr("mlflow_compress.commands.promote.run.run_promote", again)
    done = run_resume(ResumeConfig())
    assert done.summary == "2 commands: 1 unfinished, 1 finished" and done.exit_code == 1
    [left] = unfinished_commands(tracker.uri)
    assert left.parameters["model"] == "one"
    pattern = left.path.with_name(f"{left.key}.*")
    assert done.commands[0].outcome == (
        f"nobody has foreseen it. It stays on the list; to abandon it, delete {pattern}"
    )


@pytest.mark.parametrize(
    ("dies", "listed"), [("os.kill(os.getpid(), 9)", 1), ("1 / 0", 1), ("raise ConfigError('no')", 0)]
)
def test_a_stage_that_breaks_off_leaves_its_command_unfinished(
    dies: str, listed: int, tracker: Tracker, python: Fork
) -> None:
    """The stage's process ends in one of three ways; it is the command line, whose stage is replaced."""
    code = "import os, sys\nfrom mlflow_compress import cli\nfrom mlflow_compress.errors import ConfigError\n"
    code += f"def _answer(*_):\n    {dies}\ncli._answer = _answer\nsys.exit(cli.main(['quantize']))"

    def run_code(arguments: list[str], *, environment: dict[str, str], **_: object) -> int:
        return python("-c", code, **environment).returncode

    stage = SimpleNamespace(run=run_code)
    with pytest.raises(StageError), noted(tracker.uri, "main", {"method": "rtn"}), tracker.run("x", "main", {}) as run:
        projects.run_stage(tracker, "quantize", {}, parent=run, python=stage)  # type: ignore[arg-type]
    assert len(unfinished_commands(tracker.uri)) == listed


_KILLED = """
import os
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.tracker import Tracker
from mlflow_compress.tracking.unfinished_commands import noted

tracker = Tracker()
with noted(tracker.uri, "main", {parameters}):
    with tracker.{opens} as run:
        run.log_json({{}}, run_names.PARAMETERS)
        print(run.run_id, flush=True)
        if not {finishes}:
            os.kill(os.getpid(), 9)
    os.kill(os.getpid(), 9)
"""


@pytest.fixture
def killed(python: Fork) -> Callable[..., str]:
    """Return the run of a command that dies of signal 9: with its note, its lock and its open run."""

    def killed(parameters: dict[str, str], opens: str = "run('rtn', 'main', {})", *, finishes: bool = False) -> str:
        process = python("-c", _KILLED.format(parameters=parameters, opens=opens, finishes=finishes))
        assert process.returncode == -9, process.stderr
        return process.stdout.strip()

    return killed


def test_main_killed_once_and_resume_killed_three_times_are_one_piece_of_work(
    tracker: Tracker, killed: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = killed({"method": "rtn", "bits": "4"})
    done: list[dict[str, str]] = []

    def run_again(*, progress: object, **values: str) -> SimpleNamespace:
        assert values == {"resume": begun, "experiment": "mlflow-compress"}
        if len(done) < 3:
            done.append(values)
            killed({"resume": begun, "judge": "true"}, f"reopen('{begun}')")
            raise KeyboardInterrupt  # this process stands for the one that was killed
        done.append(values)
        return SimpleNamespace(summary="published")

    monkeypatch.setattr(
        "mlflow_compress.commands.resume.run.COMMANDS",
        {"main": SimpleNamespace(function=run_again, tells=True, parameters=None)},
    )
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            run_resume(ResumeConfig())
        assert run_resume(ResumeConfig(dry_run=True)).summary == "1 command: 1 unfinished"
    [command] = run_resume(ResumeConfig()).commands
    assert (command.state, command.outcome) == ("finished", "published")
    assert len(done) == 4 and unfinished_commands(tracker.uri) == []
    assert tracker.find_unfinished("main") == [begun]


def test_a_run_that_finished_before_its_note_went_is_not_done_again(
    tracker: Tracker, killed: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    finished = killed({"method": "rtn", "bits": "4"}, finishes=True)
    commands = {"main": SimpleNamespace(tells=False, parameters=None)}  # no function: it is not called
    monkeypatch.setattr("mlflow_compress.commands.resume.run.COMMANDS", commands)
    for dry_run in (True, False):
        done = run_resume(ResumeConfig(dry_run=dry_run))
        assert done.summary == "1 command: 1 finished" and done.exit_code == 0
        assert done.commands[0].outcome == f"Run {finished} had finished, but was killed before it could report it"
    assert unfinished_commands(tracker.uri) == []
    assert tracker.find_unfinished("main") == []


def test_what_another_process_goes_on_with_is_left_to_it(tracker: Tracker, killed: Callable[..., str]) -> None:
    begun = killed({"method": "rtn", "bits": "4"})
    Tracker()  # ends the run of the killed process
    with tracker.reopen(begun):
        assert run_resume(ResumeConfig()).commands == ()
    assert len(unfinished_commands(tracker.uri)) == 1


@pytest.mark.usefixtures("no_fresh_process")
def test_a_command_is_done_again_in_the_experiment_where_it_began(
    tracker: Tracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = tracker.client.create_experiment("the interrupted one")

    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("mlflow_compress.commands.quantize.run.compress_model", interrupted)
        patch.setenv("MLFLOW_EXPERIMENT_ID", experiment)
        mc.compress(method="rtn")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "another one")
    assert run_resume(ResumeConfig()).summary == "1 command: 1 finished"
    [made] = tracker.client.search_runs([experiment])  # the killed run has gone
    assert (made.info.status, made.data.tags[run_names.STAGE]) == ("FINISHED", "quantize")


def test_killed_runs_without_a_metric_go_when_their_work_is_done(tracker: Tracker) -> None:
    def interrupted(stage: str, **tags: str) -> str:
        with pytest.raises(KeyboardInterrupt), tracker.run(stage, stage, tags, own=stage == "main") as run:
            if "metric" in tags:
                run.log_values({"kl": 0.5})
            raise KeyboardInterrupt
        return str(run.run_id)

    with pytest.raises(KeyboardInterrupt), noted(tracker.uri, "main", {"method": "rtn"}):
        main = interrupted("main")
        below = [interrupted(stage, **{run_names.PARENT: main}) for stage in ("quantize", "evaluate")]
        measured = interrupted("speed", **{run_names.PARENT: main, "metric": "kl"})
        raise KeyboardInterrupt
    baseline = interrupted("baseline", **{run_names.FINGERPRINT: "abc"})
    other = interrupted("baseline", **{run_names.FINGERPRINT: "abcd"})
    with tracker.run("baseline", "baseline", {run_names.FINGERPRINT: "abc"}, own=False), tracker.reopen(main):
        pass

    def stage_of(run_id: str) -> str:
        return str(tracker.client.get_run(run_id).info.lifecycle_stage)

    assert [stage_of(run_id) for run_id in (*below, baseline)] == ["deleted"] * 3
    assert [stage_of(run_id) for run_id in (main, measured, other)] == ["active"] * 3
    assert tracker.client.get_run(main).info.status == "FINISHED"


def test_the_same_command_by_hand_drops_the_run_that_was_killed(tracker: Tracker) -> None:
    def promote() -> str:
        with unfinished_until_ended(PromoteConfig()), tracker.run("promote", "promote", {}) as run:
            if not tracker.find_unfinished("promote", **{run_names.RUN_ERROR: "interrupted"}):
                raise KeyboardInterrupt
        return str(run.run_id)

    with pytest.raises(KeyboardInterrupt):
        promote()
    done = promote()
    assert [run.info.run_id for run in search_runs(tracker.client, "tags.stage = 'promote'")] == [done]


def test_a_server_that_is_still_away_keeps_them(tracker: Tracker, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreAwayError), unfinished_until_ended(PromoteConfig(model="one")):
        raise AWAY

    def away(config: object) -> None:
        raise AWAY

    monkeypatch.setattr("mlflow_compress.commands.promote.run.run_promote", away)
    with pytest.raises(StoreAwayError):
        run_resume(ResumeConfig())
    assert len(unfinished_commands(tracker.uri)) == 1


def test_a_run_that_could_not_be_closed_is_closed_by_the_next_command_of_the_same_process(tracker: Tracker) -> None:
    run_id = tracker.client.create_run(tracker.experiment_id).info.run_id
    run_opened(tracker.uri, run_id)
    run_not_closed(tracker.uri, run_id)
    Tracker()
    assert tracker.client.get_run(run_id).info.status == "KILLED"


def test_a_home_that_cannot_be_written_is_one_clear_error(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (workdir / "file").write_text("")
    monkeypatch.setenv(VARIABLE, str(workdir / "file"))
    with pytest.raises(TrackingError, match=rf"cannot be written.*Set {VARIABLE}"):
        mc.promote()


@pytest.mark.parametrize(
    ("command", "settings"),
    [
        ("quantize", {"method": "rtn"}),
        ("main", {"method": "rtn"}),
        ("sweep", {"methods": "rtn", "bits": "4"}),
        ("promote", {}),
    ],
)
def test_a_command_that_finds_the_server_away_is_noted(
    command: str, settings: dict[str, str], workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = "http://127.0.0.1:9"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")  # as the command line sets it
    monkeypatch.setenv(WAIT_VARIABLE, "0")
    monkeypatch.setenv(VARIABLE, str(workdir / "home"))
    mlflow.set_tracking_uri(uri)
    with pytest.raises(StoreAwayError):
        getattr(mc, {"quantize": "compress", "main": "run"}.get(command, command))(**settings)
    [left] = unfinished_commands(uri)
    assert left.command == command


@pytest.mark.parametrize("verb", [name for name, command in all_commands().items() if command.resumable])
def test_every_noted_command_is_done_again_by_its_own_stage(
    verb: str, tracker: Tracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls = all_commands()[verb].parameters
    served = {"checkpoint": "endpoint:http://127.0.0.1:1/v1", "served_model": "x"}
    limit = {"max_kl": 0.1}  # a search needs one
    asked = {
        name: value for some in (served, limit) if some.keys() <= parameters(cls).keys() for name, value in some.items()
    }
    with pytest.raises(StoreAwayError), unfinished_until_ended(cls(**asked)):
        raise AWAY
    monkeypatch.setattr(f"mlflow_compress.commands.{verb}.run.run_{verb}", lambda *_: SimpleNamespace(summary=verb))
    [done] = run_resume(ResumeConfig()).commands
    assert (done.command.split()[0], done.outcome) == (verb, verb)
