"""Strict configuration: types, names, choices and bounds of every stage parameter."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from mlflow_compress import config
from mlflow_compress.cli import STAGES, main
from mlflow_compress.errors import ConfigError

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from write_mlprojects import project_files


def test_strings_become_the_declared_types() -> None:
    parsed = config.parse(config.MainConfig, {"method": "rtn", "seed": "7", "judge": "false", "limit": "10"})
    assert (parsed.method, parsed.seed, parsed.judge, parsed.limit) == ("rtn", 7, False, 10)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"metod": "awq"}, ["Unknown parameter", "'metod'", "Did you mean 'method'?"]),
        ({"seed": "xyz"}, ["'seed' must be a whole number", "'xyz'"]),
        ({"max_kl": "much"}, ["'max_kl' must be a number"]),
        ({"dtype": "int4"}, ["unknown value", "float32, bfloat16", "'int4'"]),
        ({"limit": "-1"}, ["too small", "0 or more", "-1"]),
        ({"trust_remote_code": "yes"}, ["switch", "true, false", "'yes'"]),
    ],
)
def test_bad_values_get_one_clear_error(values: dict[str, str], words: list[str]) -> None:
    cls = config.PromoteConfig if "max_kl" in values else config.MainConfig
    with pytest.raises(ConfigError) as caught:
        config.parse(cls, values)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_nan_is_not_a_bound() -> None:
    with pytest.raises(ConfigError, match="too small"):
        config.parse(config.PromoteConfig, {"max_kl": "nan"})


@pytest.mark.parametrize("cls", [cls for cls, _ in STAGES.values()])
def test_strings_and_configuration_round_trip(cls: type) -> None:
    assert config.parse(cls, config.as_strings(cls())) == cls()


@pytest.mark.parametrize("cls", [cls for cls, _ in STAGES.values()])
def test_every_parameter_explains_itself(cls: type) -> None:
    assert all(len(field.metadata["help"]) > 10 for field in fields(cls))


def test_mlproject_files_are_what_the_configurations_say() -> None:
    for path, text in project_files().items():
        assert path.read_text() == text, f"run tools/write_mlprojects.py: {path.name} is out of date"
        assert yaml.safe_load(text)["entry_points"]


@pytest.mark.parametrize("verb", [*STAGES, "methods"])
def test_help_explains_every_command(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([verb, "--help"])
    assert stop.value.code == 0
    assert "usage: mlflow-compress" in capsys.readouterr().out


def test_misspelt_option_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    # This is how MLflow hands over an unknown -P name.
    assert main(["main", "--metod", "awq"]) == 2
    assert "Did you mean 'method'?" in capsys.readouterr().err


def test_stray_argument_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["main", "awq"]) == 2
    assert "Unexpected argument" in capsys.readouterr().err
