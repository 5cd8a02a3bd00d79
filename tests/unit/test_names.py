"""One name, one meaning; nothing private is taken from another module; no circle of imports."""

import ast
import re
import shutil
import socket
import sys
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache
from graphlib import TopologicalSorter
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

import pytest
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import Fork

PACKAGE = Path(__file__).parents[2] / "mlflow_compress"

MODULES = {
    "command": "what a command is, and the declaration of each in its package",
    "parameters": "what a command is given, in the package of each command",
    "text": "how a result reads, in the package of each command",
    "result": "what a command returns, in the package of each command",
    "run": "what a command does, in the package of each command",
    "divergence": "the metrics, and their figure",
    "uncertainty": "the metrics, and the tasks of the same benchmark",
    "long_context": "the metrics, and the tasks that they read",
}
"""Module names that occur twice, because both are about the same thing or users type the name."""


def test_no_two_public_classes_and_no_two_modules_have_one_name() -> None:
    places = defaultdict(list)
    for path, tree in _trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert len(places) > 100
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
    places = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        if not path.stem.startswith("__"):
            places[path.stem].append(str(path.relative_to(PACKAGE)))
    assert {name: found for name, found in places.items() if len(found) > 1 and name not in MODULES} == {}


FUNCTIONS = {
    "compare": "the front door's function and the command behind it",
    "decoder_layers": "the layers of a model; one refuses a model in which it cannot tell them",
    "weight_files": "the weight files of a checkpoint; one refuses a checkpoint without any",
    "compute_row_stats": "the same sums, by compiled loops and by torch",
    "expand": "what each packed format does to its layers",
    "loading_options": "what each packed format gives to transformers",
    "health": "the metric of both models, and the scorer of one answer, under the name of the metric",
    "header": "a prompt style's header",
    "question": "a row as a question of its prompt style, or of its task",
    "rows": "the rows of a generated table",
    "load": "what was computed, or a model, is read into memory",
    "main": "what a script does",
}
"""Public functions whose name occurs twice, because both do the same thing for another kind of object."""


@cache
def _trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}


def _modules_by_name(names_of: Callable[[ast.stmt], Iterable[str]]) -> dict[str, set[str]]:
    """Return the modules that have each public name at their top level."""
    places = defaultdict(set)
    for path, tree in _trees().items():
        for name in (name for node in tree.body for name in names_of(node) if not name.startswith("_")):
            places[name].add(str(path.relative_to(PACKAGE)))
    return places


def test_no_two_public_functions_have_one_name_with_two_meanings() -> None:
    places = _modules_by_name(lambda node: [node.name] if isinstance(node, ast.FunctionDef) else [])
    assert len(places) > 500
    assert {name: sorted(found) for name, found in places.items() if len(found) > 1 and name not in FUNCTIONS} == {}


CONSTANTS = {
    "logger": "of its module",
    "Tensor": "torch's",
    "LIBRARIES": "what a module of a stage needs, read by one name",
    "open_model": "what times a model, read by one name",
    "PACKAGES": "distributions that the module needs",
    "CORPUS_KL": "a metric's key, and its name",
    "EMBEDDINGS": "the records of an answer's vectors, and a group of weights",
    "VARIANT": "whether there is one, and the tag with its name",
    "COMPARISONS": "whether there are any, and the kinds of them",
}
"""Constants and aliases without an underscore that occur twice."""


def _assigned(node: ast.stmt) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    names = [part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]
    return [name for name in names if len(name) > 1]  # one letter is a type variable


def test_no_two_constants_or_aliases_have_one_name_with_two_meanings() -> None:
    places = _modules_by_name(_assigned)
    assert len(places) > 300
    assert {name: sorted(found) for name, found in places.items() if len(found) > 1 and name not in CONSTANTS} == {}


def test_no_function_is_longer_than_80_lines_and_no_block_of_code_than_40() -> None:
    functions, blocks = [], []
    for path, tree in _trees().items():
        imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        imported = {line for node in imports for line in range(node.lineno, (node.end_lineno or 0) + 1)}
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions.append(((node.end_lineno or 0) + 1 - node.lineno, f"{path.name}: {node.name}"))
        length = 0
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            length = length + 1 if line.strip() and number not in imported else 0
            blocks.append((length, f"{path.name}: {number}"))
    assert len(functions) > 1000
    assert [where for lines, where in functions if lines > 80] == []
    assert [where for lines, where in blocks if lines > 40] == []


