"""The parts of a repair that need no model: what layers are raised to, and how it is told."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlflow_compress import demo
from mlflow_compress.commands.search import repair as repair_module
from mlflow_compress.commands.search.command import search
from mlflow_compress.commands.search.parameters import SearchConfig
from mlflow_compress.commands.search.repair import Refused, raised_recipe, require_repairable
from mlflow_compress.commands.search.result import Repair, RepairTrial
from mlflow_compress.compression.method import CalibratedConfig, method_config
from mlflow_compress.compression.mixed_recipe import MixedRecipe
from mlflow_compress.errors import ConfigError, UnsupportedError
from mlflow_compress.models.gguf_file import StoredTensor
from mlflow_compress.models.source_model import resolve
from mlflow_compress.tracking.store import RunLink

SOURCE = resolve(str(demo.MODEL_DIR))
LAYERS = [[name] for name in SOURCE.linear]


def refused(method: str, recipe: MixedRecipe | None = None, **settings: Any) -> Refused:
    """Return a variant of the demo, as a repair reads it from its run."""
    values = method_config(method, **settings).settings()
    own = {name: value for name, value in values.items() if name not in CalibratedConfig.model_fields}
    recipe = recipe or MixedRecipe(
        formats={method: {"method": method, **own}}, layers=dict.fromkeys(SOURCE.linear, method)
    )
    manifest: Any = SimpleNamespace(method=method, label=f"a {method}", settings=values)
    main: Any = SimpleNamespace(compression=SimpleNamespace(target="any"))
    return Refused(run=None, main=main, manifest=manifest, folder="", source=SOURCE, recipe=recipe)


def test_layers_are_raised_to_eight_bits_of_their_own_method_or_of_rtn() -> None:
    assert refused("rtn", bits=3, group_size=64).raised == {
        "method": "rtn",
        "bits": 8,
        "group_size": 64,
        "symmetric": True,
    }
    raised = refused("nvfp4").raised
    assert raised is not None and (raised["method"], raised["bits"], raised["group_size"]) == ("rtn", 8, "channel")
    assert refused("w8a8").raised is None  # they can only stay as they are
    for method, more in (("awq", "awq"), ("gguf", "gguf"), ("gguf-k", "gguf"), ("mxfp4", "rtn"), ("w4afp8", "rtn")):
        raised = refused(method).raised
        assert raised is not None and (raised["method"], raised["bits"]) == (more, 8)
    for method in ("nvfp4", "w8a8", "awq", "gguf", "fp8-block"):
        require_repairable(refused(method))


def test_a_k_quants_recipe_has_the_type_of_each_layer_in_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    first, *others = SOURCE.linear
    types = {first: "Q6_K", **dict.fromkeys(others, "Q4_K")}
    headers = {f"{name}.weight": StoredTensor(kind, (256, 256), 1) for name, kind in types.items()}
    monkeypatch.setattr(repair_module, "read_headers", lambda folder: headers)
    manifest: Any = SimpleNamespace(method="gguf-k", settings=method_config("gguf-k", bits=4, mix="M").settings())
    recipe = repair_module._recipe_of(manifest, "", SOURCE)
    assert recipe.layers == {first: "gguf-k:6", **dict.fromkeys(others, "gguf-k:4")}
    assert [(one["bits"], one["mix"]) for _, one in sorted(recipe.formats.items())] == [(4, "pure"), (6, "pure")]


def test_a_recipe_keeps_what_is_not_raised() -> None:
    one = refused("rtn", bits=3)
    assert one.columns == ["as it was", "at 8 bits", "as in the baseline"]
    recipe = raised_recipe(one, LAYERS[:3], (0, 1, 2))
    names = list(SOURCE.linear)
    assert [recipe.layers[name] for name in names[:4]] == ["rtn", "rtn:8", "none", "rtn"]
    assert set(recipe.formats) == {"rtn", "rtn:8"} and recipe.formats["rtn:8"]["bits"] == 8
    # A mixture is raised as well, from what each of its layers has.
    again = raised_recipe(replace(one, recipe=recipe), LAYERS[:4], (0, 0, 0, 1))
    assert [again.layers[name] for name in names[:4]] == ["rtn", "rtn:8", "none", "rtn:8"]


def test_rounded_caches_are_raised_beside_the_layers() -> None:
    """Layer 0 has 2-bit keys and plain values, layer 1 has 8 bits already, and the others are as in the baseline."""
    cache = {"0": {"key_bits": 2, "value_bits": 16, "residual": 4}, "1": {"key_bits": 8, "value_bits": "fp8"}}
    layers = dict.fromkeys(SOURCE.linear, "rtn:4")
    recipe = MixedRecipe(formats={"rtn:4": {"method": "rtn", "bits": 4}}, layers=layers, cache=cache)
    one = refused("rtn", recipe)
    more = {"key_bits": 8, "value_bits": 16, "residual": 4}
    assert one.caches == {
        0: {"as it was": cache["0"], "at 8 bits": more, "as in the baseline": None},
        1: {"as it was": cache["1"], "as in the baseline": None},
    }
    require_repairable(one)
    assert raised_recipe(one, LAYERS[:1], (1, 0, 0)).cache == cache
    assert raised_recipe(one, LAYERS[:1], (0, 1, 2)).cache == {"0": more}
    # Where the policy bounds the cache, it stays; without weights in fewer bits only caches are raised.
    bounded = replace(one, bounds_cache=True)
    assert bounded.caches == {0: {"as it was": cache["0"]}, 1: {"as it was": cache["1"]}}
    assert raised_recipe(bounded, LAYERS[:1], (1, 0, 0)) == raised_recipe(one, LAYERS[:1], (1, 0, 0))
    alone = replace(one, recipe=MixedRecipe(formats={}, layers=dict.fromkeys(layers, "none"), cache=cache))
    assert alone.raised is None and alone.columns == ["as it was", "as in the baseline", "at 8 bits"]
    assert raised_recipe(alone, [], (2, 0)).cache == {"0": more, "1": cache["1"]}
    require_repairable(alone)


def test_the_recipe_of_kv_cache_rounds_every_layers_cache() -> None:
    settings = method_config("kv-cache", key_bits=2, residual=4).settings()
    recipe = repair_module._recipe_of(cast(Any, SimpleNamespace(method="kv-cache", settings=settings)), "", SOURCE)
    assert set(recipe.layers.values()) == {"none"} and list(recipe.layers) == list(SOURCE.linear)
    assert recipe.cache == {str(layer): settings for layer in range(SOURCE.layers)}
    require_repairable(refused("kv-cache", recipe))


CANNOT = "cannot be applied to some layers only.*gptq.*nvfp4.*rtn"


@pytest.mark.parametrize(
    ("method", "settings", "target", "why"),
    [
        ("magnitude", {}, "any", CANNOT),
        ("kv-cache-fp8", {}, "any", CANNOT),
        ("bnb-nf4", {}, "any", CANNOT),
        ("hqq", {}, "any", CANNOT),
        ("gptq", {"backend": "gptqmodel"}, "any", CANNOT),
        ("gguf", {"embeddings": True}, "any", "formats for linear layers only"),
        ("awq", {"bits": 4}, "vllm-cpu", "CPU.*not 8"),
        ("nvfp4", {}, "llama.cpp", "llama.cpp does not read"),
    ],
)
def test_what_cannot_be_mixed_is_refused(method: str, settings: dict[str, Any], target: str, why: str) -> None:
    one = refused(method, **settings)
    one.main.compression.target = target
    with pytest.raises(UnsupportedError, match=rf"a {method} cannot be repaired: .*{why}"):
        require_repairable(one)


def trial(name: str, role: Any, size: int, *failed: str) -> RepairTrial:
    return RepairTrial(
        name=name,
        role=role,
        raised={"refused": 0, "repaired": 2}.get(role, 5),
        bits_per_weight=3.0 + size / 1000,
        size_bytes=size,
        extra_bytes=size - 1000,
        kl=0.05,
        flips_pct=3.0,
        search_kl=0.05,
        predicted_kl=None,
        passed=not failed,
        reasons=failed or ("KL: 0.01 <= 0.05",),
        failed=failed,
        run_id=name,
    )


def repair(*trials: RepairTrial, **more: Any) -> Repair:
    common: dict[str, Any] = {"model": "demo", "repaired_run": "a", "policy": None, "policy_sha256": "0"}
    link = RunLink(run_id="r", store="s")
    values = {"passed": False, "reasons": ("KL: 0.09 > 0.05",), **more}
    return Repair(name="rtn-3bit", baseline="demo", run=link, trials=trials, **common, **values)


def test_a_repair_tells_its_price_and_ends_with_the_next_command() -> None:
    found = repair(
        trial("rtn-3bit", "refused", 1000, "KL: 0.09 > 0.05"),
        trial("smaller", "tried", 1100, "KL: 0.06 > 0.05"),
        trial("mixed", "repaired", 1250),
        trial("rtn-8bit", "tried", 2000),
        changed={"layers.0.qkv": "at 8 bits", "layers.1.o": "at 8 bits"},
        recipe="a folder/recipe.json",
    )
    assert found.exit_code == 0 and found.extra_bytes == 250
    assert found.summary == (
        "mixed passes: 2 groups of layers with more bits than in rtn-3bit, for 250 B more (25 %, 4.00 -> 4.25 bits per "
        "weight); 150 B less does not pass"
    )
    text = found.as_text()
    assert "Raised, at 8 bits: layers.0.qkv, layers.1.o" in text and "mlflow-compress promote --model demo" in text
    assert "mlflow-compress main --method mixed --method_args 'recipe=a folder/recipe.json'" in text
    assert found.to_dict()["extra_bytes"] == 250 and "mixed" in found.markdown()


def test_a_repair_tells_what_a_cache_costs() -> None:
    before = replace(trial("both", "refused", 1000, "KL: 0.09 > 0.05"), cache_bytes=400)
    after = replace(trial("mixed", "repaired", 1000), raised=0, raised_caches=1, cache_bytes=500, extra_bytes=100)
    largest = replace(trial("rtn-8bit", "tried", 2000), raised_caches=2, cache_bytes=800)
    found = repair(before, after, largest, cache_tokens=1024, changed={"layers.1.cache": "at 8 bits"})
    assert found.summary == (
        "mixed passes: the cache of 1 layer with more bits than in rtn-3bit, for 100 B more (7.14 %, 4.00 -> 4.00 bits "
        "per weight, cache 400 B -> 500 B)"
    )
    text = found.as_text()
    assert "Raised, at 8 bits: layers.1.cache\nCache: keys and values of 1,024 tokens, counted with the weights" in text
    assert "800 B" in text and "more" in text
    groups = replace(after, raised=2, raised_caches=3, size_bytes=1200, extra_bytes=300)
    assert "2 groups of layers and the caches of 3 layers with more bits" in repair(before, groups, largest).summary
    fails = replace(largest, passed=False, failed=("no",))
    assert repair(before, fails).summary.endswith("not even rtn-8bit passes, the largest mixture: no")
    assert repair(before).summary.endswith("nothing is larger: KL: 0.09 > 0.05")


def test_a_repair_that_finds_nothing_says_why_and_exits_with_3() -> None:
    before, all_at_8 = (
        trial("rtn-3bit", "refused", 1000, "speed: missing"),
        trial("rtn-8bit", "tried", 2000, "speed: no"),
    )
    found = repair(before, all_at_8)
    assert found.exit_code == 3 and found.extra_bytes is None
    assert found.summary == "rtn-3bit cannot be repaired: not even rtn-8bit passes, the largest mixture: speed: no"
    assert "promote" not in found.as_text()
    as_it_is = repair(passed=True)
    assert as_it_is.exit_code == 0 and as_it_is.summary == "rtn-3bit already passes the policy: nothing was made"


def test_what_a_repair_takes_from_its_run_and_what_is_no_repair_are_refused(tmp_path: Any) -> None:
    assert SearchConfig(repair="abcdef", search_rounds=3).given_for_repair() == {"repair": "abcdef", "search_rounds": 3}
    for name, value in (("formats", "rtn:3,rtn:8"), ("tasks", "demo"), ("bits_per_weight", "4"), ("engine", "vllm")):
        with pytest.raises(ConfigError, match=f"A repair takes '{name}' from the run that it repairs"):
            SearchConfig(repair="abcdef", **{name: value}).given_for_repair()
    (tmp_path / "policy.yaml").write_text("{}")
    with pytest.raises(ConfigError, match="A policy decides about a repair only"):
        search(bits_per_weight="4", policy=str(tmp_path / "policy.yaml"))
    with pytest.raises(ConfigError, match="not the id of a run"):
        search(repair="nothing")
