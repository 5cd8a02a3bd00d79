"""A project's `run.py` as a module: projects are folders of scripts, no packages."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest


def load_script(project: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the module; what it adds to the search path goes when the test ends."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = importlib.util.spec_from_file_location(project.name.replace("-", "_"), project / "run.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
