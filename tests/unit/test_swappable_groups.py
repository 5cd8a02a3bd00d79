"""Groups of weights: what engines fuse, what moved scales tie together, and what cannot be swapped.

The groups that get one format: as engines fuse them, and together where scales were moved between neighbours.
"""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mlflow_compress.commands.search import measured_costs
from mlflow_compress.commands.search.parameters import SearchConfig
from mlflow_compress.compression import compress_model, method_config
from mlflow_compress.compression.mixed_recipe import MixedRecipe
from mlflow_compress.errors import DataError, UnsupportedError
from mlflow_compress.models import weight_groups as groups_of_weights
from mlflow_compress.models.architectures.quantized_cache import QuantizedCache, Rounding
from mlflow_compress.models.source_model import resolve
from tests.compress_models import TEXT
from tests.unit.scoring_models import CONFIGS, build_model, load_random, rounding, rounding_of
from tests.unit.test_swaps import rounded, texts

LAYER = ("qkv", "o", "gate_up", "down")


def variant_of(model: Any, levels: int = 7) -> Any:
    """The model with rounded matrices in its layers."""
    made = copy.deepcopy(model)
    with torch.no_grad():
        for name, module in made.named_modules():
            if isinstance(module, torch.nn.Linear) and "layers" in name:
                step = module.weight.abs().amax(1, keepdim=True).clamp_min(1e-9) / levels
                module.weight.copy_((module.weight / step).round() * step)
    return made


def scales(n: int, seed: int) -> torch.Tensor:
    return torch.exp(0.5 * torch.randn(n, generator=torch.Generator().manual_seed(seed)))


def fold_norm(model: Any, norm: str, readers: list[str], seed: int = 5) -> None:
    """Divide a norm by scales, and multiply the columns of its readers: the same function."""
    with torch.no_grad():
        weight = model.get_submodule(norm).weight
        by = scales(len(weight), seed)
        weight.div_(by)
        for reader in readers:
            model.get_submodule(reader).weight.mul_(by)


def fold_pair(model: Any, first: str, second: str, copies: int = 1, seed: int = 6, size: float = 1.0) -> None:
    """Divide the rows of a layer, and multiply the columns that read them: the same function."""
    with torch.no_grad():
        rows = model.get_submodule(first).weight
        by = size * scales(len(rows), seed)
        rows.div_(by[:, None])
        heads = by.reshape(2, -1) if copies > 1 else by[None]
        model.get_submodule(second).weight.mul_(heads.repeat_interleave(copies, dim=0).reshape(-1))


IDS = torch.arange(12)[None]


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=IDS).logits[0]


def names(groups: list[groups_of_weights.WeightGroup]) -> list[str]:
    return [group.name for group in groups]


@pytest.mark.parametrize("name", CONFIGS)
def test_every_weight_is_in_one_group(name: str) -> None:
    model = build_model(CONFIGS[name]())
    groups = groups_of_weights.weight_groups(model)
    inside = [id(p) for g in groups for m in g.modules for p in model.get_submodule(m).parameters()]
    assert set(inside) == {id(p) for p in model.parameters()}
    assert len({m for g in groups for m in g.modules}) == sum(len(g.modules) for g in groups)
    in_layers = [g.name for g in groups if g.layer is not None and g.kind != "norm"]
    assert in_layers == [f"layers.{i}.{kind}" for i in range(3) for kind in LAYER]


def test_experts_of_a_layer_are_one_group() -> None:
    from transformers import MixtralConfig

    config = MixtralConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    groups = groups_of_weights.weight_groups(build_model(config))
    assert [g.name for g in groups if g.kind == "experts"] == ["layers.0.experts", "layers.1.experts"]
    assert all(len(g.modules) == 1 for g in groups if g.kind == "experts")


