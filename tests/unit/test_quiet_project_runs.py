"""`mlflow run` of this project says nothing of MLflow's own about folders, tables and commands."""

import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from mlflow_compress.tracking.quiet_project_runs import runs_our_project
from tests.conftest import Fork

ROOT = Path(__file__).parents[2]


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
