"""A package that adds a command in one file: installed, listed, and used by command line, Python and `mlflow run`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT

COMMAND = '''
"""A command that counts letters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlflow_compress.commands.command import configured, register_command
from mlflow_compress.commands.shared.tabular import Tabular
from mlflow_compress.config import Parameters
from mlflow_compress.config.declarations import Names, option


class CountConfig(Parameters):
    """Count the letters of words."""

    words: Names = option("demo", "words, comma-separated")
    least: int = option(0, "shortest word that counts", ge=0)


@dataclass(frozen=True)
class Counted(Tabular):
    letters: Mapping[str, int]

    @property
    def summary(self) -> str:
        return f"{sum(self.letters.values())} letters"

    def to_rows(self) -> Sequence[Mapping[str, Any]]:
        return [{"word": word, "letters": n} for word, n in self.letters.items()]


@register_command("count", CountConfig)
def count_letters(**parameters: Any) -> Counted:
    """Return the letters of each word."""
    config = configured(CountConfig, parameters)
    return Counted({word: len(word) for word in config.words.split(",") if len(word) >= config.least})
'''
SETUP = """
[project]
name = "counting"
version = "1"
[project.entry-points."mlflow_compress.commands"]
count = "counting"
[tool.setuptools]
py-modules = ["counting"]
"""
PROJECT = """
name: counting
entry_points:
  count:
    parameters:
      words: {type: string, default: "demo"}
    command: "python -m mlflow_compress count --words {words}"
"""
PYTHON = "import mlflow_compress as mc; print(len(mc.count_letters(words=['ab', 'c'], least=2).to_pandas()))"


@pytest.mark.slow
@pytest.mark.ci
def test_a_command_of_another_package_is_used_everywhere(tmp_path: Path) -> None:
    assert COMMAND.strip().count("\n") < 40
    source, target = tmp_path / "source", tmp_path / "installed"
    source.mkdir()
    for name, text in {"counting.py": COMMAND, "pyproject.toml": SETUP, "MLproject": PROJECT}.items():
        (source / name).write_text(text.lstrip())
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--target", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(source)], check=True, timeout=300)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(target), str(ROOT)])}
    environment |= {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path / 'mlflow.db'}"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"

    def said(*arguments: str, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == code, done.stderr[-4000:]
        return done.stdout + done.stderr

    assert "Count the letters of words." in said("-m", "mlflow_compress", "--help")
    assert "shortest word that counts" in said("-m", "mlflow_compress", "count", "--help")
    assert "6 letters" in said("-m", "mlflow_compress", "count", "--words", "some,or")
    assert "'least' is too small" in said("-m", "mlflow_compress", "count", "--least", "-1", code=2)
    assert said("-c", PYTHON).strip() == "1"
    run = ["-m", "mlflow", "run", str(source), "--env-manager", "local", "-e", "count", "-P", "words=ten"]
    assert "3 letters" in said(*run)
