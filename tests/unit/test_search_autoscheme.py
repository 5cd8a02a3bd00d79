"""AutoScheme beside a search: which formats it can choose, what it is asked for, and that it answers."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mlflow_compress import demo
from mlflow_compress.commands.search import choice as autoscheme
from mlflow_compress.commands.search.choice import autoscheme_choices, candidates, integer_formats
from mlflow_compress.commands.search.parameters import SearchConfig
from mlflow_compress.compression.backends.autoscheme_backend import PACKAGE, IntegerFormat, ask_autoscheme
from mlflow_compress.decide.cost_table import CostTable, Limit, StoredSizes
from mlflow_compress.errors import MissingDependencyError, UnsupportedError
from mlflow_compress.models.source_model import resolve
from mlflow_compress.models.weight_groups import WeightGroup

INSTALLED = importlib.util.find_spec(PACKAGE) is not None


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoscheme.importlib.util, "find_spec", lambda name: object())


def formats_of(text: str, **settings: Any) -> list[IntegerFormat]:
    found, may_keep = candidates(SearchConfig(formats=text, **settings))
    return integer_formats(found, may_keep)


@pytest.mark.usefixtures("installed")
def test_integer_formats() -> None:
    assert formats_of("gptq:3,gptq:8", group_size="channel") == [
        IntegerFormat(bits=3, group_size=-1, sym=True),
        IntegerFormat(bits=8, group_size=-1, sym=True),
    ]
    assert formats_of("rtn:4,gptq:8")[0] == IntegerFormat(bits=4, group_size=128, sym=True)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("text", ["gptq:4,fp8", "gptq:4,rtn:4", "gptq:4,none,gptq:8", "gguf:4,gguf:8"])
def test_other_formats_are_refused(text: str) -> None:
    with pytest.raises(UnsupportedError, match="bits of integer formats only"):
        formats_of(text)


def test_without_the_package_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    found, may_keep = candidates(SearchConfig(formats="rtn:3,rtn:8"))
    monkeypatch.setattr(autoscheme.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="auto_round, which is not installed"):
        integer_formats(found, may_keep)


def test_it_is_asked_for_the_budget_without_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes of 3.5 and 8.5 stored bits: half a bit is scales, so 4.5 stored bits are 4 of its own."""
    sizes = StoredSizes(
        groups=("a", "b"),
        formats=("gptq:3", "gptq:8"),
        layers=np.array([[350, 850]] * 2),
        base=3200,
        rest=0,
        weights=1600,
    )
    table = CostTable(sizes=sizes, start=np.zeros(3), added=np.ones((2, 2, 3)))
    groups = (WeightGroup("a", "o", 0, ("x", "y")), WeightGroup("b", "o", 1, ("z",)))
    ids = [np.arange(4, dtype=np.int32)] * 5
    costs: Any = SimpleNamespace(groups=groups, text=SimpleNamespace(windows=SimpleNamespace(ids=ids)))
    source: Any = SimpleNamespace(
        folder="model", trust_remote_code=False, tokenizer=lambda: SimpleNamespace(decode=lambda row: str(len(row)))
    )
    asked: list[Any] = []

    def answer(model: str, texts: Any, formats: Any, grouped: Any, bits: Any, **more: Any) -> list[dict[str, int]]:
        asked.append((model, texts, grouped, bits))
        return [{"x": 8, "y": 8, "z": 3} for _ in bits]

    monkeypatch.setattr(autoscheme, "ask_autoscheme", answer)
    formats = [IntegerFormat(bits=bits, group_size=32, sym=True) for bits in (3, 8)]
    limits = [Limit(kind="bits_per_weight", value=value) for value in (3.4, 4.5, 9.0)]
    budgets = {limit: limit.layer_bytes(sizes) if limit.value > 3.5 else 690 for limit in limits}
    found = autoscheme_choices(SearchConfig(), source, formats, costs, table, budgets)
    assert asked == [("model", ["8", "8"], [("x", "y"), ("z",)], [4.0, 8])]
    assert set(found) == set(limits[1:])  # 3.4 stored bits are below its smallest format
    assert found[limits[1]].choice == (1, 0) and found[limits[1]].n_bytes == 1200 and found[limits[1]].cost == 2.0


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.skipif(not INSTALLED, reason="needs the package auto_round")
def test_a_failure_of_its_process_is_one_error() -> None:
    with pytest.raises(UnsupportedError, match=r"AutoScheme cannot choose formats for this model: .*nowhere"):
        ask_autoscheme("/nowhere", ["text"], [], [], [4.0], length=8)


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.skipif(not INSTALLED, reason="needs the package auto_round")
def test_it_chooses_for_the_demo_within_the_average() -> None:
    source = resolve(str(demo.MODEL_DIR))
    text = (demo.DATA_DIR / "corpus.txt").read_text()
    groups = [[f"model.layers.{i}.self_attn.{p}_proj" for p in "qkv"] for i in range(source.layers)]
    formats = [IntegerFormat(bits=bits, group_size=128, sym=True) for bits in (3, 8)]
    texts = [text[i * 2000 : (i + 1) * 2000] for i in range(3)]
    found = ask_autoscheme(str(source.folder), texts, formats, groups, [4.0, 6.0], length=64)
    weights = {name: rows * columns for name, (rows, columns) in source.linear.items()}
    average = [sum(bits[name] * weights[name] for name in weights) / sum(weights.values()) for bits in found]
    assert average[0] <= 4.0 < average[1] <= 6.0
    for bits in found:
        assert set(bits) == set(weights) and set(bits.values()) <= {3, 8}
        assert all(len({bits[layer] for layer in group}) == 1 for group in groups)
