"""A method of another package: what is refused when it registers, and what is said when its code fails or answers wrongly."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mlflow_compress.commands.sweep.parameters import SweepConfig
from mlflow_compress.commands.sweep.plan import combinations
from mlflow_compress.compression import METHODS, CompressionJob, Method, MethodConfig, compress_model, method_config
from mlflow_compress.compression.layers import save_and_measure
from mlflow_compress.compression.method import CalibratedConfig, register
from mlflow_compress.config import parse
from mlflow_compress.errors import ConfigError
from tests.compress_models import make_llama


class Bits(MethodConfig):
    bits: int = 3


class Needed(MethodConfig):
    steps: int


class Sums(Method[Bits]):
    name = "plugin-sums"
    description = reference = "test"
    format = "safetensors (dense)"
    Config = Bits
    supported_bits = (5, 3)

    def stored_bits(self, config: Bits) -> float:
        return config.bits + 0.5

    def compress(self, job: CompressionJob[Bits]) -> torch.Tensor:
        return save_and_measure(job, job.source.load(job.device))


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    METHODS.names()  # the registry is full before a test adds to it
    monkeypatch.setattr(METHODS, "_objects", dict(METHODS._objects))
    monkeypatch.setattr(METHODS, "_modules", dict(METHODS._modules))
    register(Sums)
    METHODS._modules[Sums.name] = __name__
    yield


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"supported_bits": (5, "3")}, "declares a wrong supported_bits"),
        ({"supported_bits": (5, 4)}, r"supported_bits without the default.*bits=3"),
        ({"supported_bits": ()}, "supported_bits without the default"),
        ({"requires": "torch"}, "declares a wrong requires"),
        ({"linear_only": "yes"}, "declares a wrong linear_only"),
        ({"description": None}, "declares a wrong description"),
        ({"name": "two words"}, "has a wrong name.*'two words'"),
        ({"Config": dict}, "declares a wrong Config. Allowed: a subclass of MethodConfig"),
        ({"Config": Needed}, "a setting without a default. Got: 'steps'"),
        ({"needs_calibration": True}, "declares needs_calibration=True"),
        ({"Config": CalibratedConfig, "supported_bits": ()}, "declares needs_calibration=False"),
        ({"compress": Method.compress}, "has no function `compress`"),
    ],
)
def test_a_wrong_declaration_is_refused_when_it_registers(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"The compression method Wrong .*{message}"):
        register(type("Wrong", (Sums,), wrong))


def test_bits_label_and_size_of_a_plugin_are_right_in_the_plan(registered: None) -> None:
    chosen, left_out = combinations(parse(SweepConfig, {"methods": "plugin-sums", "bits": "5,4,3"}))
    assert [one.name for one in chosen] == ["plugin-sums-5bit", "plugin-sums-3bit"]
    assert list(left_out) == ["plugin-sums bits=4"] and "Allowed: 5, 3." in left_out["plugin-sums bits=4"]
    assert [METHODS.get("plugin-sums").stored_bits(one.settings) for one in chosen] == [5.5, 3.5]


@pytest.mark.parametrize(
    ("function", "answer", "message"),
    [
        ("compress", lambda job: 1 / 0, "ZeroDivisionError"),
        ("compress", lambda job: None, r"compress\(\) wrote no weights"),
        ("label", lambda config: None, r"label\(\) gave None"),
        ("check", lambda config, source: {}["missing"], "KeyError"),
    ],
)
def test_what_a_plugin_raises_or_gives_wrongly_names_it(
    registered: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, answer: Any, message: str
) -> None:
    monkeypatch.setattr(Sums, function, lambda self, *given: answer(*given))
    base = make_llama(tmp_path / "base")
    with pytest.raises(ConfigError, match=rf"compression method 'plugin-sums' of .*{Path(__file__).name}.*{message}"):
        compress_model(str(base), "plugin-sums", method_config("plugin-sums"), [], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_logits_of_another_shape_name_the_plugin(
    registered: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Sums.compress
    monkeypatch.setattr(Sums, "compress", lambda self, job: before(self, job)[:1])
    with pytest.raises(ConfigError, match=r"'plugin-sums' of .*compress\(\) gave \(1, \d+\), and not logits"):
        compress_model(str(make_llama(tmp_path / "base")), "plugin-sums", None, [], tmp_path / "out")
