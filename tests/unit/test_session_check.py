"""The session's own check: tests that leave runs or checkpoints in the checkout fail the session."""

import shutil
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from tests.conftest import Fork

ROOT = Path(__file__).parents[2]
CLEAN = "def test_something():\n    pass\n"
UNTIDY = """
from pathlib import Path

def test_something():
    Path("mlruns/0/new").mkdir()  # beside a run that was there before
    Path("projects/judge/.mlflow_compress").mkdir()
"""


@pytest.mark.parametrize(("test", "left"), [(CLEAN, ()), (UNTIDY, ("mlruns/0/new", "projects/judge/.mlflow_compress"))])
def test_what_tests_leave_in_the_checkout_fails_the_session(
    tmp_path: Path, test: str, left: tuple[str, ...], python: Fork
) -> None:
    for folder in ("tests", "mlruns/0/old", "projects/judge"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path / "tests")
    (tmp_path / "tests" / "test_it.py").write_text(test)
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_it.py", cwd=tmp_path)
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    assert done.returncode == (1 if left else 0), done.stdout
    assert all(path in done.stdout for path in left)


def test_a_stores_artifacts_lie_beside_it(workdir: Path) -> None:
    client = MlflowClient()
    run = client.create_run("0")
    client.log_text(run.info.run_id, "text", "a.txt")
    assert Path(run.info.artifact_uri.removeprefix("file://")).is_relative_to(workdir)
    assert [path.read_text() for path in workdir.rglob("a.txt")] == ["text"]
