"""compressed-tensors checkpoints whose label and tensors disagree: loaded by their tensors, or refused.

The checkpoints are written here, with the library's own arithmetic of one layer. A model is right when it has the logits
of a plain one whose weights are rounded to the same values.
"""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from mlflow_compress.errors import CheckpointError
from mlflow_compress.models import architectures
from mlflow_compress.models.loading import LoadConfig, load_model
from tests.unit.scoring_models import VOCAB, build_model, build_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:compressed_tensors")

IDS = torch.arange(2, 40)[None]
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
NVFP4 = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": 16,
    "symmetric": True,
    "scale_dtype": "torch.float8_e4m3fn",
    "zp_dtype": "torch.float8_e4m3fn",
}
MXFP4 = {
    "num_bits": 4,
    "type": "float",
    "strategy": "group",
    "group_size": 32,
    "symmetric": True,
    "scale_dtype": "torch.uint8",
    "zp_dtype": "torch.uint8",
}
EVERY, ATTENTION, FEED_FORWARD = ["Linear"], [r"re:.*self_attn.*"], [r"re:.*mlp.*"]
FORMATS: dict[str, list[tuple[str, dict[str, Any], list[str]]]] = {
    "int-quantized": [("int-quantized", INT8, EVERY)],
    "int-quantized, zero points": [("int-quantized", {**INT8, "symmetric": False}, EVERY)],
    "naive-quantized": [("naive-quantized", {**INT8, "strategy": "tensor"}, EVERY)],
    "float-quantized": [("float-quantized", FP8, EVERY)],
    "pack-quantized": [("pack-quantized", INT4, EVERY)],
    "pack-quantized, zero points": [("pack-quantized", {**INT4, "symmetric": False}, EVERY)],
    "nvfp4-pack-quantized": [("nvfp4-pack-quantized", NVFP4, EVERY)],
    "mxfp4-pack-quantized": [("mxfp4-pack-quantized", MXFP4, EVERY)],
    "mixed-precision": [("float-quantized", FP8, ATTENTION), ("pack-quantized", INT4, FEED_FORWARD)],
}
STATUSES = [None, "initialized", "calibration", "frozen", "compressed", "decompressed"]


def qparams(weight: torch.Tensor, args: QuantizationArgs) -> dict[str, torch.Tensor]:
    """Scale and zero point of a weight by its smallest and largest values."""
    if args.strategy == "tensor":
        low, high = weight.amin().reshape(1), weight.amax().reshape(1)
    else:
        groups = weight.unflatten(1, (-1, args.group_size or weight.shape[1]))
        low, high = groups.amin(-1), groups.amax(-1)
    found = {}
    if args.strategy == "tensor_group":
        found["weight_global_scale"] = generate_gparam(weight.amin(), weight.amax())
    scale, zero_point = calculate_qparams(low, high, args, global_scale=found.get("weight_global_scale"))
    return {**found, "weight_scale": scale, "weight_zero_point": zero_point}