def test_no_module_takes_a_private_name_of_another() -> None:
    taken = []
    for path, tree in _trees().items():
        imports = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("mlflow")]
        names = {
            (alias.asname or alias.name): f"{node.module}.{alias.name}" for node in imports for alias in node.names
        }
        modules = {
            name for name, dotted in names.items() if (PACKAGE.parent / f"{dotted.replace('.', '/')}.py").exists()
        }
        taken += [f"{path.name}: {name}" for name, dotted in names.items() if _is_private(dotted.rsplit(".", 1)[-1])]
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
                taken += [f"{path.name}: {node.value.id}.{node.attr}"] if _is_private(node.attr) else []
    assert taken == []


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_no_modules_import_each_other_in_a_circle() -> None:
    trees = _trees()
    dotted = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in trees}
    dotted = {name.removesuffix(".__init__"): path for name, path in dotted.items()}
    imports = {}
    for name, path in dotted.items():
        found = [n for n in ast.walk(trees[path]) if isinstance(n, ast.ImportFrom) and n.module]  # in functions, too
        names = {
            f"{n.module}.{a.name}" if f"{n.module}.{a.name}" in dotted else n.module for n in found for a in n.names
        }
        imports[name] = names & dotted.keys() - {name}  # the script of a module imports it
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the circle


def test_only_engines_ask_for_an_engines_class() -> None:
    trees = _trees()
    rooms = {path: path.relative_to(PACKAGE).parts[0] for path in trees}
    classes = {
        node.name
        for p, t in trees.items()
        if rooms[p] == "engines"
        for node in t.body
        if isinstance(node, ast.ClassDef)
    }
    classes |= {"LightModel"}  # what the local engine, and those in other processes, are made of
    asked = []
    for path, tree in trees.items():
        for node in ast.walk(tree) if rooms[path] != "engines" else ():
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("isinstance", "issubclass")
            ):
                names = {part.id for part in ast.walk(node.args[1]) if isinstance(part, ast.Name)}
                asked += [f"{path.relative_to(PACKAGE)}:{node.lineno}: {name}" for name in sorted(names & classes)]
    assert {"EndpointScorer", "FileModel", "LocalModel", "RemoteModel", "ServedModel", "VllmModel"} <= classes
    assert asked == []


ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DIRECT = [Requirement(line) for line in PROJECT["dependencies"]]
EXTRAS = {extra: [Requirement(line) for line in lines] for extra, lines in PROJECT["optional-dependencies"].items()}
# The extras that the tests need, so that nothing of them is skipped.
OWN = EXTRAS["test"].pop(0)
TESTED = [*EXTRAS["test"], *(requirement for extra in OWN.extras for requirement in EXTRAS[extra])]
OPTIONAL = [requirement for requirements in EXTRAS.values() for requirement in requirements]
# An import whose distribution has another name, for extras that may not be installed.
DISTRIBUTION = {"llama_cpp": "llama-cpp-python"}
# Imported by scripts that run in an environment of their own, whose lock is beside the project that makes it.
ELSEWHERE = {"vllm": "projects/serve-vllm/requirements.txt"}


def pins(*files: str) -> dict[str, str]:
    """Return the pinned version of every distribution in some locks."""
    found: dict[str, str] = {}
    for file in files:
        for line in (ROOT / file).read_text().splitlines():
            if not line or line.startswith(("#", "-c ")):
                continue
            name, version = line.split("==")
            assert canonicalize_name(name) not in found, f"{name} is pinned twice"
            found[canonicalize_name(name)] = version
    return found


LOCK = pins("requirements.txt")
LOCK_WITH_EXTRAS = pins("requirements.txt", "requirements-extras.txt")


def imported() -> set[str]:
    """Return the top-level names that the package imports, without the standard library and itself."""
    names = set()
    for file in (ROOT / "mlflow_compress").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names.add(node.module.split(".")[0])
    return names - sys.stdlib_module_names - {"mlflow_compress"}


def test_every_import_is_declared() -> None:
    declared = {canonicalize_name(requirement.name) for requirement in [*DIRECT, *OPTIONAL]}
    known = packages_distributions()
    for name, lock in ELSEWHERE.items():
        assert f"\n{name}-cpu==" in (ROOT / lock).read_text()
    for name in imported() - ELSEWHERE.keys():
        candidates = {canonicalize_name(d) for d in known.get(name, [DISTRIBUTION.get(name, name)])}
        assert candidates & declared, f"{name} is imported and not in pyproject.toml"


@pytest.mark.parametrize("requirement", [*DIRECT, *OPTIONAL], ids=lambda requirement: requirement.name)
def test_a_dependency_is_a_range_that_holds_the_locked_version(requirement: Requirement) -> None:
    assert sorted(part.operator for part in requirement.specifier) == ["<", ">="]
    assert requirement.specifier.contains(LOCK_WITH_EXTRAS[canonicalize_name(requirement.name)])


