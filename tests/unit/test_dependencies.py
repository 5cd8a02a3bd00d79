"""pyproject.toml declares what the package imports, as ranges; the locks pin one version of all of it."""

import ast
import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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


def test_what_the_package_needs_is_locked_without_the_extras() -> None:
    assert {canonicalize_name(requirement.name) for requirement in DIRECT} <= LOCK.keys()


def test_the_lock_holds_nothing_of_the_extras() -> None:
    needed = _needed({canonicalize_name(requirement.name) for requirement in DIRECT}, LOCK)
    assert LOCK.keys() - needed == set()


def test_the_tests_need_every_extra_that_was_once_part_of_the_package() -> None:
    assert (OWN.name, OWN.extras) == ("mlflow-compress", {"harness", "bitsandbytes", "pile"})


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
