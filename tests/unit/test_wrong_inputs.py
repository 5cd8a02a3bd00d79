"""Wrong inputs end with one clear error and an exit code, never with a traceback, and before a model is loaded."""

import json
from pathlib import Path

import pytest
import torch

from mlflow_compress import cli
from mlflow_compress.commands.evaluate import outputs as run_model
from mlflow_compress.commands.evaluate.parameters import EvaluateConfig
from mlflow_compress.compression.method import method_config
from mlflow_compress.config import check_text, parse
from mlflow_compress.errors import CheckpointError, ConfigError, DataError, UnsupportedError
from mlflow_compress.items.sources.question_files import MAX_NAME, RESERVED, load_file, read_jsonl
from mlflow_compress.items.task import TaskSettings
from mlflow_compress.metrics.bertscore import authors_layer
from mlflow_compress.models.placement import placement

TEXT = "word " * 600


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["evaluate", "--tasks", "a\0b.jsonl"], "'tasks' holds a NUL character"),
        (["evaluate", "--model", "x" * 5000], "'model' holds a name that is too long. Allowed: 255 bytes"),
        (["evaluate", "--model", "é" * 128], "Got: '256 bytes'"),
        (["evaluate", "--checkpoint", "a/" * 3000], "'checkpoint' holds a path that is too long"),
        (["judge", "--instructions", "x" * 300], "'instructions' holds a name that is too long"),
        (["judge", "--bertscore_model", "x" * 300], "'bertscore_model' holds a name that is too long"),
        (["quantize", "--calibration", "x" * 300], "'calibration' holds a name that is too long"),
        (["quantize", "--output_dir", "a\0b"], "'output_dir' holds a NUL character"),
        (["quantize", "--bits", "9" * 5000], "'bits' holds a name that is too long"),
        (["main", "--output_dir", "a\0b"], "'output_dir' holds a NUL character"),
        (["main", "--encoder", "x" * 300], "'encoder' holds a name that is too long"),
        (["promote", "--model", "x" * 300], "'model' holds a name that is too long"),
        (["compare", "x" * 5000, "b.jsonl"], "holds a name that is too long"),
        (["compare", "", ""], "Nothing to compare by this name"),
    ],
)
def test_names_that_cannot_be_are_refused(workdir: Path, capsys: pytest.CaptureFixture[str], command, words) -> None:
    assert cli.main(command) == 2
    assert words in capsys.readouterr().err


def test_a_long_system_prompt_and_long_lists_are_fine() -> None:
    assert parse(EvaluateConfig, {"system_prompt": TEXT}).inference.system_prompt == TEXT
    check_text("tasks", ",".join(f"/data/{i:0200}.jsonl" for i in range(50)))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[" * 5000, "line 1: not JSON that can be used (it is nested too deeply)"),
        ('{"a":' * 3000 + "1" + "}" * 3000, "line 1: not JSON that can be used (it is nested too deeply)"),
        ('{"id": "1", "answer": ' + "9" * 6000 + "}", "not JSON that can be used (an integer has 6,000 digits)"),
    ],
)
def test_json_that_python_cannot_read_is_named_by_its_line(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "deep.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(DataError, match=r"deep\.jsonl") as caught:
        read_jsonl(path)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        *(f"{name}.txt" for name in RESERVED),
        "..txt",
        "it's (1).txt",
        "-x.txt",
        "a:b.txt",
        "n" * (MAX_NAME + 1) + ".txt",
    ],
)
def test_files_whose_names_cannot_be_a_task_s_are_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(TEXT)
    with pytest.raises(ConfigError, match="Rename the file"):
        load_file(path, TaskSettings())
    assert load_file(path, TaskSettings(), name="fine").corpora[0].name == "fine"


def test_ordinary_names_are_accepted(tmp_path: Path) -> None:
    for name in ("my corpus-2.v1", "été", "n" * MAX_NAME):
        path = tmp_path / f"{name}.txt"
        path.write_text(TEXT)
        assert load_file(path, TaskSettings()).corpora[0].name == name


def test_the_reserved_names_are_those_of_folders_of_unfinished_work() -> None:
    assert run_model.GENERATED in RESERVED


def test_a_number_of_thousands_of_digits_is_no_setting() -> None:
    with pytest.raises(ConfigError, match="a whole number"):
        method_config("rtn", bits="9" * 5000)


def test_a_configuration_that_is_a_list_is_no_model_of_bertscore(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(CheckpointError, match="BERTScore"):
        authors_layer("x", tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_gpu_that_is_not_there_is_refused(device: str) -> None:
    with pytest.raises(UnsupportedError, match="finds no GPU"):
        placement(device)
