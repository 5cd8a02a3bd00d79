"""Every page names modules, functions, files and folders that exist; one page tells the way of an item, and is short."""

import importlib
import re
from pathlib import Path

import pytest

from tests.docs.blocks import DOCS, PAGES, ROOT

PACKAGE = ROOT / "mlflow_compress"
ARCHITECTURE = DOCS / "architecture.md"
TEXTS = [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"]


def _dotted(page: Path) -> list[str]:
    """Names with dots: everywhere those that begin with the package, in the architecture page without it too."""
    text = page.read_text(encoding="utf-8")
    whole = re.findall(r"\bmlflow_compress((?:\.\w+)+)(?![\w/-])", text)
    short = re.findall(r"`((?:\w+\.)+(?!py`)\w+)`", text) if page == ARCHITECTURE else []
    return sorted({name.strip(".") for name in [*whole, *short]})


def _paths(page: Path) -> list[str]:
    """Folders of code (they end with a slash) and Python files."""
    text = page.read_text(encoding="utf-8")
    files = set(re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", text)) | set(re.findall(r"`((?:\w+/)+\w+\.py)\b", text))
    return sorted(path for path in files if path.count("/") > 1 or path.endswith(".py") or page == ARCHITECTURE)


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_name_exists(page: Path) -> None:
    missing = []
    for name in _dotted(page):
        parts = name.split(".")
        for cut in range(len(parts), -1, -1):
            try:
                found = importlib.import_module(".".join(["mlflow_compress", *parts[:cut]]))
            except ModuleNotFoundError:
                continue
            break
        for attribute in parts[cut:]:
            found = getattr(found, attribute, None)
        if found is None:
            missing.append(name)
    # Groups of entry points are named like modules.
    assert [name for name in missing if f"mlflow_compress.{name}" not in _groups()] == []


def _groups() -> set[str]:
    return set(re.findall(r'group="(mlflow_compress\.\w+)"', "".join(p.read_text() for p in PACKAGE.rglob("*.py"))))


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_file_and_folder_exists(page: Path) -> None:
    places = (ROOT, PACKAGE, page.parent)
    assert [path for path in _paths(page) if not any((place / path).exists() for place in places)] == []


def test_the_architecture_is_read_in_one_sitting() -> None:
    assert len(ARCHITECTURE.read_text(encoding="utf-8").splitlines()) < 60