def test_what_is_only_rounded_or_pruned_stays_in_the_finest_groups() -> None:
    model = build_model(CONFIGS["llama"]())
    for levels in (1, 2, 7, 127):  # 1 is ternary
        found = groups_of_weights.find_differences(model, variant_of(model, levels))
        assert names(found.groups) == [f"layers.{i}.{kind}" for i in range(3) for kind in LAYER]
        assert names(found.unchanged) == ["embeddings", "head"] and not found.moved_scales
    pruned = copy.deepcopy(model)
    with torch.no_grad():
        for name, module in pruned.named_modules():
            if isinstance(module, torch.nn.Linear) and "layers" in name:
                module.weight[module.weight.abs() < module.weight.abs().median()] = 0
    assert names(groups_of_weights.find_differences(model, pruned).groups) == [
        f"layers.{i}.{kind}" for i in range(3) for kind in LAYER
    ]


def test_a_norm_goes_with_the_layers_that_read_it() -> None:
    model = build_model(CONFIGS["llama"]())
    folded = copy.deepcopy(model)
    layer = "model.layers.1"
    fold_norm(folded, f"{layer}.input_layernorm", [f"{layer}.self_attn.{x}_proj" for x in "qkv"])
    fold_norm(folded, f"{layer}.post_attention_layernorm", [f"{layer}.mlp.{x}_proj" for x in ("gate", "up")])
    # Folded weights are rounded once more: an error as large as those of the forward pass, of one model and the other.
    assert (logits(model) - logits(folded)).abs().max() <= 2 * (rounding_of(model, IDS) + rounding_of(folded, IDS))
    made = variant_of(folded, 127)
    found = groups_of_weights.find_differences(model, made)
    assert names(found.groups) == [f"layers.{i}.{kind}" for i in range(3) for kind in LAYER]
    assert f"{layer}.input_layernorm" in next(g for g in found.groups if g.name == "layers.1.qkv").modules
    assert f"{layer}.post_attention_layernorm" in next(g for g in found.groups if g.name == "layers.1.gate_up").modules
    # Moved back, the weight is a rounded version of the baseline's.
    path = f"{layer}.self_attn.q_proj"
    old, raw = (m.get_submodule(path).weight for m in (model, made))
    restored = groups_of_weights.restored_weight(made, path, found)
    assert (restored - old).norm() < 0.05 * old.norm() and (raw - old).norm() > 0.2 * old.norm()


@pytest.mark.parametrize("size", [1.0, 200.0, 0.005])  # AWQ makes v of the demo a hundred times smaller
@pytest.mark.parametrize(
    ("first", "second", "name", "copies"),
    [
        ("self_attn.v_proj", "self_attn.o_proj", "layers.1.qkv+o", 2),  # two heads of q read one of v
        ("mlp.up_proj", "mlp.down_proj", "layers.1.gate_up+down", 1),
    ],
)
def test_a_pair_with_moved_scales_is_one_group(first: str, second: str, name: str, copies: int, size: float) -> None:
    model = build_model(CONFIGS["llama"]())
    folded = copy.deepcopy(model)
    with torch.no_grad():
        model.get_submodule(f"model.layers.1.{first}").weight[3] = 0  # no scale can be seen in it
        folded.get_submodule(f"model.layers.1.{first}").weight[3] = 0
    fold_pair(folded, f"model.layers.1.{first}", f"model.layers.1.{second}", copies, size=size)
    # Folded weights are rounded once more: an error as large as those of the forward pass, of one model and the other.
    assert (logits(model) - logits(folded)).abs().max() <= 2 * (rounding_of(model, IDS) + rounding_of(folded, IDS))
    made = variant_of(folded, 127)
    found = groups_of_weights.find_differences(model, made)
    assert name in names(found.groups) and len(found.groups) == 11
    assert sum("+" in group for group in names(found.groups)) == 1
    for path in (f"model.layers.1.{first}", f"model.layers.1.{second}"):
        old, raw = (m.get_submodule(path).weight for m in (model, made))
        restored = groups_of_weights.restored_weight(made, path, found)
        assert (restored - old).norm() < 0.05 * old.norm() and (raw - old).norm() > 0.2 * old.norm()


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "gemma2"])
def test_norms_of_other_architectures_find_their_readers(name: str) -> None:
    model = build_model(CONFIGS[name]())
    cast = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in cast.parameters():
            parameter.copy_(parameter.bfloat16().float())
    found = groups_of_weights.find_differences(model, cast)
    assert not found.unchanged
    inside = {m for g in found.groups for m in g.modules}
    assert len(inside) == sum(len(g.modules) for g in found.groups)
    assert {f"layers.{i}.{kind}" for i in range(3) for kind in LAYER} <= set(names(found.groups))
    read = [g for g in found.groups if g.kind == "qkv"]
    assert all(any("norm" in m or "ln_1" in m for m in g.modules) for g in read)


