"""Malformed inputs through every reader: one clear error each, never a raw exception."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlflow_compress import cli
from mlflow_compress.commands.evaluate import outputs as run_model
from mlflow_compress.commands.evaluate.parameters import EvaluateConfig
from mlflow_compress.commands.promote.parameters import HistoryConfig, PromoteConfig
from mlflow_compress.compression.method import method_config
from mlflow_compress.config import check_text, parse
from mlflow_compress.errors import CheckpointError, ConfigError, DataError, raise_together
from mlflow_compress.files import parse_json, read_json, read_yaml
from mlflow_compress.items.sources.data_dir import load_split
from mlflow_compress.items.sources.question_files import MAX_NAME, RESERVED, load_file
from mlflow_compress.items.task import TaskSettings
from mlflow_compress.metrics.text import authors_layer
from mlflow_compress.records import Generations
from mlflow_compress.transport.endpoint import EndpointConfig
from tests.malformed_inputs import CORPUS, outcome, readers
from tests.page_contents import records
from tests.task_files import write_rows


@pytest.mark.parametrize("name", readers())
def test_every_reader_takes_its_own_input_and_refuses_what_is_nobodys(name: str) -> None:
    reader = readers()[name]
    assert outcome(reader, reader.valid) == ("accepted", None)
    for data in CORPUS[:: 10 if reader.slow else 1]:
        found, error = outcome(reader, data)
        assert found != "raw", (data[:80], repr(error))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(JSON)
def test_what_json_can_hold_is_read_as_pythons_parser_reads_it(value: object) -> None:
    assert parse_json(json.dumps(value), source="x") == value
    assert parse_json(json.dumps(value, ensure_ascii=False).encode(), source="x") == value


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"a": 1, "a": 2}', "the name 'a' twice"),
        ('[{"b": {"c": 1, "c": 1}}]', "the name 'c' twice"),
        ("[" * 100_000, "nested too deeply"),
        ("9" * 5_000, "5,000 digits"),
        ('["\\ud800"]', "surrogate"),
        ('["\\\\ud800"]', None),  # a backslash and letters
        ('["\\ud83d\\ude00"]', None),  # a whole pair
        (b"\xff", "no UTF-8"),
        ("", "Expecting value"),
    ],
)
def test_what_is_no_json_is_refused_with_its_reason(text: str | bytes, reason: str | None) -> None:
    if reason is None:
        assert parse_json(text, source="here") == json.loads(text)
        return
    with pytest.raises(DataError, match="here: not JSON that can be used") as refused:
        parse_json(text, source="here")
    assert reason in str(refused.value)


@pytest.mark.parametrize("path", ["a\0b", "x" * 5_000, "missing.json", "."])
def test_paths_that_cannot_be_read_are_one_error(path: str) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_json(Path(path))
    with pytest.raises(ConfigError, match=r"can(not)? be read"):
        read_yaml(Path(path), parameter="config")


def test_yaml_with_a_name_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("a: 1\nb: {c: 1, c: 2}\n")
    with pytest.raises(ConfigError, match=r"'c' is there twice, line 2"):
        read_yaml(path, parameter="config")
    path.write_text("base: &b {x: 1}\none: {<<: *b, y: 2}\n")
    assert read_yaml(path, parameter="config")["one"] == {"x": 1, "y": 2}


QUESTION = {"id": "1", "category": "c", "question": "Why?", "choices": ["a", "b"], "answer": 0}


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([{**QUESTION, "question": " "}], "'question' must not be empty"),
        ([{**QUESTION, "id": ""}], "'id' must not be empty"),
        ([{**QUESTION, "choices": ["a", "b", "a"]}], "holds a choice twice"),
        ([{**QUESTION, "split": "dev"}], "Every row is a few-shot example"),
        ([{"id": "1", "category": "c", "prompt": "", "answers": ["a"]}], "'prompt' must not be empty"),
    ],
)
def test_questions_that_nobody_could_answer_are_refused(rows: list[object], reason: str, tmp_path: Path) -> None:
    write_rows(tmp_path / "q.jsonl", rows)
    with pytest.raises(DataError, match=reason):
        load_file(tmp_path / "q.jsonl", TaskSettings(num_fewshot=0))


@pytest.mark.parametrize("command", [PromoteConfig, HistoryConfig])
@pytest.mark.parametrize(
    ("alias", "words"),
    [
        ("latest", "This alias is reserved"),
        ("v3", "This alias is reserved"),
        (" ", "not a name"),
        ("a b", "not a name"),
    ],
)
def test_an_alias_that_mlflow_does_not_take_is_refused(command: type[PromoteConfig], alias: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        command(alias=alias)


@pytest.mark.parametrize("url", ["http://h:99999/v1", "http://h:0/v1", "http://h:x/v1", "http://[::1/v1", "h:80"])
def test_a_port_or_host_that_cannot_be_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="from 1 to 65535"):
        EndpointConfig(base_url=url, key="k")


def test_records_that_are_halved_changed_or_of_another_type_are_noticed(tmp_path: Path) -> None:
    many = Generations.concat([records("baseline", "4").generations])
    path = many.write(tmp_path)
    stored = pq.read_table(path)
    pq.write_table(stored.slice(0, 0), path)
    with pytest.raises(DataError, match=r"not complete. Allowed: 1 rows. Got: 0"):
        Generations.read(tmp_path)
    place = stored.schema.get_field_index("turn")
    pq.write_table(stored.set_column(place, "turn", pa.array(["first"])), path)
    with pytest.raises(DataError, match="of another type"):
        Generations.read(tmp_path)
    many.write(tmp_path)
    assert Generations.read(tmp_path).table.equals(many.table)
    data = bytearray(path.read_bytes())
    for at in range(4, 400, 7):  # within the pages, behind the magic number
        changed = bytearray(data)
        changed[at] ^= 1
        path.write_bytes(changed)
        try:
            read = Generations.read(tmp_path)
        except DataError:
            continue
        assert read.table.equals(many.table)  # a bit of a header that decides nothing


def test_json_lines_that_crash_the_library_are_refused_before(tmp_path: Path) -> None:
    folder = tmp_path / "own" / "set"
    folder.mkdir(parents=True)
    for text in ('null\n{"a": 1}\n', '{"a":' * 5_000, "3\n"):
        (folder / "test.jsonl").write_text(text)
        with pytest.raises(DataError, match=r"test\.jsonl, line 1"):
            load_split("own/set", None, "test", data_dir=str(tmp_path), task="x")


def test_an_error_shows_neither_a_long_value_nor_a_long_list() -> None:
    names = [f"distance/metric_{number}" for number in range(180)]
    message = str(ConfigError("Unknown metric", allowed=names, got="distance/metric_17x" + "y" * 5000))
    assert len(message) < 500 and "distance/metric_17" in message and "or one of 175 others" in message
    assert "(5,021 characters)" in message
    # Whatever the words of an error are made of, and however many are told together, 3,000 characters are the most.
    word = str(ConfigError(f"The file {'y' * 50_000} cannot be read", got="x"))
    assert len(word) < 500 and "(50,000 characters)" in word
    assert len(str(ConfigError("a word " * 5_000))) <= 3_000
    with pytest.raises(ConfigError, match=r"(?s)200 things are wrong:\n.*\.\.\. and 19\d more\.$") as raised:
        raise_together([ConfigError("word " * 60) for _ in range(200)])
    assert len(str(raised.value)) <= 3_000


TEXT = "word " * 600


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["evaluate", "--tasks", "a\0b.jsonl"], "'tasks' holds a NUL character"),
        (["evaluate", "--model", "x" * 5000], "'model' holds a name that is too long. Allowed: 255 bytes"),
        (["evaluate", "--model", "é" * 128], "Got: '256 bytes'"),
        (["evaluate", "--checkpoint", "a/" * 3000], "'checkpoint' holds a path that is too long"),
        (["judge", "--instructions", "x" * 300], "'instructions' holds a name that is too long"),
        (["quantize", "--calibration", "x" * 300], "'calibration' holds a name that is too long"),
        (["quantize", "--output_dir", "a\0b"], "'output_dir' holds a NUL character"),
        (["quantize", "--bits", "9" * 5000], "'bits' holds a name that is too long"),
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


def test_ordinary_names_are_accepted_and_the_reserved_ones_are_folders_of_unfinished_work(tmp_path: Path) -> None:
    for name in ("my corpus-2.v1", "été", "n" * MAX_NAME):
        path = tmp_path / f"{name}.txt"
        path.write_text(TEXT)
        assert load_file(path, TaskSettings()).corpora[0].name == name
    assert run_model.GENERATED in RESERVED


def test_a_number_of_thousands_of_digits_is_no_setting() -> None:
    with pytest.raises(ConfigError, match="a whole number"):
        method_config("rtn", bits="9" * 5000)


def test_a_configuration_that_is_a_list_is_no_model_of_bertscore(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(CheckpointError, match="BERTScore"):
        authors_layer("x", tmp_path)
