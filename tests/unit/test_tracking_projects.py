"""Stages in processes of their own: how their end, and that of the main process, is seen in the store."""

import os
import signal
import subprocess
import sys
import textwrap
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from mlflow.entities import Run

from mlflow_compress.errors import StageError
from mlflow_compress.lifetime import killed_by
from mlflow_compress.paths import STARTED_IN
from mlflow_compress.tracking import projects, run_names
from mlflow_compress.tracking.quiet_project_runs import runs_our_project
from mlflow_compress.tracking.tracker import Tracker
from mlflow_compress.warm_python import WarmPython
from tests.conftest import Fork
from tests.waiting import until

ROOT = Path(__file__).parents[2]
PARENT = """
import sys
from pathlib import Path
from mlflow_compress import lifetime
from mlflow_compress.tracking import projects
from mlflow_compress.tracking.tracker import Tracker
from mlflow_compress.warm_python import WarmPython

projects.project_folder = lambda stage: Path(sys.argv[1])
lifetime.raise_on_signals()
tracker = Tracker()
with WarmPython([]) as python, tracker.run("main", "main", {}) as run:
    projects.run_stage(tracker, "evaluate", {}, parent=run, python=python)
"""
STAGE = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {root!r})
from mlflow_compress import lifetime
from mlflow_compress.tracking.tracker import Tracker

lifetime.raise_on_signals()
lifetime.end_with_parent()
with Tracker().run("stage", "evaluate", {{}}):
    Path("started").write_text(str(os.getpid()))
    signal.pause()
"""


def project(folder: Path, code: str) -> Path:
    """Write an MLflow project whose only stage runs `code`."""
    folder.mkdir()
    (folder / "MLproject").write_text("name: stage\nentry_points:\n  main:\n    command: python run.py\n")
    (folder / "run.py").write_text(textwrap.dedent(code))
    return folder


def runs(tracker: Tracker) -> dict[str, Run]:
    """Return every run of the store by stage."""
    found = tracker.client.search_runs([tracker.experiment_id])
    return {run.data.tags[run_names.STAGE]: run for run in found}


def fails_with(tracker: Tracker, folder: Path, python: Fork, monkeypatch: pytest.MonkeyPatch) -> StageError:
    monkeypatch.setattr(projects, "project_folder", lambda stage: folder)
    with pytest.raises(StageError) as caught, tracker.run("main", "main", {}) as run:
        projects.run_stage(tracker, "evaluate", {}, parent=run, python=python.warm)
    return caught.value


@pytest.mark.parametrize("name", ["SIGFPE", "SIGKILL", "SIGSEGV"])
def test_a_stage_that_a_signal_killed_names_it_and_has_failed(
    name: str, tracker: Tracker, tmp_path: Path, python: Fork, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = project(tmp_path / "p", f"import os, signal\nos.kill(os.getpid(), signal.{name})\n")
    error = fails_with(tracker, folder, python, monkeypatch)
    assert str(error).startswith(f"Stage evaluate was killed by {name}.") and error.stage == "evaluate"
    assert ("memory" in str(error)) == (name == "SIGKILL")
    found = runs(tracker)
    assert {run.info.status for run in found.values()} == {"FAILED"}
    assert found["evaluate"].data.tags[run_names.RUN_ERROR] == f"Stage evaluate was killed by {name}"
    assert f"killed by {name}" in found["main"].data.tags[run_names.RUN_ERROR]


def test_a_stage_that_ends_by_itself_tells_its_exit_code_and_its_error(
    tracker: Tracker, tmp_path: Path, python: Fork, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = fails_with(tracker, project(tmp_path / "p", "raise SystemExit(3)\n"), python, monkeypatch)
    assert str(silent) == "Stage evaluate failed: exit code 3."
    code = f"""
        import sys
        sys.path.insert(0, {str(ROOT)!r})
        from mlflow_compress.cli import main
        raise SystemExit(main(["evaluate", "--limit", "-1"]))
    """
    refused = fails_with(tracker, project(tmp_path / "q", code), python, monkeypatch)
    assert "Stage evaluate failed: Parameter 'limit' is too small" in str(refused)


def test_python_is_this_interpreter_and_the_environment_is_as_before(
    tracker: Tracker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    before = dict(os.environ)
    folder = project(tmp_path / "p", "import sys\nfrom pathlib import Path\nPath('which').write_text(sys.prefix)\n")
    monkeypatch.setattr(projects, "project_folder", lambda stage: folder)
    with WarmPython([]) as python, tracker.run("main", "main", {}) as run:
        projects.run_stage(tracker, "evaluate", {}, parent=run, python=python)
    assert (folder / "which").read_text() == sys.prefix
    assert dict(os.environ) == before


def started(tmp_path: Path) -> tuple[subprocess.Popen[bytes], int]:
    """Start a main process with a stage that waits for a signal; return it and the stage's process id."""
    folder = project(tmp_path / "p", STAGE.format(root=str(ROOT)))
    (tmp_path / "parent.py").write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    main = subprocess.Popen([sys.executable, "parent.py", str(folder)], cwd=tmp_path, env=environment)
    noted = folder / "started"
    until(lambda: noted.exists() and noted.read_text(), ended=lambda: main.poll() is not None)
    return main, int(noted.read_text())


