"""`make check`, pre-commit and CI run the same commands."""

import re
import shutil
import subprocess

import pytest
import yaml

from tests.docs.blocks import ROOT

STATIC = ["ruff check .", "ruff format --check .", "mypy", "lint-imports"]

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def commands(target: str) -> list[str]:
    """Return what make would run."""
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if not line.startswith("make")]


@needs_make
def test_check_is_the_static_checks_and_the_readme_s_tests() -> None:
    tests = re.search(r"python -m pytest[^\n]*", (ROOT / "README.md").read_text())
    assert tests is not None
    assert commands("check") == [*STATIC, tests.group().strip("`")]


def test_ci_runs_the_static_checks() -> None:
    lines = [line.strip() for line in (ROOT / ".ci" / "run").read_text().splitlines()]
    assert "make static" in lines or [line for line in lines if line in STATIC] == STATIC


def test_hooks_are_local_and_run_the_same_tools() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"
    tools = [hook["entry"].replace(" --force-exclude", "") for hook in repository["hooks"]]
    assert tools == [command.removesuffix(" .") for command in STATIC]
    assert all(hook["language"] == "system" for hook in repository["hooks"])


@needs_make
def test_every_tool_that_writes_a_file_is_in_generated() -> None:
    text = "\n".join(commands("generated"))
    assert all(tool.name in text for tool in (ROOT / "tools").glob("write_*.py"))


def test_the_citation_names_the_present_version() -> None:
    from mlflow_compress import __version__

    found = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert found["version"] == __version__ and found["license"] == "Apache-2.0"


def test_templates_can_be_read() -> None:
    for form in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")):
        found = yaml.safe_load(form.read_text())
        if form.name == "config.yml":
            continue
        assert {"name", "description", "body"} <= set(found)
        assert all(part["attributes"]["label"] for part in found["body"])
