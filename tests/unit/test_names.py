"""One name, one meaning: no two public classes, and no two modules, share a name."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "mlflow_compress"

MODULES = {
    "result": "what a command returns, in the package of each command",
    "run": "what a command does, in the package of each command",
    "divergence": "the metrics, and their figure",
    "uncertainty": "the metrics, and the tasks of the same benchmark",
}
"""Module names that occur twice, because both are about the same thing or users type the name."""


def test_no_two_public_classes_have_one_name() -> None:
    places = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert len(places) > 100
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_no_two_modules_have_one_name() -> None:
    places = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        if not path.stem.startswith("__"):
            places[path.stem].append(str(path.relative_to(PACKAGE)))
    assert {name: found for name, found in places.items() if len(found) > 1 and name not in MODULES} == {}