def test_the_locks_and_the_tests_need_what_the_package_and_its_extras_need() -> None:
    assert {canonicalize_name(requirement.name) for requirement in DIRECT} <= LOCK.keys()
    needed = _needed({canonicalize_name(requirement.name) for requirement in DIRECT}, LOCK)
    assert LOCK.keys() - needed == set()
    assert (OWN.name, OWN.extras) == ("mlflow-compress", {"adapters", "harness", "bitsandbytes", "math", "pile"})


def _needed(names: set[str], lock: dict[str, str]) -> set[str]:
    """Return all distributions that some distributions need here, themselves included, as far as installed."""
    reached: set[str] = set()
    waiting = sorted(names)
    while waiting:
        name = waiting.pop()
        if name in reached:
            continue
        reached.add(name)
        try:
            found = distribution(name)
        except PackageNotFoundError:
            continue
        if found.version.partition("+")[0] != lock.get(name, found.version.partition("+")[0]):
            pytest.skip(f"{name} {found.version} is installed, the lock has {lock[name]}")
        for line in found.requires or []:
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                waiting.append(canonicalize_name(needed.name))
    return reached


@pytest.mark.parametrize(("direct", "lock"), [(DIRECT, LOCK), (TESTED, LOCK_WITH_EXTRAS)], ids=["package", "test"])
def test_the_lock_holds_what_the_dependencies_need(direct: list[Requirement], lock: dict[str, str]) -> None:
    missing = _needed({canonicalize_name(requirement.name) for requirement in direct}, lock) - lock.keys()
    # torch pins its CUDA packages itself; its CPU build has none.
    assert {name for name in missing if not re.match(r"nvidia-|cuda-|triton$", name)} == set()


UNTIDY = """
from pathlib import Path

def test_something():
    Path("mlruns/0/new").mkdir()  # beside a run that was there before
    Path("projects/judge/.mlflow_compress").mkdir()
"""


def test_what_tests_leave_in_the_checkout_fails_the_session(tmp_path: Path, python: Fork) -> None:
    for folder in ("tests", "mlruns/0/old", "projects/judge"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path / "tests")
    (tmp_path / "tests" / "test_it.py").write_text(UNTIDY)
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_it.py", cwd=tmp_path)
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 1, done.stdout
    assert "mlruns/0/new" in done.stdout and "projects/judge/.mlflow_compress" in done.stdout


UNTIDY_ABOUT_STORES = """
import os

import mlflow
import pytest

@pytest.mark.parametrize("number", [1, 2])
def test_nothing_is_set_until_this_sets_it(number, tmp_path):
    assert mlflow.get_tracking_uri() == mlflow.get_registry_uri() == "no-store-is-named://"
    assert mlflow.active_run() is None and mlflow.last_active_run() is None
    assert "MLFLOW_RUN_ID" not in os.environ
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    mlflow.set_registry_uri(f"sqlite:///{tmp_path}/registry.db")
    assert mlflow.set_experiment(experiment_id="0").name == "Default"
    mlflow.start_run()
    os.environ["MLFLOW_RUN_ID"] = mlflow.active_run().info.run_id
"""


def test_no_test_uses_the_store_of_an_earlier_one(tmp_path: Path, python: Fork) -> None:
    (tmp_path / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path / "tests")
    (tmp_path / "tests" / "test_it.py").write_text(UNTIDY_ABOUT_STORES)
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_it.py", cwd=tmp_path)
    assert "2 passed" in done.stdout, done.stdout + done.stderr


def test_a_test_that_names_no_store_has_none() -> None:
    with pytest.raises(MlflowException, match="no-store-is-named"):
        MlflowClient().search_experiments()


def test_no_test_reaches_another_machine() -> None:
    # An address that nobody has. What refuses it is pytest-socket, with a warning, and here warnings are errors.
    with socket.socket() as connection, pytest.raises((RuntimeError, UserWarning), match=r'connect\(\) with host "192'):
        connection.setblocking(False)
        connection.connect(("192.0.2.1", 80))


def test_a_stores_artifacts_lie_beside_it(workdir: Path) -> None:
    client = MlflowClient()
    run = client.create_run("0")
    client.log_text(run.info.run_id, "text", "a.txt")
    assert Path(run.info.artifact_uri.removeprefix("file://")).is_relative_to(workdir)
    assert [path.read_text() for path in workdir.rglob("a.txt")] == ["text"]