def test_what_cannot_be_swapped_is_refused() -> None:
    model = build_model(CONFIGS["llama"]())
    with pytest.raises(DataError, match="nothing to diagnose"):
        groups_of_weights.find_differences(model, copy.deepcopy(model))
    shorter = CONFIGS["llama"]()
    shorter.num_hidden_layers = 2
    with pytest.raises(UnsupportedError, match="another architecture"):
        groups_of_weights.find_differences(model, build_model(shorter))
    with pytest.raises(UnsupportedError, match="another architecture"):
        groups_of_weights.find_differences(model, build_model(CONFIGS["qwen2"]()))
    with pytest.raises(UnsupportedError, match="cannot be compared with the baseline's matrix"):
        groups_of_weights.find_differences(model, build_model(CONFIGS["llama"](), seed=9))
    other = variant_of(model)
    other.config._attn_implementation = "eager"
    with pytest.raises(UnsupportedError, match="computes attention differently"):
        groups_of_weights.find_differences(model, other)


def test_each_group_alone_is_a_model_of_the_same_function() -> None:
    """With scales moved everywhere and no rounding at all, no group moves the model."""
    from mlflow_compress.scoring.swap_meter import Swap, SwapMeter

    base = load_random("llama")
    folded = copy.deepcopy(base.model)
    for i in range(3):
        layer = f"model.layers.{i}"
        fold_norm(folded, f"{layer}.input_layernorm", [f"{layer}.self_attn.{x}_proj" for x in "qkv"], i)
        fold_norm(folded, f"{layer}.post_attention_layernorm", [f"{layer}.mlp.{x}_proj" for x in ("gate", "up")], i)
        fold_pair(folded, f"{layer}.mlp.up_proj", f"{layer}.mlp.down_proj", 1, i)
        fold_pair(folded, f"{layer}.self_attn.v_proj", f"{layer}.self_attn.o_proj", 2, i)
    found = groups_of_weights.find_differences(base.model, folded)
    assert names(found.groups) == [f"layers.{i}.{kind}" for i in range(3) for kind in ("qkv+o", "gate_up+down")]
    swaps = [Swap.of(group, folded) for group in found.groups]
    moved = SwapMeter(base, progress=False).measure("t", texts(), swaps)
    # Folding rounds each weight once more, and both sides are rounded; a KL is at most half of the square of the
    # largest change of ln p.
    assert moved.column("kl").max() <= (4 * rounding(base)) ** 2 / 2
    alone = Swap("v", {"model.layers.1.self_attn.v_proj": folded.get_submodule("model.layers.1.self_attn.v_proj")})
    wrong = SwapMeter(base, progress=False).measure("t", texts(), [alone]).where(swap="v")
    assert wrong.column("kl").mean() > 1e-3
    rounded_too = rounded(base)
    assert np.isfinite(
        SwapMeter(base, progress=False).measure("t", texts(), [], variant=rounded_too).column("kl")
    ).all()
    assert isinstance(found, groups_of_weights.Differences)


SMALL = {"group_size": 32, "calibration_samples": 4, "calibration_length": 64}


