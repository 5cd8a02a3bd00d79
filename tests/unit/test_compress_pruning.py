"""Pruning against small recomputations of the published formulas, written independently of the library."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from mlflow_compress.compression import calibration_tokens, compress_model, method_config
from mlflow_compress.errors import ConfigError, UnsupportedError
from mlflow_compress.models.source_model import resolve
from tests.compress_models import TEXT, make_llama, make_neox

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("no_fresh_process")]

SETTINGS = {"calibration_samples": 4, "calibration_length": 64}


def calibration_ids(base: Path) -> torch.Tensor:
    prepared = calibration_tokens.prepare_calibration(
        resolve(str(base)).tokenizer(), TEXT, samples=4, length=64, seed=0
    )
    return torch.from_numpy(prepared.ids)


def inputs_of_layer(model: Any, layer: int, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what flows into each linear layer of one decoder layer, shape (tokens, in_features)."""
    seen: dict[str, torch.Tensor] = {}
    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name.startswith(f"model.layers.{layer}."):

            def keep(_: Any, args: tuple[torch.Tensor, ...], name: str = name) -> None:
                seen[name] = args[0].reshape(-1, args[0].shape[-1])

            hooks.append(module.register_forward_pre_hook(keep))
    with torch.no_grad():
        model(input_ids=ids)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("pattern", ["unstructured", "2:4"])
