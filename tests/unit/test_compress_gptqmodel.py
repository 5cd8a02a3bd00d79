"""gptqmodel as the backend of `gptq` and `awq`, and the files of hubs that it reads. Needs the extra `gptqmodel`."""

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mlflow_compress import demo
from mlflow_compress.compression import METHODS, CheckpointManifest, compress_model, method_config, reload_check
from mlflow_compress.errors import ConfigError, MissingDependencyError, ReloadMismatchError, UnsupportedError
from mlflow_compress.models.loading import LoadConfig, load_model
from tests.compress_models import TEXT, check_here, logits, make_gemma2, make_llama, make_neox, mean_kl, token_rows

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("no_fresh_process")]
needs_extra = pytest.mark.skipif(importlib.util.find_spec("gptqmodel") is None, reason="needs the extra 'gptqmodel'")
SMALL = {"backend": "gptqmodel", "group_size": 32, "calibration_samples": 4, "calibration_length": 64}


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("awq", {"bits": 8}, r"8-bit AWQ is wrong.*Allowed: 4, 3\. Got: 8\. Use backend=llmcompressor"),
        ("awq", {"symmetric": "true"}, "no setting symmetric. Allowed: false. Got: True"),
        ("awq", {"grid": 10}, "no setting grid. Allowed: 20. Got: 10"),
        ("gptq", {"symmetric": "false"}, "asymmetric GPTQ did not pass our tests"),
        ("gptq", {"bits": 5}, "Allowed: 8, 4, 3, 2. Got: 5"),
        ("gptq", {"backend": "autogptq"}, "Allowed: llmcompressor, gptqmodel"),
        ("rtn", {}, "'rtn' has no parameter 'backend'"),
    ],
)
def test_settings_that_the_backend_lacks_are_refused(method: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        method_config(method, **{"backend": "gptqmodel", **settings})


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_missing_extra_is_named_before_any_work(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    config = method_config(method, backend="gptqmodel")
    with pytest.raises(
        MissingDependencyError, match=r"gptqmodel, optimum\. Run: pip install 'mlflow-compress\[gptqmodel\]'"
    ):
        compress_model(str(tmp_path / "no model is looked for"), method, config, TEXT, tmp_path / "out")


@pytest.mark.parametrize("quant_method", ["gptq", "awq"])
def test_a_hub_file_without_the_extra_names_it(
    quant_method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, theirs = make_llama(tmp_path / "base"), make_llama(tmp_path / "theirs")
    config = json.loads((theirs / "config.json").read_text())
    config["quantization_config"] = {"quant_method": quant_method, "bits": 4, "group_size": 32}
    (theirs / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(
        "mlflow_compress.models.architectures.packed_layers.GPTQMODEL_PACKAGES", ("a_package_that_nobody_wrote",)
    )
    with pytest.raises(
        MissingDependencyError, match=r"The GPTQ or AWQ checkpoint .* needs .*'mlflow-compress\[gptqmodel\]'"
    ):
        compress_model(
            str(base), "checkpoint", method_config("checkpoint", checkpoint=str(theirs)), [], tmp_path / "out"
        )
    with pytest.raises(MissingDependencyError, match="GPTQ or AWQ"):
        load_model(LoadConfig(path=str(theirs), device="cpu"))
    assert not (tmp_path / "out").exists()


def test_labels_and_formats_name_the_backend() -> None:
    for name, other in (("gptq", "gptq"), ("awq", "awq (gemm)")):
        method, config = METHODS.get(name), method_config(name, backend="gptqmodel")
        assert method.label(config) == f"{name}-4bit-g128-gptqmodel" and method.format_of(config) == other
        assert method.label(method.Config()) == f"{name}-4bit-g128"
        assert method.format_of(method.Config()) == method.format != other


def unpacked(layer: dict[str, torch.Tensor], kind: str, bits: int) -> torch.Tensor:
    """Return a layer's weight (out_features, in_features) from the published formats, field by field, for 4 bits.

    GPTQ packs neighbours of a column, zero points less one; AWQ neighbours of a row in the order 0 2 4 6 1 3 5 7.
    """
    shifts = torch.arange(0, 32, bits)

    def fields(packed: torch.Tensor) -> torch.Tensor:  # last dimension times 32 / bits
        return ((packed[..., None] >> shifts) & (2**bits - 1)).flatten(-2)

    scales = layer["scales"].float()
    if kind == "gptq":
        levels = fields(layer["qweight"].T).T
        zeros, groups = fields(layer["qzeros"]) + 1, layer["g_idx"].long()
    else:
        order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
        levels, zeros = (
            fields(layer[part]).unflatten(-1, (-1, 8))[..., order].flatten(-2) for part in ("qweight", "qzeros")
        )
        groups = torch.arange(len(levels)) // (len(levels) // len(scales))
    return (scales[groups] * (levels - zeros[groups])).T


@needs_extra
@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_what_is_evaluated_is_what_the_published_format_means(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = make_llama(tmp_path / "base", num_key_value_heads=4)
    out, taken = tmp_path / "out", tmp_path / "taken"
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    capsys.readouterr()
    manifest = compress_model(str(base), name, method_config(name, **SMALL), TEXT, out)
    assert capsys.readouterr() == ("", "") and not list(Path.cwd().iterdir())
    assert manifest.format == METHODS.get(name).other_format and manifest.reload["max_abs_diff"] == 0.0  # type: ignore[attr-defined]
    # 4 bits, a scale of 16 bits and a zero point of 4 for each 32 weights; GPTQ's files also name the group of each of a
    # layer's 512 input features in 32 bits, over 40,960 weights.
    assert manifest.bits_per_weight == pytest.approx(4 + 20 / 32 + (32 * 512 / 40_960 if name == "gptq" else 0))

    stored = load_file(out / "model.safetensors")
    model = load_model(LoadConfig(path=str(out), device="cpu")).model
    for layer in ("model.layers.0.self_attn.v_proj", "model.layers.1.mlp.down_proj"):
        parts = {key.removeprefix(f"{layer}."): tensor for key, tensor in stored.items() if key.startswith(f"{layer}.")}
        assert torch.equal(model.get_submodule(layer).weight, unpacked(parts, name, 4))

    ids = token_rows(base, TEXT[0], rows=4, length=64)
    with torch.inference_mode():
        scored = model(input_ids=ids).logits
    assert 0 < mean_kl(logits(base, ids), scored) < 0.1

    ours = compress_model(str(base), "checkpoint", method_config("checkpoint", checkpoint=str(out)), [], taken)
    assert ours.weight_files == manifest.weight_files and ours.bits_per_weight == manifest.bits_per_weight


@needs_extra
def test_a_wrong_scale_in_the_file_is_seen(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    compress_model(str(base), "gptq", method_config("gptq", **SMALL), TEXT, out)
    assert check_here(out).agrees
    path = out / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.down_proj.scales"][0] *= 1.05
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ReloadMismatchError):
        check_here(out)


@needs_extra
@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("gptq", {"group_size": 8}, "no kernel for this group size. Allowed: channel, 16, 32"),
        ("awq", {"group_size": 48}, "Group size 48 does not divide"),
        ("awq", {}, "cannot clip the 32 output features of model.layers.0.self_attn.k_proj. Allowed: multiples of 64"),
    ],
)
def test_what_has_no_kernel_is_refused_before_any_work(
    base: Path, method: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        config = method_config(method, **{**SMALL, **settings})
        compress_model(str(base), method, config, TEXT, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@needs_extra
def test_awq_of_an_architecture_that_it_gets_wrong_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"not proved right.*Allowed: llama.*'Gemma2ForCausalLM'.*llmcompressor"):
        compress_model(
            str(make_gemma2(tmp_path / "gemma")), "awq", method_config("awq", **SMALL), TEXT, tmp_path / "out"
        )
    assert not (tmp_path / "out").exists()


@needs_extra
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_another_architecture_works_or_is_refused_with_a_reason(name: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    try:
        compress_model(str(make_neox(tmp_path / "neox")), name, method_config(name, **SMALL), TEXT, out)
    except UnsupportedError as error:
        assert "GPTNeoXForCausalLM" in str(error) and not out.exists()
        return
    assert CheckpointManifest.read(out).method == name


@needs_extra
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings", "largest"),
    [
        ("gptq", [{"bits": 8}, {"bits": 4}, {"bits": 3}, {"bits": 2}], [1e-4, 0.015, 0.1, 1.0]),
        ("gptq", [{"bits": 4, "act_order": "false"}], [0.015]),
        ("gptq", [{"bits": 4, "group_size": "channel"}], [0.03]),
        ("awq", [{"bits": 4, "group_size": "channel"}], [0.03]),
        ("awq", [{"bits": 4}, {"bits": 3}], [0.015, 0.08]),
    ],
)
def test_distances_on_the_demo_follow_the_bits(
    name: str, settings: list[dict[str, Any]], largest: list[float], tmp_path: Path
) -> None:
    calibration = [(demo.DATA_DIR / "calibration.txt").read_text()]
    ids = token_rows(demo.MODEL_DIR, (demo.DATA_DIR / "corpus.txt").read_text(), rows=16, length=256)
    baseline, found = logits(demo.MODEL_DIR, ids), []
    for number, chosen in enumerate(settings):
        config = method_config(name, backend="gptqmodel", calibration_samples=32, **chosen)
        compress_model(str(demo.MODEL_DIR), name, config, calibration, tmp_path / str(number))
        model = reload_check.load_checkpoint(tmp_path / str(number), device="cpu", trust_remote_code=False)
        with torch.inference_mode():
            found.append(mean_kl(baseline, model(input_ids=ids).logits))
    assert found == sorted(found) and all(kl < most for kl, most in zip(found, largest, strict=True)), found


@needs_extra
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_the_same_settings_give_the_same_bytes(name: str, tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base", num_key_value_heads=4)
    for turn in ("first", "second"):
        compress_model(str(base), name, method_config(name, **SMALL), TEXT, tmp_path / turn)
    first, second = (CheckpointManifest.read(tmp_path / turn) for turn in ("first", "second"))
    assert first.weight_files == second.weight_files
    assert dataclasses.asdict(first)["calibration"] == dataclasses.asdict(second)["calibration"]
