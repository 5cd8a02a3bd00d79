"""Strict configuration: types, names, choices and bounds of every stage parameter."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mlflow_compress import config
from mlflow_compress.cli import _parameters, build_parser, main
from mlflow_compress.commands.command import all_commands
from mlflow_compress.commands.evaluate.parameters import EvaluateConfig
from mlflow_compress.commands.gate.parameters import GateConfig
from mlflow_compress.commands.judge.parameters import JudgeConfig
from mlflow_compress.commands.main.parameters import MainConfig
from mlflow_compress.commands.promote.parameters import PromoteConfig
from mlflow_compress.commands.quantize.parameters import QuantizeConfig
from mlflow_compress.commands.speed.parameters import SpeedConfig
from mlflow_compress.errors import ConfigError

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from write_mlprojects import project_files

CLASSES = [command.parameters for command in all_commands().values() if command.parameters]


def test_text_python_values_and_nothing_become_the_declared_types() -> None:
    parsed = config.parse(MainConfig, {"method": "rtn", "seed": "7", "judge": "false", "limit": "10"})
    assert (parsed.compression.method, parsed.source.seed, parsed.judge) == ("rtn", 7, False)
    assert (parsed.evaluation.limit, parsed.answers.instruction_limit) == (10, 0)
    asked = MainConfig(bits=4, tasks=["demo", "piqa"], method_args={"sparsity": 0.5, "pattern": "2:4"})
    assert asked.compression.bits == 4 and asked.evaluation.tasks == "demo,piqa"
    assert config.as_text(asked)["method_args"] == "sparsity=0.5,pattern=2:4"
    for text in ("none", "", "None"):
        assert config.parse(EvaluateConfig, {"system_prompt": text, "data_dir": text}) == EvaluateConfig()
    assert config.as_text(EvaluateConfig())["system_prompt"] == "none"


def test_a_stage_gets_the_groups_of_the_main_job_and_a_gate_those_of_speed() -> None:
    main_job = MainConfig(model="m", seed=7, limit=3, instruction_limit=2, bits=4, dtype="bfloat16")
    assert main_job.quantize_config == QuantizeConfig(model="m", seed=7, bits=4)
    asked = main_job.evaluate_config("folder")
    assert asked == EvaluateConfig(model="m", seed=7, limit=3, dtype="bfloat16", checkpoint="folder")
    asked = main_job.judge_config("folder")
    assert asked == JudgeConfig(model="m", seed=7, instruction_limit=2, dtype="bfloat16", checkpoint="folder")
    # The run of the main job decides the experiment; its own checkpoint is what it compresses.
    assert MainConfig(experiment="e", checkpoint="c").evaluate_config() == EvaluateConfig()
    gate = GateConfig(checkpoint="endpoint:http://x/v1", served_model="m", speed_repeats=2)
    assert gate.of_stage(SpeedConfig) == SpeedConfig(
        checkpoint="endpoint:http://x/v1", served_model="m", speed_repeats=2
    )


def test_a_file_takes_the_same_names_and_gives_way_to_what_is_given(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("limit: 3\nbits: 4\ntasks: [demo, piqa]\nmethod_args: {sparsity: 0.5}\n")
    found = config.parse(MainConfig, {"config": str(file), "bits": "8"})
    assert found == MainConfig(limit=3, bits=8, tasks="demo,piqa", method_args="sparsity=0.5")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("limits: 3", "Did you mean 'limit'"),
        ("- 1", "has no names"),
        ("a: [", "no YAML file"),
        (None, "no YAML file"),
    ],
)
def test_a_broken_file_gets_one_clear_error(tmp_path: Path, content: str | None, words: str) -> None:
    file = tmp_path / "mine.yaml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=words):
        config.parse(MainConfig, {"config": str(file)})


def test_in_a_project_the_file_goes_before_the_defaults_that_mlflow_hands_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.yaml").write_text("limit: -4\n")
    monkeypatch.setenv("MLFLOW_RUN_ID", "0" * 32)
    command = ["evaluate", *(f"--{name}={text}" for name, text in config.as_text(EvaluateConfig()).items())]
    known, extra = build_parser().parse_known_args([*command, "--seed=7", "--config", str(tmp_path / "mine.yaml")])
    with pytest.raises(ConfigError, match=r"Parameter 'limit' is too small. Allowed: 0 or more. Got: -4."):
        config.parse(EvaluateConfig, _parameters(known, extra))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"metod": "awq"}, ["Unknown parameter", "'metod'", "Did you mean 'method'?"]),
        ({"seed": "xyz"}, ["'seed' must be a whole number", "'xyz'"]),
        ({"max_kl": "much"}, ["'max_kl' must be a number"]),
        ({"max_kl": "nan"}, ["'max_kl' must be a number"]),
        ({"dtype": "int4"}, ["unknown value", "float32, bfloat16", "'int4'"]),
        ({"limit": "-1"}, ["too small", "0 or more", "-1"]),
        ({"limit": -3}, ["too small", "-3"]),  # as Python gives it
        ({"trust_remote_code": "perhaps"}, ["switch", "true, false", "'perhaps'"]),
        ({"judge_max_tokens": "0"}, ["'judge_max_tokens'", "auto, or 1 or more", "'0'"]),
        ({"judge_max_tokens": "many"}, ["'judge_max_tokens'", "auto, or a whole number", "'many'"]),
        ({"method_args": "sparsity"}, ["'method_args' cannot be read", "name=value,name=value", "'sparsity'"]),
        ({"method_args": "a=1,a=2"}, ["'method_args' cannot be read", "every name once", "'a=1,a=2'"]),
    ],
)
def test_bad_values_get_one_clear_error(values: dict[str, str], words: list[str]) -> None:
    cls = PromoteConfig if "max_kl" in values else MainConfig
    with pytest.raises(ConfigError) as caught:
        config.parse(cls, values)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("cls", CLASSES)
def test_every_parameter_explains_itself_and_round_trips_through_text(cls: type) -> None:
    assert config.parse(cls, config.as_text(cls())) == cls()
    assert all(len(field.description) > 10 for field in config.parameters(cls).values())


def test_generated_files_are_what_configurations_and_registry_say() -> None:
    for path, text in project_files().items():
        assert path.read_text() == text, f"run tools/write_mlprojects.py: {path.name} is out of date"
        assert yaml.safe_load(text)["entry_points"]


@pytest.mark.parametrize("verb", all_commands())
def test_help_explains_every_command(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*all_commands()[verb].typed.split(), "--help"])
    assert stop.value.code == 0
    assert "usage: mlflow-compress" in capsys.readouterr().out


def test_the_first_help_names_every_command_in_twelve_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out.rstrip().split("\n")
    assert len(shown) <= 13, "a line of usage and twelve"
    named: list[str] = []
    for name, inner in re.findall(
        r"([\w-]+)(?: \((.*?)\))?", "\n".join(line[12:] for line in shown if line[:2] == "  ")
    ):
        named += [f"{name} {one}" for one in inner.split(", ") if one] + (
            [name] if name not in ("receipt", "list") else []
        )
    assert sorted(named) == sorted(command.typed for command in all_commands().values())


def test_a_command_s_name_may_have_two_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "methods"]) == 0
    assert "gptq" in capsys.readouterr().out
    for given, got in ((["receipt"], "'nothing'"), (["list", "policies"], "'policies'")):
        assert main(given) == 2
        said = capsys.readouterr().err
        assert "needs one of its commands. Allowed: " in said and f"Got: {got}" in said


def test_settings_are_given_together(capsys: pytest.CaptureFixture[str]) -> None:
    given = config.expanded(
        MainConfig, {"judge_args": "timeout=60,attempts=5", "task_args": {"noise_items": 3}, "bits": 4}
    )
    assert given == {"judge_timeout": "60", "judge_attempts": "5", "noise_items": "3", "bits": 4}
    asked = config.parse(MainConfig, given)
    assert (asked.judging.judge_timeout, asked.judging.judge_attempts, asked.evaluation.noise_items) == (60.0, 5, 3)
    text = config.as_given(asked)
    assert (text["judge_args"], text["task_args"], text["speed_args"]) == (
        "attempts=5,timeout=60.0",
        "noise_items=3",
        "none",
    )
    assert config.parse(MainConfig, config.expanded(MainConfig, text)) == asked
    # Settings that are given one after the other on a command line add up.
    shown = [build_parser().parse_known_args(["main", "--judge_args", "timeout=60", "--judge_args=attempts=5"])]
    assert _parameters(*shown[0]) == {"judge_args": "timeout=60,attempts=5"}
    for wrong, message in {
        "judge_timeout=5": "'judge_timeout' is a setting of 'judge_args'. Got: 'judge_timeout=5'. Give --judge_args timeout=5.",
        "judge_args=time=5": "'judge_args' has no such setting. Allowed: base_url, repeats, attempts",
        "judge_args=timeout=x": "Setting 'timeout' of 'judge_args' must be a number. Got: 'x'",
        "judge_args=timeout": "'judge_args' cannot be read. Allowed: name=value,name=value. Got: 'timeout'",
    }.items():
        assert main(["main", f"--{wrong}"]) == 2
        assert message in capsys.readouterr().err
    paths = config.parse(MainConfig, {"judge_prices": "a,b.yaml", "judge_prompts": "c"})
    assert config.parse(MainConfig, config.expanded(MainConfig, config.as_given(paths))) == paths


def test_a_help_is_short() -> None:
    every = {command.name: command.parameters for command in all_commands().values() if command.parameters}
    assert len({name for cls in every.values() for name in config.given_parameters(cls)}) <= 110
    assert len(config.given_parameters(every["main"])) <= 40


def test_misspelt_options_and_stray_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    # This is how MLflow hands over an unknown -P name.
    assert main(["main", "--metod", "awq"]) == 2
    assert "Did you mean 'method'?" in capsys.readouterr().err
    assert main(["main", "awq"]) == 2
    assert "Unexpected argument" in capsys.readouterr().err


def test_the_help_imports_no_large_library() -> None:
    code = (
        "import sys, mlflow_compress.cli as c; c.build_parser(); print({'torch', 'mlflow', 'numpy'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
