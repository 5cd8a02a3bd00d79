"""What GitHub and Docker run names files that are there, actions by commit, and one job that may publish."""

import re
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
JOBS = [
    (path.stem, name, job)
    for path in WORKFLOWS
    for name, job in yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].items()
]


@pytest.mark.parametrize(("workflow", "name", "job"), JOBS, ids=lambda part: part if isinstance(part, str) else "")
def test_a_job_runs_scripts_that_are_there_and_actions_of_one_commit(
    workflow: str, name: str, job: dict[str, Any]
) -> None:
    for step in job["steps"]:
        for script in re.findall(r"(?:\.ci|tools)/[\w.]+", step.get("run", "")):
            assert (ROOT / script).is_file(), script
            if not script.endswith(".py"):
                assert (ROOT / script).stat().st_mode & stat.S_IXUSR, script
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step.get("uses", f"a/b@{'0' * 40}")), step
    assert job.get("permissions", {}) == ({"id-token": "write"} if (workflow, name) == ("release", "publish") else {})


def test_a_change_is_checked_by_what_ci_runs_on_every_python_that_is_promised() -> None:
    assert [path.stem for path in WORKFLOWS] == ["checks", "release", "weekly"]
    jobs = {(workflow, name): job for workflow, name, job in JOBS}
    assert ".ci/run" in [step.get("run") for step in jobs["checks", "everything"]["steps"]]
    assert jobs["checks", "wheel"]["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]
    assert 'requires-python = ">=3.11,<3.14"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for path in WORKFLOWS:
        assert yaml.safe_load(path.read_text(encoding="utf-8"))["permissions"] == {"contents": "read"}
        assert "secrets." not in path.read_text(encoding="utf-8")


def test_an_image_has_what_the_package_is_built_from_and_nothing_else() -> None:
    recipe = (ROOT / "Containerfile").read_text(encoding="utf-8")
    copied = {name for line in re.findall(r"^COPY (.*) \S+$", recipe, re.M) for name in line.split()}
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line[0] == "!"}
    assert copied == sent and all((ROOT / name).exists() for name in copied)
    assert {"MLproject", "python_env.yaml", "requirements.txt", "projects", "mlflow_compress"} <= copied  # setup.py's
