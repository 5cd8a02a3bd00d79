"""8-bit weights and activations against recomputations of the published formulas, written independently."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from mlflow_compress import demo
from mlflow_compress.compression import calibration_tokens, compress_model, method_config, probe
from mlflow_compress.compression.methods import smoothquant
from mlflow_compress.compression.reload_check import load_checkpoint
from mlflow_compress.errors import ConfigError, UnsupportedError
from mlflow_compress.models.source_model import resolve
from tests.compress_models import TEXT, logits, make_gemma2, make_llama, make_neox, mean_kl, token_rows

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("no_fresh_process")]

SETTINGS = {"calibration_samples": 4, "calibration_length": 64}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_llama(tmp_path_factory.mktemp("base") / "llama")
    model = AutoModelForCausalLM.from_pretrained(folder)
    for layer in model.model.layers:  # a few loud channels, which a random model lacks
        layer.input_layernorm.weight.data[[3, 17, 40]] = 12.0
        layer.post_attention_layernorm.weight.data[[5, 33]] = 12.0
    model.save_pretrained(folder)
    return folder


def on_grid(x: torch.Tensor, stored: torch.dtype = torch.float32) -> torch.Tensor:
    """Round each row to 256 steps over twice its largest magnitude; the step itself is kept as `stored`."""
    step = (x.abs().amax(-1, keepdim=True) / 127.5).to(stored).float()
    return (x / step).round().clamp(-128, 127) * step


def on_float8_grid(x: torch.Tensor, stored: torch.dtype = torch.float32) -> torch.Tensor:
    """Round each row, scaled to a largest magnitude of 448, to three bits of mantissa (by hand, not by a cast)."""
    scale = (x.abs().amax(-1, keepdim=True) / 448).to(stored).float()
    scaled = (x / scale).clamp(-448, 448)
    exponent = torch.frexp(scaled).exponent.clamp(min=-5)  # below 2^-6 the spacing stays 2^-9
    return torch.ldexp(torch.ldexp(scaled, 4 - exponent).round(), exponent - 4) * scale


def quantized_by_hand(base: Path, rounding: Any, *, activations: bool) -> Any:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.weight.data = rounding(module.weight.data, torch.bfloat16)
            if activations:
                module.register_forward_pre_hook(lambda _, args: (rounding(args[0]),))
    return model


@pytest.mark.parametrize(("method", "rounding"), [("w8a8", on_grid), ("fp8", on_float8_grid)])
def test_weights_and_activations_both_lie_on_the_grid(base: Path, tmp_path: Path, method: str, rounding: Any) -> None:
    compress_model(str(base), method, None, [], tmp_path / "out")
    ids = token_rows(base, TEXT[0], rows=4, length=64)
    found, before = logits(tmp_path / "out", ids), logits(base, ids)
    with torch.inference_mode():
        by_hand = quantized_by_hand(base, rounding, activations=True)(input_ids=ids).logits
        weights_only = quantized_by_hand(base, rounding, activations=False)(input_ids=ids).logits
    distance = mean_kl(before, found)
    assert mean_kl(by_hand, found) < 0.02 * distance  # a value halfway between two steps may go either way
    assert mean_kl(weights_only, found) > 0.1 * distance


@pytest.mark.parametrize("method", ["w8a8", "fp8"])
def test_what_moves_a_sum_in_its_last_place_moves_rounded_activations_by_steps(method: str, tmp_path: Path) -> None:
    compress_model(str(demo.MODEL_DIR), method, None, [], tmp_path / "out")
    stored, before, rounded = probe.read_probe(tmp_path / "out")
    model = load_checkpoint(tmp_path / "out", device="cpu", trust_remote_code=False)
    embeddings = model.get_input_embeddings().weight.data
    embeddings *= 1 + 1e-7 * torch.randn(embeddings.shape, generator=torch.Generator().manual_seed(0))
    report = probe.compare_logits(before, stored.logits(model), rounded=rounded)
    assert report.kl_max > probe.MAX_KL  # beyond the tolerance of every other method
    assert rounded and report.agrees


def test_smoothquant_divides_the_norms_by_its_factor(base: Path, tmp_path: Path) -> None:
    config = method_config("smoothquant", alpha=0.5, **SETTINGS)
    compress_model(str(base), "smoothquant", config, TEXT, tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    ids = calibration_tokens.prepare_calibration(resolve(str(base)).tokenizer(), TEXT, samples=4, length=64, seed=0).ids
    seen = {}
    layer = model.model.layers[0]
    layer.mlp.register_forward_pre_hook(lambda _, args: seen.update(x=args[0].reshape(-1, 64)))
    with torch.no_grad():
        model(input_ids=torch.from_numpy(ids))
    loudest = seen["x"].abs().amax(0)
    largest = torch.stack([m.weight.data.abs().amax(0) for m in (layer.mlp.gate_proj, layer.mlp.up_proj)]).amax(0)
    factor = loudest**0.5 / largest**0.5
    found = stored["model.layers.0.post_attention_layernorm.weight"].float()
    torch.testing.assert_close(found, layer.post_attention_layernorm.weight.data / factor, rtol=2**-7, atol=0)


def test_smoothing_pays_where_channels_are_loud(base: Path, tmp_path: Path) -> None:
    ids = token_rows(base, TEXT[0], rows=4, length=64)
    before = logits(base, ids)
    for method, settings in (("w8a8", {}), ("smoothquant", SETTINGS)):
        compress_model(str(base), method, method_config(method, **settings), TEXT, tmp_path / method)
    assert mean_kl(before, logits(tmp_path / "smoothquant", ids)) < mean_kl(before, logits(tmp_path / "w8a8", ids))


def test_smoothing_leaves_the_function_of_gemma_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = make_gemma2(tmp_path / "gemma2")
    ids, config = token_rows(base, TEXT[0], rows=4, length=64), method_config("smoothquant", **SETTINGS)
    compress_model(str(base), "w8a8", None, [], tmp_path / "w8a8")
    compress_model(str(base), "smoothquant", config, TEXT, tmp_path / "smoothquant")
    plain, smooth = (mean_kl(logits(base, ids), logits(tmp_path / name, ids)) for name in ("w8a8", "smoothquant"))
    assert 0 < smooth < 2 * plain
    # llm-compressor's own mapping takes the norm behind the attention for the one before the feed-forward part.
    monkeypatch.setattr(smoothquant, "_MAPPINGS", {})
    with pytest.raises(UnsupportedError, match=r"scaling changes this model's function.*Gemma2ForCausalLM"):
        compress_model(str(base), "smoothquant", config, TEXT, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_smoothquant_cannot_do_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'alpha' is too large\. Allowed: 1(\.0)? or less\. Got: 1\.5"):
        method_config("smoothquant", alpha=1.5)
    with pytest.raises(UnsupportedError, match=r"which norm feeds which layers.*GPTNeoXForCausalLM.*Use w8a8"):
        config = method_config("smoothquant", **SETTINGS)
        compress_model(str(make_neox(tmp_path / "neox")), "smoothquant", config, TEXT, tmp_path / "out")
