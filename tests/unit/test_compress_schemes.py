"""FP4, MX and other formats of compressed-tensors: every code, what is stored, and that activations are rounded."""

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.quant_scheme import MXFP4, NVFP4
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from mlflow_compress.compression import METHODS, compress_model, method_config
from mlflow_compress.compression.schemes import SCHEMES
from mlflow_compress.errors import ConfigError, UnsupportedError
from mlflow_compress.models.loading import LoadConfig, load_model
from mlflow_compress.models.placement import Offload
from tests.compress_models import TEXT, make_llama, mean_kl, token_rows
from tests.unit.scoring_models import kl_of_rounding

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("no_fresh_process")]

FEW = {"calibration_samples": 4, "calibration_length": 64}
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose rows are long enough for the largest groups, with a few loud channels."""
    folder = make_llama(tmp_path_factory.mktemp("base") / "llama", hidden_size=128, intermediate_size=256)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("layernorm.weight"):
            tensor[[3, 17, 40]] = 12.0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def made(base: Path, out: Path, method: str, **settings: Any) -> Any:
    few = FEW if METHODS.get(method).needs_calibration else {}
    return compress_model(str(base), method, method_config(method, **few, **settings), TEXT, out)


def logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    model = load_model(LoadConfig(path=str(folder), device="cpu")).model
    with torch.inference_mode():
        computed: torch.Tensor = model(input_ids=ids).logits.float()
    return computed


@pytest.mark.parametrize("name", SCHEMES)
def test_activations_are_rounded_where_the_format_has_them(base: Path, tmp_path: Path, name: str) -> None:
    both, weights = made(base, tmp_path / "both", name), made(base, tmp_path / "weights", name, activations=False)
    ids = token_rows(base, TEXT[0], rows=2, length=64)
    before, of_both, of_weights = (logits(folder, ids) for folder in (base, tmp_path / "both", tmp_path / "weights"))
    assert both.label == name and weights.label == f"{name}-weights"
    assert mean_kl(before, of_both) > 0 and mean_kl(before, of_weights) > 0
    # The weights are the same in both; 8-bit activations add little to 4-bit weights.
    assert mean_kl(of_weights, of_both) > 0.01 * mean_kl(before, of_weights)
    assert both.reload["rounded"] and not weights.reload["rounded"]
    for manifest in (both, weights):
        # Beside values and scales lies one float32 or shape for each layer.
        assert manifest.bits_per_weight == pytest.approx(SCHEMES[name].stored_bits, abs=0.03)
    model = load_model(LoadConfig(path=str(tmp_path / "both"), device="cpu")).model
    seen: list[torch.Tensor] = []
    layer = model.model.layers[0].mlp.down_proj
    rounded = type(layer).forward  # what the quantized forward calls with what it has rounded
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(type(layer), "forward", lambda self, x: (seen.append(x), rounded(self, x))[1])
        x = torch.randn(1, 8, 256, generator=torch.Generator().manual_seed(0))
        layer(x)
    assert not torch.equal(seen[0], x) and torch.allclose(seen[0], x, atol=1)


@pytest.mark.parametrize(("method", "layer"), [("nvfp4", "q_proj"), ("mxfp4", "gate_proj")])
def test_every_code_at_every_scale_is_the_librarys(tmp_path: Path, method: str, layer: str) -> None:
    """256 groups: one for every byte that a scale can be (E4M3, or E8M0), with all 16 codes of E2M1 in each."""
    base, out = make_llama(tmp_path / "base"), tmp_path / "out"
    made(base, out, method)
    tensors = load_file(out / "model.safetensors")
    name = next(
        n.removesuffix(".weight_packed")
        for n in tensors
        if n.endswith(f"layers.0.{'self_attn' if layer == 'q_proj' else 'mlp'}.{layer}.weight_packed")
    )
    packed, scales = tensors[f"{name}.weight_packed"], tensors[f"{name}.weight_scale"]
    codes = torch.arange(16).repeat(packed.numel() // 8)
    pairs = codes.reshape(-1, 2)
    tensors[f"{name}.weight_packed"] = (pairs[:, 0] | pairs[:, 1] << 4).to(torch.uint8).reshape(packed.shape)
    last = 255 if method == "nvfp4" else 254  # E8M0's 255 is no number
    every = torch.arange(256).clamp(max=last).to(torch.uint8).reshape(scales.shape)
    tensors[f"{name}.weight_scale"] = every.view(scales.dtype)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    found = load_model(LoadConfig(path=str(out), device="cpu")).model.get_submodule(name).weight.data

    values = E2M1[codes].reshape(found.shape)
    if method == "nvfp4":
        global_scale = tensors[f"{name}.weight_global_scale"]
        scale = every.view(torch.float8_e4m3fn).float()
        library = dequantize(values, scale, args=NVFP4["weights"], global_scale=global_scale, dtype=torch.float32)
        by_hand = values.reshape(*scale.shape, 16) * (scale / global_scale)[..., None]
        assert global_scale.dtype == torch.float32
    else:
        scale = 2.0 ** (every.double() - 127)
        library = dequantize(values, scale.float(), args=MXFP4["weights"], dtype=torch.float32)
        by_hand = (values.double().reshape(*scale.shape, 32) * scale[..., None]).float()
    for expected in (library, by_hand.reshape(found.shape)):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "auto"])
def test_packed_floats_run_in_the_dtype_that_is_asked_for(base: Path, tmp_path: Path, dtype: str) -> None:
    made(base, tmp_path / "out", "nvfp4", activations=False)
    path = str(tmp_path / "out")
    exact, rounded = (load_model(LoadConfig(path=path, device="cpu", dtype=name)).model for name in ("float32", dtype))
    layers = [name for name, _ in exact.named_parameters() if name.endswith("proj.weight")]
    for name in layers:
        assert torch.equal(rounded.get_parameter(name), exact.get_parameter(name).to(torch.bfloat16))
    with torch.inference_mode():
        assert len(layers) == 14 and rounded(input_ids=torch.arange(8)[None]).logits.isfinite().all()


@pytest.mark.parametrize(
    ("method", "scheme"), [("gptq", "nvfp4"), ("gptq", "mxfp4"), ("awq", "nvfp4"), ("awq", "w4a8")]
)
def test_gptq_and_awq_write_these_formats_too(base: Path, tmp_path: Path, method: str, scheme: str) -> None:
    manifest = made(base, tmp_path / "out", method, scheme=scheme)
    nearest = made(base, tmp_path / "nearest", scheme)
    assert manifest.label == f"{method}-{scheme}" and manifest.format == nearest.format
    assert manifest.size_bytes == nearest.size_bytes
    assert manifest.settings["group_size"] == SCHEMES[scheme].group_size and manifest.settings["symmetric"]
    ids = token_rows(base, TEXT[0], rows=4, length=64)
    before = logits(base, ids)
    assert 0 < mean_kl(before, logits(tmp_path / "out", ids)) < 1.5 * mean_kl(before, logits(tmp_path / "nearest", ids))


def test_what_a_scheme_decides_is_not_asked_for_otherwise_and_its_groups_must_divide_a_row(tmp_path: Path) -> None:
    assert METHODS.get("gptq").stored_bits(method_config("gptq", scheme="nvfp4", bits="4")) == 4.5
    with pytest.raises(ConfigError, match=r"scheme nvfp4 fixes bits\. Allowed: 4\. Got: 8"):
        method_config("gptq", scheme="nvfp4", bits=8)
    with pytest.raises(ConfigError, match=r"scheme mxfp4 fixes group_size\. Allowed: 32\. Got: 128"):
        method_config("awq", scheme="mxfp4", group_size=128)
    with pytest.raises(UnsupportedError, match=r"integers only.*backend=llmcompressor"):
        method_config("gptq", scheme="nvfp4", backend="gptqmodel")
    base = make_llama(tmp_path / "base")  # rows of 64
    with pytest.raises(
        UnsupportedError,
        match=r"groups of 128 inputs, and model\.layers\.0\.self_attn\.q_proj has 64.*LlamaFor.*Use rtn",
    ):
        made(base, tmp_path / "out", "fp8-block")


@pytest.mark.ci
@pytest.mark.parametrize("method", ["nvfp4", "mxfp8"])
def test_a_format_is_the_same_from_the_disk(base: Path, tmp_path: Path, method: str) -> None:
    in_memory = made(base, tmp_path / "memory", method)
    settings = method_config(method, **(FEW if method == "nvfp4" else {}))
    little = Offload(max_memory={"cpu": "100KiB"}, folder=None)
    from_disk = compress_model(str(base), method, settings, TEXT, tmp_path / "disk", device="balanced", offload=little)
    assert from_disk.size_bytes == in_memory.size_bytes
    ids = token_rows(base, TEXT[0], rows=2, length=64)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    assert mean_kl(logits(tmp_path / "memory", ids), logits(tmp_path / "disk", ids)) <= kl_of_rounding(model, ids)