@pytest.mark.filterwarnings("ignore")
def test_groups_are_what_engines_fuse_and_scales_of_others_join_them_at_measured_costs(
    base: Path, tmp_path: Path, no_fresh_process: None
) -> None:
    source = resolve(str(base))
    folders = []
    for bits in (3, 8):
        out = tmp_path / f"awq-{bits}"
        compress_model(str(base), "awq", method_config("awq", bits=bits, **SMALL), TEXT, out)
        folders.append(str(out))
    (tmp_path / "text.txt").write_text(TEXT[0])
    config = SearchConfig(
        model=str(base), device="cpu", search_text=str(tmp_path / "text.txt"), search_windows=4, calibration_length=64
    )
    groups = measured_costs.format_groups(config, source, folders, rescaled=True)
    linear = [name for group in groups for name in group.modules if name in source.linear]
    assert sorted(linear) == sorted(source.linear)  # each once
    norms = {name for group in groups for name in group.modules if name not in source.linear}
    assert "model.layers.0.input_layernorm" in norms
    [owner] = [group for group in groups if "model.layers.0.input_layernorm" in group.modules]
    assert {f"model.layers.0.self_attn.{part}_proj" for part in "qkv"} <= set(owner.modules)

    text: measured_costs.SearchText = measured_costs.read_search_text(config, source, used=0)
    costs = measured_costs.SwapCosts(config=config, text=text, resume=tmp_path / "resume", groups=groups)
    three, eight = costs.alone(folders[0]), costs.alone(folders[1])
    assert three.shape == eight.shape == (len(groups), 4)
    assert (eight.mean(axis=1) < three.mean(axis=1)).all()  # scales that were left behind would cost the same in both
    assert costs.whole(folders[1]).mean() < 0.1 * costs.whole(folders[0]).mean()
    source = resolve(str(base))
    groups = measured_costs.format_groups(SearchConfig(model=str(base)), source, [], rescaled=False)
    assert [group.name for group in groups] == [
        f"layers.{layer}.{kind}" for layer in (0, 1) for kind in ("qkv", "o", "gate_up", "down")
    ]
    assert {name for group in groups for name in group.modules} == set(source.linear)


@pytest.mark.filterwarnings("ignore")
def test_costs_of_caches_are_those_of_the_checkpoints_that_round_them(
    base: Path, tmp_path: Path, no_fresh_process: None
) -> None:
    source = resolve(str(base))
    (tmp_path / "text.txt").write_text(TEXT[0])
    config = SearchConfig(
        model=str(base), device="cpu", search_text=str(tmp_path / "text.txt"), search_windows=4, calibration_length=64
    )

    def recipe(name: str, weights: str, cache: dict[str, dict[str, int]]) -> str:
        formats = {"rtn:3": {"method": "rtn", "bits": 3, "group_size": 32}} if weights != "none" else {}
        path = tmp_path / f"{name}.json"
        MixedRecipe(formats=formats, layers=dict.fromkeys(source.linear, weights), cache=cache).write(path)
        settings = method_config("mixed", recipe=str(path), calibration_samples=4, calibration_length=64)
        compress_model(str(base), "mixed", settings, TEXT, tmp_path / name)
        return str(tmp_path / name)

    second = {"1": {"key_bits": 2, "value_bits": 2}}
    cache = recipe("c", "none", second)
    groups = measured_costs.format_groups(config, source, [], rescaled=False)
    text, layers = measured_costs.read_search_text(config, source, used=0), measured_costs.cache_groups(source)
    assert [(group.name, group.modules) for group in layers] == [
        (f"layers.{layer}.cache", (f"model.layers.{layer}.self_attn",)) for layer in (0, 1)
    ]
    costs = measured_costs.SwapCosts(config=config, text=text, resume=tmp_path / "resume", groups=groups, caches=layers)
    two_bits = QuantizedCache(Rounding(2, "token", 16), Rounding(2, "token", 16))
    alone = costs.alone(two_bits)
    assert (alone[1] == costs.whole(cache)).all() and (alone > 0).all()
    assert (costs.alone(two_bits, [1]) == alone[1:]).all()
