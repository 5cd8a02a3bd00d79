"""The size of the rooms: a module is read in one sitting, and a folder is seen at a glance."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "mlflow_compress"
LINES, MODULES = 300, 14

PLUGINS = ("compression/methods", "items/families", "items/named", "items/prompts", "metrics", "reporting/plots")
"""Folders with one file per method, family, task, prompt style, metric or figure."""


def test_no_module_is_too_long() -> None:
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGE.rglob("*.py")}
    assert len(lines) > 200
    assert {str(path.relative_to(PACKAGE)): n for path, n in lines.items() if n > LINES} == {}


def test_no_folder_is_too_full() -> None:
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    counts = {
        str(folder.relative_to(PACKAGE)): sum(1 for path in folder.glob("*.py") if path.name != "__init__.py")
        for folder in folders
    }
    too_full = {folder: n for folder, n in counts.items() if n > MODULES and folder not in PLUGINS}
    assert too_full == {}
