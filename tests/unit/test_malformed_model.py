"""A model's folder with one file that libraries stumble over: one clear error, or the same numbers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlflow_compress.compression.pipeline import reload_helper
from mlflow_compress.errors import CheckpointError, MissingDependencyError
from mlflow_compress.models.model_files import library_errors, open_generation_settings
from tests import malformed_model
from tests.malformed_model import Damage, Evaluated, compress, evaluate, make_model, outcome_of, quiet

CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer_config.json"
SPECIAL, ADDED, INDEX = "special_tokens_map.json", "added_tokens.json", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "plain")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def untouched(model: Path, work: Path) -> Evaluated:
    with quiet():
        return evaluate(model, work)


@pytest.fixture
def outcome(
    model: Path, work: Path, untouched: Evaluated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Damage], tuple[str, str]]:
    monkeypatch.setattr(malformed_model.pipeline, "reload_in_fresh_process", malformed_model.reload_here)
    return lambda damage: outcome_of(damage.apply(model, tmp_path / "damaged"), work, untouched)


def with_values(model: Path, file: str, **changes: object) -> Damage:
    """Return a file with other values of these fields; `...` leaves one out."""
    values = {**json.loads((model / file).read_bytes()), **changes}
    return Damage(file, "", json.dumps({name: one for name, one in values.items() if one is not ...}).encode())


ROPE: dict[str, Any] = {"rope_parameters": ..., "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("file", "changes", "words"),
    [
        (CONFIG, {"dtype": ..., "torch_dtype": "torch.float16"}, ["'torch_dtype'", "no attribute 'torch.float16'"]),
        (CONFIG, {"dtype": "Tensor"}, ["'dtype'", '"Tensor"']),
        (CONFIG, {"dtype": "nn"}, ["'dtype'", '"nn"']),
        (CONFIG, {"hidden_size": "32"}, ["'hidden_size'", "expected int, got str"]),
        (CONFIG, {"num_hidden_layers": 99_999}, ["'num_hidden_layers'", "from 1 to 10000"]),
        (CONFIG, {"num_hidden_layers": -2}, ["'num_hidden_layers'", "from 1 to 10000"]),
        (CONFIG, {"hidden_act": "silu_"}, ["'hidden_act'", "KeyError: 'silu_'"]),
        (CONFIG, {**ROPE, "rope_scaling": {"type": "su", "factor": 2.0}}, ["'rope_scaling'"]),
        (CONFIG, {**ROPE, "rope_scaling": {"type": "linear", "factor": "2"}}, ["'rope_scaling'", '"factor": "2"']),
        (CONFIG, {**ROPE, "rope_scaling": "linear"}, ["'rope_scaling'"]),
        (CONFIG, {"text_config": 7}, ["'text_config'", "a JSON object", "7"]),
        (CONFIG, {"text_config": {"vocab_size": 5}}, ["'text_config'"]),
        (CONFIG, {"quantization_config": "gptq"}, ["'quantization_config'", "a JSON object", '"gptq"']),
        (CONFIG, {"quantization_config": {"quant_method": "compressed-tensors"}}, ["quantization_config in its config"]),
        (CONFIG, {"quantized_cache": [1]}, ["'quantized_cache'"]),
        (CONFIG, {"quantized_cache": {"0": {"keys": {}, "values": {}, "residual": 0}}}, ["'quantized_cache'"]),
        (CONFIG, {"return_dict": False}, ["'return_dict'", "must be true"]),
        (GENERATION, {"eos_token_id": {"a": 1}}, ["'eos_token_id'", '{"a": 1}', "an id, or a list of ids"]),
        (GENERATION, {"eos_token_id": [[1]]}, ["'eos_token_id'"]),
        (GENERATION, {"watermarking_config": 3}, ["'watermarking_config'"]),
        (TOKENIZER, {"model_max_length": "512"}, ["'model_max_length'", '"512"']),
        (TOKENIZER, {"added_tokens_decoder": {"0": "<s>"}}, ["'added_tokens_decoder'"]),
        (SPECIAL, {"eos_token": 4}, ["'eos_token'", "has to be either str or AddedToken"]),
        (SPECIAL, {"unk_token": {}}, ["'unk_token'"]),
        (SPECIAL, {"eos_token": "</s> "}, ["'</s> '", "ids below 290", SPECIAL]),
        (ADDED, {"</s>": None}, ["'</s>'", "null"]),
        ("tokenizer.json", {"version": "2.0"}, ["Unknown tokenizer version '2.0'"]),
        ("tokenizer.json", {"normalizer": {"type": "Replace", "pattern": {"Regex": "("}, "content": ""}}, ["Oniguruma"]),
        ("tokenizer.json", {"normalizer": [""]}, ["'normalizer'"]),
        (INDEX, {"weight_map": "x"}, ["it has no weight_map"]),
        (INDEX, {"weight_map": {"lm_head.weight": [""]}}, ["names no file", "['']"]),
        (INDEX, {"weight_map": {"lm_head.weight": "x" * 5000}}, ["incomplete", "x" * 100 + " is missing"]),
    ],
)  # fmt: skip
def test_a_value_that_a_library_stumbles_over_is_an_error_with_file_and_field(
    model: Path, outcome: Any, file: str, changes: dict[str, object], words: list[str]
) -> None:
    found, said = outcome(with_values(model, file, **changes))
    assert (found, [word for word in [*words, file] if word not in said]) == ("refused", [])


@pytest.mark.parametrize("file", [CONFIG, GENERATION, TOKENIZER, SPECIAL, ADDED])
@pytest.mark.parametrize("data", [b"", b"[]", b'{"a": 1', b"\xff\xfe{\x00}\x00", b'{"a": 1, "a": 2}'])
def test_a_file_that_is_no_json_object_is_named(outcome: Any, file: str, data: bytes) -> None:
    found, said = outcome(Damage(file, "", data))
    assert (found, file in said) == ("refused", True), said


@pytest.mark.parametrize(
    "data", [b"\xff\xfe{\x00", b"{" * 3000, b"{% for", b"{{ messages + 1 }}", b"{{ x.y.z }}", b"{{ 1 // 0 }}"]
)
def test_a_chat_template_that_fails_is_named(outcome: Any, data: bytes) -> None:
    found, said = outcome(Damage("chat_template.jinja", "", data))
    assert (found, "chat_template.jinja" in said) == ("refused", True), said


@pytest.mark.parametrize(
    "changes",
    [
        {"do_sample": ..., "temperature": 0.9, "top_p": 0.6},
        {"do_sample": False, "temperature": 0.9},
        {"do_sample": False, "top_k": 0, "typical_p": 0.5},
        {"temperature": "0.9"},
        {"cache_implementation": "static"},
    ],
)
def test_generation_settings_that_are_not_read_here_change_nothing(
    model: Path, outcome: Any, changes: dict[str, object]
) -> None:
    assert outcome(with_values(model, GENERATION, **changes))[0] == "equal"


@pytest.mark.parametrize(("method", "settings"), [("none", {}), ("hqq", {"group_size": 32}), ("gguf", {})])
def test_generation_settings_are_carried_over_as_they_are(
    model: Path, tmp_path: Path, method: str, settings: dict[str, object]
) -> None:
    folder = with_values(model, GENERATION, do_sample=False, temperature=0.9, top_p=0.6).apply(model, tmp_path / "m")
    with reload_helper():
        made = compress(folder, tmp_path, method, **settings)
    assert (made / GENERATION).read_bytes() == (folder / GENERATION).read_bytes()
    assert open_generation_settings(made).eos_token_id == [1]


def test_a_folder_without_generation_settings_gets_those_of_its_configuration(model: Path, tmp_path: Path) -> None:
    folder = Damage(GENERATION, "", None).apply(model, tmp_path / "m")
    assert open_generation_settings(folder) is None
    with reload_helper():
        assert open_generation_settings(compress(folder, tmp_path)).eos_token_id == 1


def test_the_boundary_lets_our_errors_pass_and_chains_those_of_libraries() -> None:
    ours = CheckpointError("ours")
    with pytest.raises(CheckpointError) as passed, library_errors("It fails", "x"):
        raise ours
    assert passed.value is ours
    boundary = library_errors("It fails", "x", fix="Mend it")
    with pytest.raises(CheckpointError, match=r"It fails: KeyError: 'a'\. Got: 'x'\. Mend it\.") as chained, boundary:
        raise KeyError("a")
    assert isinstance(chained.value.__cause__, KeyError)
    words = "needs a package: No module named 'x'"
    with pytest.raises(MissingDependencyError, match=words), library_errors("It fails", "x"):
        raise ModuleNotFoundError("No module named 'x'")
    with pytest.raises(KeyboardInterrupt), library_errors("It fails", "x"):
        raise KeyboardInterrupt
