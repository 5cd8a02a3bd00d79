"""Strict parameters of compression methods: what is accepted, what is refused, and what the refusal says.

Calibration sets: whole windows, seeded choice, a hash that follows the tokens.
"""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from mlflow_compress.commands.quantize.parameters import QuantizeConfig
from mlflow_compress.commands.quantize.run import variant_name
from mlflow_compress.commands.shared.named_method import method_settings
from mlflow_compress.compression import METHODS, compress_model, method_config
from mlflow_compress.compression.calibration_tokens import Calibration, prepare_calibration
from mlflow_compress.config import SourceConfig
from mlflow_compress.errors import ConfigError, MissingDependencyError


def test_auto_keeps_every_default_and_text_is_parsed_to_the_field_type() -> None:
    for name, method in METHODS.items():
        assert method_config(name, bits="auto", group_size="auto") == method.Config()
    config = method_config("gptq", bits="3", group_size="64", damping="0.05", act_order="false", seed="7")
    assert (config.bits, config.group_size, config.damping, config.act_order, config.seed) == (3, 64, 0.05, False, 7)
    assert method_config("rtn", group_size="channel").group_size == "channel"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        *(("bits", bad, "Parameter 'bits' must be a whole number") for bad in ("xyz", "4.5", "", "4 bits", True, 4.0)),
        *(("group_size", bad, "group_size") for bad in ("row", "1.5", "0", "-1")),
        *(("damping", bad, "damping") for bad in ("nan", "0", "1")),
        ("act_order", "1", "act_order"),
    ],
)
def test_values_that_a_setting_cannot_have_are_refused(name: str, value: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        method_config("gptq", **{name: value})


def test_foreign_parameters_and_unknown_methods_name_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"no parameter 'damping'.*group_size, symmetric.*damping=0\.1"):
        method_config("rtn", damping="0.1")
    with pytest.raises(ConfigError, match=r"'none' has no parameter 'bits'.*no parameters"):
        method_config("none", bits=4)
    with pytest.raises(ConfigError, match="no parameter 'group_size'"):
        method_config("bnb-nf4", group_size=64)
    with pytest.raises(ConfigError, match="Did you mean 'gptq'"):
        method_config("gtpq")


def test_every_method_is_described_and_its_settings_are_frozen() -> None:
    for name, method in METHODS.items():
        assert method.name == name
        assert method.description and method.reference and method.format
        config = method.Config()
        for field in type(config).model_fields:
            with pytest.raises(ValidationError, match="frozen"):
                setattr(config, field, 1)
        with pytest.raises(TypeError):
            method.Config(4)
        if method.supported_bits:
            assert config.bits in method.supported_bits
        else:
            assert not hasattr(config, "bits")
        assert method.needs_calibration == hasattr(config, "calibration_samples")


def test_labels_say_what_distinguishes_a_variant() -> None:
    labels = {
        METHODS.get(name).label(method_config(name, **settings))
        for name, settings in [
            ("awq", {}),
            ("rtn", {"bits": 3, "group_size": "channel"}),
            ("bnb-nf4", {}),
            ("none", {}),
        ]
    }
    assert labels == {"awq-4bit-g128", "rtn-3bit-channel", "bnb-nf4", "none"}


def test_a_missing_backend_or_extra_is_named_before_any_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    method = METHODS.get("gptq")
    monkeypatch.setattr(type(method), "requires", ("a_package_that_nobody_wrote",))
    with pytest.raises(MissingDependencyError, match="a_package_that_nobody_wrote"):
        method.require_backend(method.Config())
    monkeypatch.setattr(type(METHODS.get("torchao-int8")), "requires", ("a_package_that_nobody_wrote",))
    with pytest.raises(MissingDependencyError, match=r"Run: pip install 'mlflow-compress\[torchao\]'"):
        compress_model(str(tmp_path / "no model is looked for"), "torchao-int8", None, [], tmp_path / "out")