def has_ended(pid: int) -> bool:
    """Return whether a process has ended; one that nobody has waited for yet has ended too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=[pytest.mark.slow]), signal.SIGINT])
def test_a_signal_to_the_main_process_ends_the_stage_and_both_runs_are_killed(
    number: signal.Signals, tracker: Tracker, tmp_path: Path
) -> None:
    main, stage = started(tmp_path)
    main.send_signal(number)
    main.wait()
    assert has_ended(stage), "the stage outlived the main process"
    assert {name: run.info.status for name, run in runs(tracker).items()} == {"main": "KILLED", "evaluate": "KILLED"}


@pytest.mark.ci
def test_a_stage_ends_when_the_main_process_was_killed_at_once(tracker: Tracker, tmp_path: Path) -> None:
    main, stage = started(tmp_path)
    main.kill()
    main.wait()
    until(lambda: has_ended(stage))
    assert runs(tracker)["evaluate"].info.status == "KILLED"


@pytest.mark.parametrize(
    ("returncode", "name"), [(-8, "SIGFPE"), (136, "SIGFPE"), (137, "SIGKILL"), (0, None), (1, None), (2, None)]
)
def test_signals_are_read_from_return_codes(returncode: int, name: str | None) -> None:
    assert killed_by(returncode) == name


INTERRUPTED = """
import signal, sys
from mlflow_compress import cli
from mlflow_compress.commands.evaluate import run

def slow(*_, **__):
    try:
        signal.raise_signal(signal.SIGINT)
        signal.pause()
    except KeyboardInterrupt:
        signal.raise_signal(signal.SIGTERM)  # while runs are closed
        raise

run.run_evaluate = slow
sys.exit(cli.main(["evaluate", "--checkpoint", "endpoint:http://127.0.0.1:1/v1", "--endpoint_args", "served_model=x"]))
"""


@pytest.mark.parametrize("stage", [False, True])
def test_ctrl_c_says_at_once_what_is_kept_and_a_stage_leaves_that_to_its_main_process(
    stage: bool, tmp_path: Path, python: Fork
) -> None:
    done = python("-c", INTERRUPTED, cwd=tmp_path, **({STARTED_IN: "x"} if stage else {}))
    said = (
        "mlflow-compress: interrupted. Computed results are saved: continue with the same command or "
        "`mlflow-compress resume`; closing runs\n"
    )
    assert (done.returncode, done.stderr) == (130, "" if stage else said)


def test_it_is_a_plug_in_of_mlflow() -> None:
    (place,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][
        "mlflow.run_context_provider"
    ].values()
    module, name = place.split(":")
    assert getattr(import_module(module), name)().in_context() is False


@pytest.mark.parametrize("folder", [ROOT, ROOT / "projects" / "evaluate"], ids=["root", "stage"])
def test_our_projects_are_told_from_others(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "MLproject").write_text("entry_points: {main: {command: 'python train.py'}}")
    assert runs_our_project(["mlflow", "run", str(folder), "--env-manager", "local", "-P", "bits=4"])
    assert runs_our_project(["mlflow", "run", "-e", "sweep", str(folder)])
    assert not runs_our_project(["mlflow", "run", str(tmp_path)])
    assert not runs_our_project(["mlflow", "server", str(folder)])
    assert not runs_our_project(["mlflow"])
    monkeypatch.chdir(folder)
    assert runs_our_project(["mlflow", "run", "."])


def test_only_errors_are_left_of_its_lines_about_projects_and_databases(python: Fork) -> None:
    code = (
        "import sys, logging; sys.argv = ['mlflow', 'run', {}]; import mlflow.projects\n"
        "from mlflow.tracking.context import registry\n"
        "from mlflow_compress.tracking.quiet_project_runs import QuietProjectRuns\n"
        "registry._run_context_provider_registry.register(QuietProjectRuns)\n"
        "print([logging.getLogger(name).getEffectiveLevel() for name in"
        " ('mlflow.projects.backend.local', 'mlflow.projects.utils', 'mlflow.store.db.utils', 'mlflow.utils.virtualenv')])"
    )
    for folder, levels in ((ROOT, "[30, 30, 30, 20]"), (ROOT / "docs", "[20, 20, 20, 20]")):
        done = python("-c", code.format(repr(str(folder))))
        assert (done.returncode, done.stdout.strip()) == (0, levels), done.stderr