def write(
    folder: Path,
    groups: list[tuple[str, dict[str, Any], list[str]]],
    status: str | None,
    *,
    dense: Callable[[str], bool] = lambda name: False,
    rounded: bool = False,
    zero_points: bool = False,
) -> torch.Tensor:
    """Write a checkpoint, and return the logits that it stands for.

    Layers that are `dense` are stored as floats with their scales, and `rounded` if they lie on their grid already.
    With `zero_points`, quantized ones have zero points also where all are 0 by their scheme.
    """
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=160,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = build_model(config)
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    plain = copy.deepcopy(model)
    for name, layer in plain.named_modules():
        if not isinstance(layer, torch.nn.Linear) or name == "lm_head":
            continue
        kind, args = next((g[0], g[1]) for g in groups if g[2] == EVERY or g[2][0].strip("re:.*") in name)
        scheme = QuantizationScheme(targets=EVERY, weights=QuantizationArgs(**args), format=kind)
        weight = layer.weight.data
        own = qparams(weight, scheme.weights)
        grid = fake_quantize(
            weight, own["weight_scale"], own["weight_zero_point"], scheme.weights, own.get("weight_global_scale")
        )
        layer.weight.data = grid
        if dense(name):
            own["weight"] = grid if rounded else weight
        else:
            packed = BaseCompressor.get_value_from_registry(kind).compress({**own, "weight": weight}, scheme)
            own = {**(own if zero_points else {}), **packed}
        tensors.pop(f"{name}.weight")
        tensors |= {f"{name}.{key}": tensor.contiguous() for key, tensor in own.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings = {
        "quant_method": "compressed-tensors",
        "format": groups[0][0] if len(groups) == 1 else "mixed-precision",
        "ignore": ["lm_head"],
        "config_groups": {
            f"group_{n}": {"targets": targets, "weights": args, "format": kind}
            for n, (kind, args, targets) in enumerate(groups)
        },
        **({"quantization_status": status} if status else {}),
    }
    relabel(folder, lambda _: settings)
    with torch.no_grad():
        return torch.as_tensor(plain(IDS).logits)


def relabel(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = change(config.get("quantization_config", {}))
    (folder / "config.json").write_text(json.dumps(config))


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return torch.as_tensor(load_model(LoadConfig(path=str(folder), device="cpu")).model(IDS).logits)


def assert_same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Float32 rounds logits of this size in their sixth digit; a wrong label moves them by their own size."""
    assert float((found - wanted).abs().max()) < 1e-3 * float(wanted.abs().max())


@pytest.mark.parametrize(
    ("name", "status"),
    [*((name, "compressed") for name in FORMATS), *(("mixed-precision", status) for status in STATUSES)],
)
def test_quantized_tensors_are_read_as_such_whatever_the_label(name: str, status: str | None, tmp_path: Path) -> None:
    wanted = write(tmp_path, FORMATS[name], status)
    assert_same(logits(tmp_path), wanted)


@pytest.mark.parametrize(
    ("name", "status"),
    [
        *((name, "frozen") for name in ("int-quantized", "pack-quantized, zero points", "float-quantized")),
        *(("mixed-precision", status) for status in STATUSES),
    ],
)
def test_floats_with_scales_are_rounded_whatever_the_label(name: str, status: str | None, tmp_path: Path) -> None:
    """With the label "decompressed", they have to be rounded already."""
    wanted = write(tmp_path, FORMATS[name], status, dense=lambda _: True, rounded=status == "decompressed")
    assert_same(logits(tmp_path), wanted)


@pytest.mark.parametrize("name", ["int-quantized", "naive-quantized"])
@pytest.mark.parametrize("status", STATUSES)
def test_zero_points_of_0_change_nothing(name: str, status: str | None, tmp_path: Path) -> None:
    wanted = write(tmp_path, FORMATS[name], status, zero_points=True)
    assert_same(logits(tmp_path), wanted)


def test_floats_need_their_zero_points(tmp_path: Path) -> None:
    write(tmp_path, FORMATS["int-quantized"], "frozen", dense=lambda _: True)
    tensors = load_file(tmp_path / "model.safetensors")
    left = {name: tensor for name, tensor in tensors.items() if not name.endswith("weight_zero_point")}
    save_file(left, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"has no values for 14 parameters.*weight_zero_point"):
        logits(tmp_path)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("name", ["mixed-precision", "nvfp4-pack-quantized"])
def test_half_precision_is_no_disagreement(name: str, dtype: str, dense: bool, tmp_path: Path) -> None:
    """It rounds one in a hundred of the floats to another level of 4 bits, which moves the weights by 3 %."""
    write(tmp_path, FORMATS[name], "frozen", dense=lambda _: dense)
    load_model(LoadConfig(path=str(tmp_path), device="cpu", dtype=dtype))


def test_floats_that_are_said_to_be_rounded_and_are_not_are_refused(tmp_path: Path) -> None:
    write(tmp_path, FORMATS["pack-quantized"], "decompressed", dense=lambda _: True)
    with pytest.raises(CheckpointError, match=r"quantization_status 'decompressed', and weight \(torch.float32\)"):
        logits(tmp_path)


def test_a_checkpoint_with_both_layouts_is_refused(tmp_path: Path) -> None:
    write(tmp_path, FORMATS["float-quantized"], "frozen", dense=lambda name: "layers.1.mlp.up" in name)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj was loaded with weights that differ"):
        logits(tmp_path)


def test_zero_points_that_the_scheme_denies_are_refused(tmp_path: Path) -> None:
    """transformers leaves them out without an error, as zero points of 0 are."""
    write(tmp_path, FORMATS["int-quantized, zero points"], "compressed")

    def symmetric(settings: dict[str, Any]) -> dict[str, Any]:
        settings["config_groups"]["group_0"]["weights"]["symmetric"] = True
        return settings

    relabel(tmp_path, symmetric)
    with pytest.raises(CheckpointError, match="loaded with weights that differ from those in its tensors"):
        logits(tmp_path)


def test_integers_that_are_said_to_be_floats_are_still_integers(tmp_path: Path) -> None:
    wanted = write(tmp_path, FORMATS["int-quantized"], "frozen")

    def as_floats(settings: dict[str, Any]) -> dict[str, Any]:
        settings["config_groups"]["group_0"] |= {"weights": FP8, "format": "float-quantized"}
        return settings

    relabel(tmp_path, as_floats)
    assert_same(logits(tmp_path), wanted)


@pytest.mark.parametrize(
    ("stored", "labelled"), [("int-quantized", "pack-quantized"), ("pack-quantized", "naive-quantized")]
)
def test_another_format_than_that_of_the_tensors_is_refused(stored: str, labelled: str, tmp_path: Path) -> None:
    write(tmp_path, FORMATS[stored], "compressed")

    def other(settings: dict[str, Any]) -> dict[str, Any]:
        settings["config_groups"]["group_0"]["format"] = labelled
        return settings

    relabel(tmp_path, other)
    with pytest.raises(CheckpointError, match=rf"not stored as .*Allowed: 'weight(_packed)?' for {labelled}"):
        logits(tmp_path)


@pytest.mark.parametrize("changes", [{"format": [""]}, {"config_groups": ["a"]}, {"ignore": [0]}])
def test_a_label_that_cannot_be_read_is_named(changes: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, FORMATS["pack-quantized"], "compressed")
    relabel(tmp_path, lambda settings: settings | changes)
    with pytest.raises(CheckpointError, match=r"(?s)quantization_config.*config\.json.*Correct that entry"):
        logits(tmp_path)


@pytest.mark.parametrize("name", ["float-quantized", "int-quantized", "naive-quantized"])
def test_what_was_loaded_is_compared_with_the_tensors(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers loads by the label alone."""
    write(tmp_path, FORMATS[name], "frozen", zero_points=True)
    monkeypatch.setattr(architectures, "_status_by_layout", lambda tensors, labelled: labelled)
    with pytest.raises(CheckpointError) as failed:
        logits(tmp_path)
    for part in ("model.layers.", "differ from", "'frozen'", "Correct quantization_config in config.json"):
        assert part in str(failed.value)