def test_further_settings_reach_the_method() -> None:
    assert QuantizeConfig(method_args="none") == QuantizeConfig(method_args="") == QuantizeConfig()
    config = QuantizeConfig(method="wanda", method_args="sparsity=0.7", calibration_samples="8")
    settings = method_settings(config.compression, config.source)
    assert (settings.sparsity, settings.calibration_samples, settings.seed) == (0.7, 8, 42)  # type: ignore[attr-defined]
    reseeded = method_settings(QuantizeConfig(method="wanda", method_args="seed=3").compression, SourceConfig())
    assert reseeded.seed == 3  # type: ignore[attr-defined]  # of the calibration alone
    assert variant_name(config) == "wanda-70pct"
    assert variant_name(QuantizeConfig(method="magnitude", method_args="pattern=2:4")) == "magnitude-2of4"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sparsity=", "'method_args' cannot be read"),
        ("sparsty=0.5", "has no parameter 'sparsty'"),
        ("group_size=3", "holds the parameter group_size"),
    ],
)
def test_further_settings_that_cannot_be_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        method_settings(QuantizeConfig(method="wanda", method_args=text).compression, SourceConfig())


def letters(text: str, **_: bool) -> dict[str, list[int]]:
    """Tokenize one letter a token."""
    return {"input_ids": [ord(letter) for letter in text]}


class WithBos:
    """Tokenizes one letter a token, and puts a BOS before it where it is asked to."""

    bos_token = "<"

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        return letters("<" * add_special_tokens + text)


def test_windows_are_cut_from_the_joined_texts_without_a_second_bos() -> None:
    # "abc" + "defgh" = 8 tokens = 2 windows of 3 and a rest of 2 that is dropped.
    calibration = prepare_calibration(letters, ["abc", "defgh"], samples=2, length=3, seed=0)
    assert sorted(calibration.ids.tolist()) == [[97, 98, 99], [100, 101, 102]]
    # "<ab" and "<cd", six tokens: a chat template has written the BOS of the first text already.
    assert prepare_calibration(WithBos(), ["<ab", "cd"], samples=1, length=6, seed=0).ids.tolist() == [
        [60, 97, 98, 60, 99, 100]
    ]


@given(st.integers(0, 2**31), st.integers(1, 20))
def test_the_seed_alone_decides(seed: int, samples: int) -> None:
    text = ["".join(chr(33 + i) for i in range(100))]
    first = prepare_calibration(letters, text, samples=samples, length=5, seed=seed)
    again = prepare_calibration(letters, text, samples=samples, length=5, seed=seed)
    assert np.array_equal(first.ids, again.ids) and first.sha256 == again.sha256
    assert len({row[0] for row in first.ids.tolist()}) == samples  # no window twice


def test_other_seeds_give_other_sets_and_too_little_text_is_refused_with_the_numbers() -> None:
    text = ["".join(chr(33 + i % 90) for i in range(90))]
    hashes = {prepare_calibration(letters, text, samples=6, length=5, seed=seed).sha256 for seed in range(5)}
    assert len(hashes) == 5
    with pytest.raises(ConfigError, match=r"at least 12 tokens \(3 samples of 4\).*11 tokens, 2 samples"):
        prepare_calibration(letters, ["hello world"], samples=3, length=4, seed=0)


def test_the_hash_is_of_the_token_ids_and_batches_hold_every_sample_in_order() -> None:
    # The number 1 as eight bytes: python -c "import hashlib as h; print(h.sha256(b'\x01' + bytes(7)).hexdigest())"
    digest = "7c9fa136d4413fa6173637e883b6998d32e1d675f88cddff9dcbcf331820f4b8"
    assert Calibration(np.array([[1]])).sha256 == digest
    calibration = Calibration(np.arange(20).reshape(5, 4))
    batches = list(calibration.loader(batch_size=2))
    assert [len(batch["input_ids"]) for batch in batches] == [2, 2, 1]
    assert np.array_equal(np.concatenate([batch["input_ids"].numpy() for batch in batches]), calibration.ids)
