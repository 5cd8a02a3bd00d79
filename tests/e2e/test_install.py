"""The package outside its checkout: as a wheel, as a source distribution, and as an MLflow project of a git repository."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from mlflow_compress.commands.command import all_commands
from mlflow_compress.tracking.tracker import Tracker
from tests.task_files import sums, write_rows

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
TEMPLATES = ROOT / "mlflow_compress" / "reporting" / "templates"
STAGES = [name for name, command in all_commands().items() if command.project_alone]
FEW = {"method": "none", "judge": "false", "num_shuffles": "0"}


def started(command: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command and require that it succeeds."""
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done


def tracked_files(target: Path) -> Path:
    """Copy the checkout without what builds and runs have left in it."""
    listed = started(["git", "ls-files", "-co", "--exclude-standard", "-z"], ROOT).stdout.split("\0")
    for name in filter(None, listed):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_file():
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
    return target


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a source distribution from the checkout, and a wheel from that; return their folder."""
    source = tracked_files(tmp_path_factory.mktemp("source"))
    dist = tmp_path_factory.mktemp("dist")
    build = "import setuptools.build_meta as b, sys; b.build_sdist(sys.argv[1])"
    started([sys.executable, "-c", build, str(dist)], source)
    unpacked = tmp_path_factory.mktemp("unpacked")
    [archive] = dist.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # from Python 3.11.4 on
        opened.extractall(unpacked, **safely)
    [inside] = unpacked.iterdir()
    build = "import setuptools.build_meta as b, sys; b.build_wheel(sys.argv[1])"
    started([sys.executable, "-c", build, str(dist)], inside)
    return dist


def test_a_wheel_holds_the_stages_and_the_templates_of_the_report(built: Path) -> None:
    [wheel] = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
        templates = {f"mlflow_compress/reporting/templates/{file.name}" for file in TEMPLATES.iterdir()}
        assert templates and templates <= names
        for stage in STAGES:
            folder = f"mlflow_compress/_projects/projects/{stage}"
            project = yaml.safe_load(opened.read(f"{folder}/MLproject"))
            environment = os.path.normpath(f"{folder}/{project['python_env']}")
            assert {f"{folder}/run.py", environment} <= names
            assert project == yaml.safe_load((ROOT / "projects" / stage / "MLproject").read_text())
    assert {"mlflow_compress/py.typed", "mlflow_compress/__init__.pyi"} <= names
    assert not {name for name in names if name.split("/")[0] not in ("mlflow_compress",) and ".dist-info" not in name}


WRONG = {
    'mc.evaluate("folder", limt=2)': "limt",
    'mc.evaluate("folder", limit="two")': "limit",
    "mc.evalute()": "evalute",
    'mc.run(dtype="int4")': "dtype",
    "made.folders": "folders",
    "swept.seconds": "seconds",
    "planned.failed": "failed",
    "report_of_rows: mc.VariantsReport = mc.report(rows)": "report",
    "mc.promote(policy=5)": "policy",
    "mc.compress(bits=4.5)": "bits",
    "label: int = found.name": "int",
    "mc.gate(made, store=1)": "store",
}
SCRIPT = (ROOT / "tests" / "every_command.py").read_text()


def installed(way: str, built: Path, folder: Path) -> Path:
    """Install a wheel, or the checkout in place, in a new environment; return its Python. Dependencies are ours."""
    if way == "wheel":
        [wheel] = built.glob("*.whl")
    else:
        source = tracked_files(folder / "checkout")
        build = "import setuptools.build_meta as b, sys; b.build_editable(sys.argv[1])"
        started([sys.executable, "-c", build, str(folder)], source)
        [wheel] = folder.glob("*.whl")
    started([sys.executable, "-m", "venv", "--without-pip", "environment"], folder)
    python = folder / "environment" / "bin" / "python"
    site = Path(
        started([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder).stdout.strip()
    )
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index"]
    started([*pip, str(wheel)], folder)
    (site / "of_tests.pth").write_text(sysconfig.get_path("purelib"))
    return python


@pytest.mark.ci
@pytest.mark.parametrize("way", ["wheel", "editable"])
def test_type_checkers_find_wrong_calls_and_no_other_after_both_ways_of_installing(
    way: str, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    python = installed(way, built, tmp_path)
    script = tmp_path / "script.py"
    script.write_text("\n".join([SCRIPT, *WRONG]))
    # The types of models are not ours: reading torch and transformers takes minutes.
    (tmp_path / "mypy.ini").write_text("[mypy]\nstrict = true\n[mypy-torch.*,transformers.*]\nfollow_imports = skip\n")
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')  # as in pyright itself
    checkers = {"mypy": [sys.executable, "-P", "-m", "mypy", "--python-executable", str(python)]}
    if find_spec("basedpyright") is not None:  # the extra `pyright`, which CI installs
        checkers["pyright"] = [sys.executable, "-P", "-m", "basedpyright", "--pythonpath", str(python)]
    for name, command in checkers.items():
        done = subprocess.run([*command, script.name], cwd=tmp_path, capture_output=True, text=True, check=False)
        errors = [line.strip() for line in done.stdout.splitlines() if re.search(r"script\.py:\d+:.*error: ", line)]
        found = [int(re.search(r"script\.py:(\d+)", line)[1]) for line in errors]  # type: ignore[index]
        first = SCRIPT.count("\n") + 2
        assert found == list(range(first, first + len(WRONG))), f"{name}: {done.stdout}{done.stderr}"
        if name == "mypy":
            for error, word in zip(errors, WRONG.values(), strict=True):
                assert word in error, error


def test_an_installed_wheel_runs_the_main_job_in_an_empty_folder(built: Path, tmp_path: Path) -> None:
    [wheel] = built.glob("*.whl")
    site, folder = tmp_path / "site", tmp_path / "work"
    folder.mkdir()
    installed = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(site)]
    started([*installed, str(wheel)], tmp_path)
    write_rows(folder / "choice.jsonl", sums(6))
    options = [f"--{name}={value}" for name, value in {**FEW, "tasks": "choice.jsonl"}.items()]
    # -P: the working folder is not on the path; the wheel comes before the checkout that tests are run from.
    done = started(
        [
            sys.executable,
            "-P",
            "-c",
            "import mlflow_compress as m; print(m.__file__); from mlflow_compress.cli import main; raise SystemExit(main())",
            "main",
            *options,
        ],
        folder,
        PYTHONPATH=str(site),
        PATH="/usr/bin:/bin",  # nothing is activated
        MLFLOW_TRACKING_URI=f"sqlite:///{folder / 'mlflow.db'}",
    )
    assert "Answers flipped" in done.stdout
    assert done.stdout.splitlines()[0] == str(site / "mlflow_compress" / "__init__.py")
    assert sorted(path.name for path in folder.iterdir()) == [".mlflow_compress", "choice.jsonl", "mlflow.db", "mlruns"]
    assert not list(site.rglob(".mlflow_compress")) and not list(site.rglob("mlruns"))


def test_mlflow_runs_a_git_repository_and_keeps_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository, folder, temporary = tmp_path / "repository", tmp_path / "work", tmp_path / "tmp"
    for made in (folder, temporary):
        made.mkdir()
    tracked_files(repository)
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.invalid"]
    started(["git", "init", "-q", "-b", "main"], repository)
    started(["git", "add", "-A"], repository)
    started(["git", *identity, "commit", "-q", "-m", "state"], repository)
    # MLflow uses a file:// repository in its place; of any other address it makes a temporary clone.
    address = {
        "GIT_CONFIG_COUNT": "2",
        "GIT_CONFIG_KEY_0": f"url.file://{repository}.insteadOf",
        "GIT_CONFIG_VALUE_0": "https://example.invalid/repository.git",
        "GIT_CONFIG_KEY_1": "safe.directory",
        "GIT_CONFIG_VALUE_1": "*",
    }
    values = {**FEW, "tasks": write_rows(folder / "choice.jsonl", sums(6))}
    options = [part for name, value in values.items() for part in ("-P", f"{name}={value}")]
    command = [sys.executable, "-m", "mlflow", "run", "https://example.invalid/repository.git"]
    store = f"sqlite:///{folder / 'mlflow.db'}"
    monkeypatch.delenv("PYTHONPATH", raising=False)
    done = started(
        [*command, "--env-manager", "local", *options],
        folder,
        **address,
        MLFLOW_TRACKING_URI=store,
        TMPDIR=str(temporary),
        PATH=f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}",
    )
    assert "Answers flipped" in done.stdout
    assert "example.invalid" in done.stderr, "MLflow made no clone"
    clones = [path.parent for path in temporary.glob("*/MLproject")]
    assert clones, "MLflow made no clone"
    assert not [path for clone in clones for path in clone.rglob("compression.json")]
    [manifest] = (folder / ".mlflow_compress" / "checkpoints").glob("*/compression.json")
    assert manifest.is_file()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    runs = Tracker().client.search_runs([Tracker().experiment_id])
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert {run.info.artifact_uri.removeprefix("file://").startswith(str(folder)) for run in runs} == {True}
