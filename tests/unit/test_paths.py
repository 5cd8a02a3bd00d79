"""Parameters that name files and folders: made absolute, or refused with the folder that they were looked for in."""

from pathlib import Path

import pytest

from mlflow_compress.commands.evaluate.parameters import EvaluateConfig
from mlflow_compress.commands.main.parameters import MainConfig
from mlflow_compress.config import parameters
from mlflow_compress.config.declarations import path_kind
from mlflow_compress.errors import ConfigError
from mlflow_compress.home import VARIABLE, home
from mlflow_compress.paths import STARTED_IN, absolute_paths, started_in


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(STARTED_IN, raising=False)
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    (tmp_path / "model").mkdir()
    (tmp_path / "mine.jsonl").write_text("{}\n")
    return tmp_path


def test_links_to_python_names_and_hub_ids_stay_and_only_files_of_tasks_are_paths(folder: Path) -> None:
    (folder / "python").symlink_to(folder / "mine.jsonl")
    assert absolute_paths(MainConfig(vllm_python="python")).running.vllm_python == str(folder / "python")
    assert absolute_paths(MainConfig(vllm_python="python3")).running.vllm_python == "python3"  # found by PATH
    (folder / "piqa").mkdir()  # a folder that happens to have the name of a task
    found = absolute_paths(MainConfig(tasks="piqa, mine.jsonl,gsm8k@8"))
    assert found.evaluation.tasks == f"piqa,{folder / 'mine.jsonl'},gsm8k@8"
    config = MainConfig(model="org/name", encoder="embedded", bertscore_model="roberta-large", calibration="c4")
    assert absolute_paths(config) == config
    assert absolute_paths(MainConfig()) == MainConfig()


FOLDERS = ["model", "encoder", "bertscore_model", "checkpoint", "data_dir"]
FILES = ["calibration", "instructions", "tasks"]


@pytest.mark.parametrize(("name", "path"), [*((f, "model") for f in FOLDERS), *((f, "mine.jsonl") for f in FILES)])
def test_a_relative_folder_or_file_becomes_absolute(name: str, path: str, folder: Path) -> None:
    assert absolute_paths(MainConfig(**{name: path})).values()[name] == str(folder / path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", "./llama"),
        ("model", "models/new/llama"),
        ("tasks", "piqa,yours.jsonl"),
        ("calibration", "text.txt"),
        ("instructions", "../say.jsonl"),
        ("bertscore_model", "~/nowhere"),
        ("encoder", "./encoder"),
        ("checkpoint", "model.Q4_K_M.gguf"),
        ("data_dir", "hub"),
    ],
)
def test_a_path_that_is_not_there_says_where_it_was_looked_for(name: str, value: str, folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        absolute_paths(MainConfig(**{name: value}))
    within = name in ("bertscore_model", "encoder")
    what = f"Setting '{name}' of 'answer_args'" if within else f"Parameter '{name}'"
    assert str(caught.value).startswith(f"{what} names no ")
    if not value.startswith("~"):  # which is absolute
        assert f"looked for in the working folder, {folder}" in str(caught.value)


def test_under_mlflow_the_message_says_whose_folder_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_RUN_ID", "0")
    with pytest.raises(ConfigError, match=f"{folder}, the folder in which MLflow starts"):
        absolute_paths(EvaluateConfig(tasks="yours.jsonl"))


def test_stages_name_the_folder_of_the_main_job(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert started_in() == str(folder)
    monkeypatch.setenv(STARTED_IN, "/where/main/began")
    assert started_in() == "/where/main/began"


def test_every_parameter_that_speaks_of_files_or_folders_is_declared_as_one() -> None:
    every = parameters(MainConfig).items()
    speaks = {name for name, f in every if {"file", "files", "folder"} & set(_words(f.description))}
    # `output_dir` need not be there yet, and log_weights says where a checkpoint is not copied to.
    assert {name for name, field in every if path_kind(field)} == speaks - {"output_dir"}


def _words(text: str) -> list[str]:
    return text.replace(",", " ").replace(":", " ").replace(";", " ").split()


@pytest.fixture(autouse=True)
def without_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


def test_state_is_kept_beside_a_database_in_the_users_cache_or_where_the_variable_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert home(f"sqlite:///{tmp_path}/mlflow.db") == tmp_path / ".mlflow_compress"
    assert home("http://127.0.0.1:5000") == Path.home() / ".cache" / "mlflow_compress"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert home("http://127.0.0.1:5000") == tmp_path / "mlflow_compress"
    monkeypatch.setenv(VARIABLE, str(tmp_path / "state"))
    assert home("sqlite:////data/mlflow.db") == home("http://127.0.0.1:5000") == tmp_path / "state"
