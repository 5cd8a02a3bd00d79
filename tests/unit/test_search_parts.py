"""The parts of a search that need no model: parameters, texts, units of comparison, tables."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlflow_compress import demo
from mlflow_compress.commands.search import choice
from mlflow_compress.commands.search.measured_costs import joined_distances, read_search_text
from mlflow_compress.commands.search.parameters import SearchConfig
from mlflow_compress.commands.search.result import SearchedVariant
from mlflow_compress.commands.search.run import _windows
from mlflow_compress.commands.sweep.parameters import SweepConfig
from mlflow_compress.compression import calibration_tokens
from mlflow_compress.config import as_text, parse
from mlflow_compress.decide.cost_table import Limit, StoredSizes
from mlflow_compress.errors import ConfigError, UnsupportedError
from mlflow_compress.models.source_model import resolve
from mlflow_compress.models.weight_groups import WeightGroup
from mlflow_compress.records import TokenDistances
from mlflow_compress.reporting import search_tables
from mlflow_compress.reporting.figures import draw_search

SOURCE = resolve(str(demo.MODEL_DIR))


def test_formats_are_variants_with_the_settings_of_their_methods() -> None:
    config = SearchConfig(formats="gptq:3, fp8, none", group_size="64", calibration_samples=8)
    found, may_keep = choice.candidates(config)
    assert may_keep and [one.uniform.name for one in found] == ["gptq-3bit-g64", "fp8"]
    assert found[0].calibration_samples == 8 and found[1].calibration_samples == 0
    assert found[0].described["group_size"] == 64 and "seed" not in found[0].described
    assert not found[0].uniform.config.judge


@pytest.mark.parametrize(
    ("formats", "target", "reason"),
    [
        ("rtn:2,rtn:4", "vllm", "vLLM has no kernel for rtn-2bit-g128"),
        ("rtn:4,gptq:4", "llama.cpp", "llama.cpp does not read the format of rtn-4bit-g128"),
        ("rtn:4,nvfp4", "vllm-cpu", "vLLM's CPU build has no kernel for nvfp4"),
    ],
)
def test_formats_that_the_target_does_not_take_are_refused_before_any_work(
    formats: str, target: str, reason: str
) -> None:
    config = SearchConfig(formats=formats, target=target)
    with pytest.raises(UnsupportedError, match=reason):
        choice.require_mixable(config, choice.candidates(config)[0], SOURCE)
    accepted = SearchConfig(formats="rtn:4,gptq:4", target="vllm-cpu")
    choice.require_mixable(accepted, choice.candidates(accepted)[0], SOURCE)


@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="needs the extra 'llama-cpp'")
def test_k_quants_of_a_search_are_pure(tmp_path: Path) -> None:
    config = SearchConfig(formats="gguf-k:3,gguf:8", method_args="native=true")
    found, _ = choice.candidates(config)
    assert [one.uniform.name for one in found] == ["gguf-q3_k-pure-native", "gguf-q8_0-native"]
    assert found[0].described["mix"] == "pure" and found[0].described["native"] is True
    choice.require_mixable(config, found, SOURCE)
    mixed, _ = choice.candidates(SearchConfig(formats="gguf-k:3,gguf-k:4", method_args="mix=M"))
    with pytest.raises(ConfigError, match="cannot mix types"):
        choice.require_mixable(config, mixed, SOURCE)


@pytest.mark.parametrize(
    ("formats", "error", "message"),
    [
        ("gptq:4,gptq:4", ConfigError, "two different formats"),
        ("gptq:4,gptq:", ConfigError, "must be METHOD:BITS"),
    ],
)
def test_wrong_formats_are_refused(formats: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        choice.candidates(SearchConfig(formats=formats))


def test_groups_that_share_a_module_become_one() -> None:
    groups = [WeightGroup("layers.0.qkv", "qkv", 0, ("n", "q")), WeightGroup("layers.0.o", "o", 0, ("o",))]
    assert joined_distances(groups, WeightGroup("layers.0.down", "down", 0, ("d",)))[2].modules == ("d",)
    both = joined_distances(groups, WeightGroup("layers.0.qkv+o", "qkv+o", 0, ("q", "o")))
    assert both == [WeightGroup("layers.0.qkv+o", "qkv+o", 0, ("n", "q", "o"))]
    assert joined_distances(both, WeightGroup("layers.0.qkv", "qkv", 0, ("q",))) == both


def test_limits() -> None:
    assert choice.limits_of(SearchConfig(bits_per_weight="4.5,3.25,4.5")) == [
        Limit(kind="bits_per_weight", value=3.25),
        Limit(kind="bits_per_weight", value=4.5),
    ]
    assert choice.limits_of(SearchConfig(max_kl="0.05")) == [Limit(kind="max_kl", value=0.05)]
    with pytest.raises(ConfigError, match=r"one kind of limit.*Got: 'none'"):
        choice.limits_of(SearchConfig())
    with pytest.raises(ConfigError, match=r"one kind of limit.*bits_per_weight, max_kl"):
        choice.limits_of(SearchConfig(bits_per_weight="4", max_kl="0.05"))


def test_formats_of_caches_and_their_bytes() -> None:
    config = SearchConfig(formats="rtn:3,rtn:8", cache_formats="16, 8,fp8,4:2", cache_tokens="100", max_bytes="9e6")
    assert config.limited == "max_bytes"
    assert {name: one and (one.key_bits, one.value_bits) for name, one in config.caches.items()} == {
        "kv-cache:16": None,
        "kv-cache:8": (8, 8),
        "kv-cache:fp8": ("fp8", "fp8"),
        "kv-cache:4:2": (4, 2),
    }
    text = SOURCE.configuration()
    heads, width = text.num_key_value_heads, text.head_dim
    plain = 100 * heads * 2 * width * 2  # bfloat16
    eight, floats, mixed = 2 * (width + 4), 2 * (width + 2), width // 2 + 4 + width // 4 + 4
    expected = [plain, plain, *(100 * heads * one for one in (eight, floats, mixed))]
    found = choice.cache_bytes(config, SOURCE, choice.quantized_caches(config, SOURCE))
    assert list(found) == ["baseline", *config.caches] and list(found.values()) == expected
    assert choice.cache_bytes(SearchConfig(), SOURCE, {}) == {}
    # The budget is that of weights and cache: above that of the weights alone.
    choice.require_in_reach(
        Limit(kind="max_bytes", value=SOURCE.layers * plain + 7e6), choice.candidates(config)[0], SOURCE, found
    )


def test_caches_are_groups_whose_formats_are_columns() -> None:
    """A format that layers and caches have in common is one column; what a group cannot have takes 0 bytes."""
    sizes = StoredSizes(
        groups=("o",), formats=("as it was", "more"), layers=np.array([[10, 20]]), base=40, rest=5, weights=20
    )
    caches = {"0": {"baseline": 9, "as it was": 2, "new": 3}, "1": {"baseline": 8, "as it was": 1, "more": 8}}
    found = choice.with_caches(sizes, caches)
    assert found.groups == ("o", "0", "1") and found.formats == ("as it was", "more", "new")
    assert found.layers.tolist() == [[10, 20, 0], [2, 0, 3], [1, 8, 0]]
    assert (found.base, found.cache, found.rest) == (57, 17, 5)
    assert choice.with_caches(sizes, {}) is sizes


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bits_per_weight": "4"}, "bits_per_weight does not count caches. Allowed: max_bytes or max_kl"),
    ],
)
def test_what_does_not_go_with_caches_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _ = SearchConfig(formats="rtn:3,rtn:8", cache_formats="8,4", **given).limited
    with pytest.raises(ConfigError, match=r"key_bits.*16, 8, 4, 3, 2.*Got: '?5"):
        _ = SearchConfig(cache_formats="5", max_kl="0.1").caches


@pytest.mark.parametrize("value", ["0", "-1", "4,x", "inf", "nan"])
def test_a_limit_is_a_positive_number(value: str) -> None:
    with pytest.raises(ConfigError, match=r"'bits_per_weight' cannot be read. Allowed: positive numbers"):
        SearchConfig(bits_per_weight=value)


@pytest.mark.parametrize(("kind", "value"), [("bits_per_weight", 2.9), ("bits_per_weight", 16.5), ("max_bytes", 1e6)])
def test_a_budget_out_of_reach_is_refused_before_any_work(kind: Any, value: float) -> None:
    found, _ = choice.candidates(SearchConfig(formats="rtn:3,rtn:8"))
    with pytest.raises(ConfigError, match=f"{kind} is out of range. Allowed: .*a little more for scales.*the baseline"):
        choice.require_in_reach(Limit(kind=kind, value=value), found, SOURCE)
    choice.require_in_reach(Limit(kind="bits_per_weight", value=3.0), found, SOURCE)
    choice.require_in_reach(Limit(kind="max_kl", value=1e-9), found, SOURCE)


def test_parameters_survive_the_way_through_text() -> None:
    config = SearchConfig(formats="rtn:3,rtn:8", bits_per_weight="3.5,4", search_windows=5)
    assert parse(SearchConfig, as_text(config)) == config
    assert config.for_variants(SweepConfig).source == config.uniform_variants()[0]["rtn:8"].source == config.source


def test_a_recipe_is_a_variant_that_its_content_names(tmp_path: Path) -> None:
    config = SearchConfig(formats="gptq:3,gptq:8", calibration_samples=8)
    found, _ = choice.candidates(config)
    layers = {name: ("gptq:3", "gptq:8")[i % 2] for i, name in enumerate(SOURCE.linear)}
    one = choice.recipe_variant(config, found, layers, "4.5bit", tmp_path)
    assert one.name == "mixed-gptq-4.5bit" and one.config.compression.calibration_samples == 8
    again = choice.recipe_variant(config, found, layers, "4.5bit", tmp_path)
    assert one.settings == again.settings and len(list(tmp_path.rglob("*.json"))) == 1
    [file] = tmp_path.rglob("*.json")
    assert json.loads(file.read_text())["layers"] == layers
    other = choice.recipe_variant(config, found, dict.fromkeys(layers, "gptq:3"), "4.5bit", tmp_path)
    assert other.settings.settings() != one.settings.settings()


def test_the_search_text_follows_what_calibrates() -> None:
    config = SearchConfig(search_windows=6, calibration_length=32)
    found = read_search_text(config, SOURCE, used=10)
    tokenizer = SOURCE.tokenizer()
    text = (demo.DATA_DIR / "calibration.txt").read_text().split("\n\n")
    used = calibration_tokens.prepare_calibration(
        tokenizer, [t for t in text if t.strip()], samples=10, length=32, seed=42
    ).ids
    mine = {tuple(row.tolist()) for row in found.windows.ids}
    assert len(mine) == 6 and not mine & {tuple(row) for row in used.tolist()}
    assert all(positions.tolist() == list(range(17, 32)) for positions in found.windows.scored)
    again = read_search_text(config, SOURCE, used=10)
    assert again.sha256 == found.sha256 != read_search_text(config, SOURCE, used=11).sha256


def test_a_text_of_its_own_is_used_from_its_beginning(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text((demo.DATA_DIR / "corpus.txt").read_text()[:4000])
    config = SearchConfig(search_windows=4, calibration_length=32, search_text=str(tmp_path / "own.txt"))
    assert read_search_text(config, SOURCE, used=3).sha256 == read_search_text(config, SOURCE, used=100).sha256
    with pytest.raises(ConfigError, match="too short"):
        read_search_text(config.with_values(search_windows=400), SOURCE, used=0)


def test_units_are_windows_of_all_corpora() -> None:
    columns: dict[str, Any] = {name: np.zeros(5) for name in ("kl_reverse", "js", "tv", "top10", "rbo10")}
    columns |= {"same_top": np.ones(5, dtype=bool), "position": np.arange(5, dtype=np.int32)}
    columns |= {"task": ["t"] * 3 + ["s"] * 2, "item_id": ["0", "0", "1", "0", "0"], "kl": [1.0, 3.0, 5.0, 2.0, 4.0]}
    names = TokenDistances.SCHEMA.names
    columns |= {name: ["" for _ in range(5)] for name in names if name not in columns}
    found = _windows(TokenDistances.from_columns({name: columns[name] for name in names}))
    assert found.keys == (("t", "0"), ("t", "1"), ("s", "0")) and found.kl.tolist() == [2.0, 5.0, 3.0]


def variant(name: str, bits: float, kl: float, **more: Any) -> SearchedVariant:
    own = {"kind": "uniform", "kl_low": 0.9 * kl, "kl_high": 1.1 * kl, "search_kl": kl, "search_kl_high": 1.1 * kl}
    fixed = {"bits_per_weight_model": bits + 1, "size_bytes": int(1e6 * bits), "run_id": "r"}
    return SearchedVariant(name=name, bits_per_weight=bits, kl=kl, **{**own, **fixed, **more})


MIX = {"kind": "searched", "limit": "4bit", "gap": 0.0, "mix": "0.5 of b, the rest a", "mix_kl": 0.03}
ROWS = [
    variant("a", 3.1, 0.1),
    variant(
        "closer", 3.9, 0.02, predicted_kl=0.021, difference=-0.01, difference_low=-0.02, difference_high=-0.005, **MIX
    ),
    variant(
        "farther", 3.9, 0.04, predicted_kl=0.02, difference=0.01, difference_low=0.005, difference_high=0.02, **MIX
    ),
    variant("equal", 3.9, 0.03, predicted_kl=0.03, difference=0.0, difference_low=-0.02, difference_high=0.02, **MIX),
    variant("b", 4.1, 0.01),
]


def rows() -> list[dict[str, Any]]:
    from dataclasses import asdict

    return [{**asdict(one), "prediction_error": one.prediction_error, "against_mix": one.against_mix} for one in ROWS]


def test_rows_finding_and_notes_say_what_was_found() -> None:
    assert [one.against_mix for one in ROWS] == [None, "closer", "farther", "not told apart", None]
    assert ROWS[1].prediction_error == pytest.approx(0.05) and ROWS[0].prediction_error is None
    zero = variant("z", 8.0, 0.0, predicted_kl=0.1, **MIX)
    assert zero.prediction_error is None and zero.against_mix is None
    said = search_tables.search_finding(rows())
    assert said.startswith("3 variants of mixed precision; 1 of 3 closer to the baseline than the linear mix")
    assert "1 farther" in said and said.endswith("predicted KL at most 50 % off")
    assert search_tables.search_finding(rows()[:2]).startswith("1 variant of")
    notes = search_tables.search_notes(rows(), search_text="A", held_out="B")
    assert "mean over B" in notes[0] and [n for n in notes if "-50 % off" in n and n.startswith("farther")]
    assert not [n for n in notes if n.startswith("closer")]
    outside = {**rows()[1], "limit": "kl0.01", "max_kl": 0.01, "gap": 0.02}
    notes = search_tables.search_notes([outside], search_text="A", held_out="B")
    assert [n for n in notes if "not surely within the limit" in n] and [n for n in notes if "2 % below" in n]


def test_tables_and_figure_hold_every_value_and_say_what_was_found(tmp_path: Path) -> None:
    table = "\n".join(search_tables.search_table(rows()).lines())
    assert len({len(line.rstrip()) for line in table.splitlines()[2:]}) == 1 and "-0.010 [-0.020, -0.005]" in table
    markdown = search_tables.search_markdown(rows(), "it | found", ["a <b> note"])
    assert "it \\| found" in markdown and "&lt;b>" in markdown and markdown.count("\n| ") == 6
    read = list(csv.DictReader(io.StringIO(search_tables.rows_csv(rows()))))
    assert len(read) == 5 and float(read[1]["difference_high"]) == -0.005 and read[0]["predicted_kl"] == ""
    [figure] = draw_search(rows(), tmp_path, gate=0.05)
    assert figure.path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert figure.title == "1 of 3 searched variants are closer than the linear mix"
    zero = {**rows()[0], "kl": 0.0}
    assert "1 with a KL of 0 is left out" in draw_search([*rows(), zero], tmp_path, gate=None)[0].caption
    assert draw_search([zero], tmp_path, gate=None) == []