def test_wanda_prunes_the_smallest_products_of_weight_and_input_norm_in_each_row(
    base: Path, tmp_path: Path, pattern: str
) -> None:
    compress_model(
        str(base), "wanda", method_config("wanda", sparsity=0.5, pattern=pattern, **SETTINGS), TEXT, tmp_path / "out"
    )
    stored = load_file(tmp_path / "out" / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    ids = calibration_ids(base)
    for layer in range(2):  # the second layer sees what the pruned first one gives
        for name, x in inputs_of_layer(model, layer, ids).items():
            weight = model.get_submodule(name).weight.data
            score = weight.abs() * x.double().norm(dim=0)
            groups = score.view(score.shape[0], -1, 4 if pattern == "2:4" else score.shape[1])
            weight[groups.argsort(-1).argsort(-1).lt(groups.shape[-1] // 2).view(score.shape)] = 0
        for name in [n for n in stored if n.startswith(f"model.layers.{layer}.")]:
            assert torch.equal(model.get_parameter(name).data, stored[name].float()), name
    assert torch.equal(model.lm_head.weight.data, stored["lm_head.weight"].float())


def optimal_brain_surgeon(weight: torch.Tensor, x: torch.Tensor, *, damping: float, block: int) -> torch.Tensor:
    """Prune half of each block of columns by SparseGPT's equations, with a fresh matrix inverse at every column."""
    w, hessian = weight.double().clone(), 2 * x.double().T @ x.double()
    hessian += damping * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=torch.float64)
    rest = [torch.linalg.inv(hessian[j:, j:]) for j in range(len(hessian))]  # of the columns not yet decided
    cost = torch.stack([inverse[0, 0] for inverse in rest])
    for start in range(0, w.shape[1], block):
        columns = range(start, min(start + block, w.shape[1]))
        score = w[:, columns] ** 2 / cost[list(columns)]
        mask = score <= score.flatten().sort().values[score.numel() // 2]
        for j in columns:
            error = torch.where(mask[:, j - start], w[:, j], 0.0) / cost[j]
            w[:, j:] -= error[:, None] * rest[j][0][None]
            w[mask[:, j - start], j] = 0
    return w


def test_sparsegpt_follows_its_equations(base: Path, tmp_path: Path) -> None:
    config = method_config("sparsegpt", sparsity=0.5, block_size=32, damping=0.05, **SETTINGS)
    compress_model(str(base), "sparsegpt", config, TEXT, tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    for name, x in inputs_of_layer(model, 0, calibration_ids(base)).items():
        expected = optimal_brain_surgeon(model.get_submodule(name).weight.data, x, damping=0.05, block=32)
        found = stored[f"{name}.weight"].double()
        same = (found == 0) == (expected == 0)
        assert same.double().mean() > 0.999, name  # the score of a weight at the edge may round to the other side
        # What is kept is rounded to bfloat16, by a relative 2**-9 at most; where a mask differs, the row does after it.
        rows = same.all(dim=1)
        assert (found - expected)[rows].square().mean() <= 2.0**-18 * expected[rows].square().mean(), name


def test_a_layer_that_the_backend_passes_over_is_found(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_but_one = [name for name in resolve(str(base)).linear if name != "model.layers.1.mlp.up_proj"]
    options = {"sparsity": 0.5, "mask_structure": "0:0", "targets": all_but_one}
    monkeypatch.setattr("mlflow_compress.compression.methods.pruning.modifier_options", lambda job: options)
    with pytest.raises(UnsupportedError, match=r"layer model\.layers\.1\.mlp\.up_proj was not pruned"):
        compress_model(str(base), "wanda", method_config("wanda", **SETTINGS), TEXT, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_magnitude_prunes_the_smallest_of_each_layer(base: Path, tmp_path: Path) -> None:
    compress_model(str(base), "magnitude", method_config("magnitude", sparsity=0.3), [], tmp_path / "out")
    stored, before = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", base))
    for name, weight in before.items():
        kept = stored[name] != 0
        assert torch.equal(stored[name][kept], weight[kept])
        if "_proj" in name:
            assert int((~kept).sum()) == int(0.3 * weight.numel())
            assert weight[~kept].abs().max() <= weight[kept].abs().min()


@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sparsity": 1}, "'sparsity' is too large"),
        ({"sparsity": 0}, "'sparsity' is too small"),
        ({"sparsity": 0.6, "pattern": "2:4"}, r"2:4 has a fixed sparsity\. Allowed: 0\.5\. Got: 0\.6"),
        ({"pattern": "1:3"}, "Parameter 'pattern' has an unknown value. Allowed: unstructured, 2:4"),
    ],
)
def test_shares_and_patterns_that_do_not_exist_are_refused(method: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        method_config(method, **settings)


def test_a_pattern_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    model = make_llama(tmp_path / "llama", intermediate_size=126)
    with pytest.raises(UnsupportedError, match=r"2:4 does not fit the 126 input features of .*down_proj"):
        compress_model(str(model), "magnitude", method_config("magnitude", pattern="2:4"), [], tmp_path / "out")


def test_a_hessian_that_cannot_be_inverted_is_refused(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> torch.Tensor:
        raise torch._C._LinAlgError("not positive definite")

    monkeypatch.setattr(torch.linalg, "cholesky", fail)
    with pytest.raises(UnsupportedError, match=r"Hessian cannot be inverted.*Raise damping"):
        compress_model(str(base), "sparsegpt", method_config("sparsegpt", **SETTINGS), TEXT, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("make", [make_llama, make_neox])
def test_fp16_and_bf16_round_each_stored_weight_once(make: Callable[..., Path], tmp_path: Path) -> None:
    base = make(tmp_path / "base", dtype=torch.float32)
    for method, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        compress_model(str(base), method, None, [], tmp_path / method)
        before, after = (load_file(f / "model.safetensors") for f in (base, tmp_path / method))
        assert all(torch.equal(after[name], tensor.to(dtype)) for name, tensor in before.items())


def test_a_cast_that_changes_nothing_or_overflows_is_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="already stored in bfloat16"):
        compress_model(str(base), "bf16", None, [], tmp_path / "out")
    large = AutoModelForCausalLM.from_pretrained(base)
    large.model.layers[0].mlp.down_proj.weight.data[0, 0] = 70000.0
    large.save_pretrained(tmp_path / "large")
    resolve(str(base)).tokenizer().save_pretrained(tmp_path / "large")
    with pytest.raises(UnsupportedError, match=r"down_proj\.weight do not fit into float16.*65504"):
        compress_model(str(tmp_path / "large"), "fp16", None, [], tmp_path / "out")
