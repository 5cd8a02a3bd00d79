"""HQQ: what its solver minimises, how its weights are packed, and what is refused."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mlflow_compress.compression import compress_model, method_config
from mlflow_compress.compression.methods.hqq import Hqq, half_quadratic
from mlflow_compress.errors import UnsupportedError
from mlflow_compress.models.architectures.own_formats import pack, unpack
from tests.compress_models import make_llama

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("no_fresh_process")]


def heavy_tailed(rows: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    weight = 0.05 * torch.randn(rows, columns, generator=generator)
    return torch.where(torch.rand(rows, columns, generator=generator) < 0.01, 6 * weight, weight)


def means(levels: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    return ((levels.reshape(*scale.shape, -1) - zero[..., None]) * scale[..., None]).reshape(levels.shape)


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_the_solver_lowers_the_norm_that_it_minimises(bits: int) -> None:
    weight = heavy_tailed(64, 256)
    # At a norm this near to 0 outliers hardly count; one step from the start is plain rounding's second half.
    errors = [
        float((means(*half_quadratic(weight, bits, 64, iterations=steps)) - weight).abs().pow(0.7).mean())
        for steps in (1, 20)
    ]
    low, high = (extreme(-1, keepdim=True) for extreme in (weight.reshape(-1, 64).amin, weight.reshape(-1, 64).amax))
    step = (high - low) / (2**bits - 1)
    plain = (((weight.reshape(-1, 64) - low) / step).round() * step + low).reshape(weight.shape)
    assert errors[1] <= errors[0] and errors[1] < float((plain - weight).abs().pow(0.7).mean())


@pytest.mark.parametrize("bits", Hqq.supported_bits)
def test_packing_loses_nothing_but_the_float16_of_scales_and_zero_points(bits: int) -> None:
    levels, scale, zero = half_quadratic(heavy_tailed(8, 96), bits, 32)
    stored = pack(levels, scale, zero, bits)
    assert stored["weight_packed"].shape == (8, 96 * bits // 32)
    assert torch.equal(unpack(stored, bits, 96), means(levels, scale.half().float(), zero.half().float()))


def test_a_group_of_equal_weights_comes_back() -> None:
    weight = torch.full((2, 64), 0.375)
    assert torch.equal(means(*half_quadratic(weight, 4, 64)), weight)


@pytest.mark.parametrize("bits", Hqq.supported_bits)
def test_the_file_holds_the_bits_and_32_more_a_group(base: Path, bits: int, tmp_path: Path) -> None:
    config = method_config("hqq", bits=bits, group_size=32)
    manifest = compress_model(str(base), "hqq", config, [], tmp_path / "out")
    assert manifest.bits_per_weight == bits + 32 / 32 and manifest.sparsity is None
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
        assert file.get_tensor("model.norm.weight").dtype == torch.bfloat16
    assert "model.layers.0.mlp.up_proj.weight_zero" in names and "model.layers.0.mlp.up_proj.weight" not in names


def test_zero_points_beyond_float16_and_groups_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base", dtype=torch.float32)
    tensors = load_file(base / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] = 100.0 + 0.001 * tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedError, match="up_proj are so far from zero"):
        compress_model(str(base), "hqq", method_config("hqq", bits=8), [], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(UnsupportedError, match="Group size 48 does not divide"):
        compress_model(str(base), "hqq", method_config("hqq", group_size=48), [], tmp_path / "out")
