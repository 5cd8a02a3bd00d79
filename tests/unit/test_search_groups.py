"""The groups that get one format: as engines fuse them, and together where scales were moved between neighbours."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlflow_compress.commands.search.measured_costs import SearchText, SwapCosts, format_groups, read_search_text
from mlflow_compress.commands.search.parameters import SearchConfig
from mlflow_compress.compression import compress_model, method_config
from mlflow_compress.models.source_model import resolve
from tests.compress_models import TEXT, make_llama

pytestmark = pytest.mark.filterwarnings("ignore")

SMALL = {"group_size": 32, "calibration_samples": 4, "calibration_length": 64}


def test_groups_are_what_engines_fuse(tmp_path: Path) -> None:
    base = make_llama(tmp_path / "llama")
    source = resolve(str(base))
    groups = format_groups(SearchConfig(model=str(base)), source, [], rescaled=False)
    assert [group.name for group in groups] == [
        f"layers.{layer}.{kind}" for layer in (0, 1) for kind in ("qkv", "o", "gate_up", "down")
    ]
    assert {name for group in groups for name in group.modules} == set(source.linear)


def test_layers_with_each_others_scales_are_one_group_whose_costs_can_be_measured(
    tmp_path: Path, no_fresh_process: None
) -> None:
    base = make_llama(tmp_path / "llama")
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
    groups = format_groups(config, source, folders, rescaled=True)
    linear = [name for group in groups for name in group.modules if name in source.linear]
    assert sorted(linear) == sorted(source.linear)  # each once
    norms = {name for group in groups for name in group.modules if name not in source.linear}
    assert "model.layers.0.input_layernorm" in norms
    [owner] = [group for group in groups if "model.layers.0.input_layernorm" in group.modules]
    assert {f"model.layers.0.self_attn.{part}_proj" for part in "qkv"} <= set(owner.modules)

    text: SearchText = read_search_text(config, source, used=0)
    costs = SwapCosts(config=config, text=text, resume=tmp_path / "resume", groups=groups)
    three, eight = costs.alone(folders[0]), costs.alone(folders[1])
    assert three.shape == eight.shape == (len(groups), 4)
    assert (eight.mean(axis=1) < three.mean(axis=1)).all()  # scales that were left behind would cost the same in both
    assert costs.whole(folders[1]).mean() < 0.1 * costs.whole(folders[0]).mean()
    # Every group of the same checkpoint replaced by its own: nothing changes.
    assert (costs.around(folders[0], folders[0]) == costs.whole(folders[0])).all()
