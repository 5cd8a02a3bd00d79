"""Registries: the package's own modules, plug-ins by entry point, and errors that say whose they are."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mlflow_compress import registry
from mlflow_compress.commands.sweep.parameters import SweepConfig
from mlflow_compress.commands.sweep.plan import combinations
from mlflow_compress.compression import METHODS, CompressionJob, Method, MethodConfig, compress_model, method_config
from mlflow_compress.compression.layers import save_and_measure
from mlflow_compress.compression.method import CalibratedConfig, register
from mlflow_compress.config import parse
from mlflow_compress.errors import ConfigError
from mlflow_compress.registry import Registry
from tests.compress_models import make_llama

GROUP = "test_plugins.things"
LOCAL = "from test_things import THINGS\nTHINGS.register('{name}')({value})\n"


@pytest.fixture
def installed(tmp_path, monkeypatch) -> Callable[..., None]:
    """Make a package of things importable, and install plug-ins for it; both are forgotten after the test."""
    (tmp_path / "test_things").mkdir()
    (tmp_path / "test_things" / "__init__.py").write_text(
        f"from mlflow_compress.registry import Registry\nTHINGS = Registry('thing', 'test_things', group='{GROUP}')\n"
    )
    (tmp_path / "test_things" / "own.py").write_text(LOCAL.format(name="own", value=1))
    monkeypatch.syspath_prepend(str(tmp_path))
    registry._broken_plugin.cache_clear()
    before = set(sys.modules)

    def install(package: str, code: str) -> None:
        (tmp_path / f"{package}.py").write_text(code)
        info = tmp_path / f"{package}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[{GROUP}]\nmine = {package}\n")

    yield install
    registry._broken_plugin.cache_clear()
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "").is_relative_to(tmp_path):
            del sys.modules[name]


def _things() -> Registry[int]:
    from test_things import THINGS

    return THINGS


def test_without_plugins_there_are_the_packages_own_objects_and_the_nearest_is_named(installed):
    assert _things().names() == ["own"]
    with pytest.raises(ConfigError, match="Did you mean 'own'"):
        _things().get("pwn")


def test_a_broken_plugin_is_one_error_that_names_entry_point_and_package(installed):
    installed("broken_plugin", "import no_such_module_anywhere\n")
    for _ in range(2):  # the second look-up must not find half a plug-in
        with pytest.raises(ConfigError) as raised:
            _things().names()
        message = str(raised.value)
        assert "mine = broken_plugin of broken_plugin 1.2" in message and GROUP in message
        assert "no_such_module_anywhere" in message


def test_a_name_that_a_plugin_takes_again_is_refused_and_both_modules_are_named(installed):
    installed("second_owner", LOCAL.format(name="own", value=3))
    with pytest.raises(ConfigError, match=r"thing 'own' is registered twice: by test_things.own and by second_owner"):
        _things().get("own")


def test_modules_of_entry_points_register_themselves_and_an_origin_names_plugin_package_and_file(installed, tmp_path):
    installed("thing_plugin", LOCAL.format(name="plugged", value=2))
    things = _things()
    assert dict(things.items()) == {"own": 1, "plugged": 2} and things.get("plugged") == 2
    assert things.origin("plugged") == f"thing 'plugged' of thing_plugin 1.2 ({tmp_path / 'thing_plugin.py'})"
    assert things.origin("own") == f"thing 'own' of no installed package ({tmp_path / 'test_things' / 'own.py'})"


def test_an_error_in_a_plugins_code_names_the_plugin_and_clear_errors_pass(installed):
    installed("thing_plugin", LOCAL.format(name="plugged", value=2))
    things = _things()
    assert things.get("plugged") == 2
    with (
        pytest.raises(ConfigError, match=r"The thing 'plugged' of thing_plugin 1\.2 .* failed with ZeroDivision"),
        things.blaming("plugged"),
    ):
        1 / 0  # noqa: B018 - what a formula may do
    with pytest.raises(ConfigError, match=r"^Wrong\.$"), things.blaming("plugged"):
        raise ConfigError("Wrong")
    with pytest.raises(OSError, match="No space left"), things.blaming("plugged"):
        raise OSError(28, "No space left on device")


def test_an_error_in_this_packages_own_code_is_not_blamed_on_a_plugin():
    from mlflow_compress.items.named_tasks import TASKS

    TASKS.names()
    assert TASKS.origin("demo").startswith("task 'demo' of mlflow-compress ")
    with pytest.raises(ZeroDivisionError), TASKS.blaming("demo"):
        1 / 0  # noqa: B018


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
