"""Mixtures of experts: every expert is compressed, and the saved model computes the same as the one in memory."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from mlflow_compress.compression import METHODS, CheckpointManifest, compress_model, method_config
from mlflow_compress.compression.calibration_tokens import prepare_calibration
from mlflow_compress.compression.methods.gguf_k import mean_squares
from mlflow_compress.errors import CheckpointError, UnsupportedError
from mlflow_compress.models import stored_weights
from mlflow_compress.models.architectures import linear_experts, loading_options
from mlflow_compress.models.loading import LoadConfig, load_model
from mlflow_compress.models.placement import Offload
from mlflow_compress.models.source_model import resolve
from tests.compress_models import TEXT, make_gpt_oss, make_mixtral, make_mixture, mean_kl, token_rows
from tests.unit.scoring_models import kl_of_rounding, rounding_of
from tests.unit.test_compress_gguf import nearest_in_blocks

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers and the backends warn while loading

MAKERS = {"mixtral": make_mixtral, "qwen3moe": make_mixture}
STORED = {"mixtral": "block_sparse_moe.experts.{}.w1", "qwen3moe": "mlp.experts.{}.gate_proj"}
QUANTIZING = ("rtn", "gptq", "awq", "w8a8", "fp8", "nvfp4", "mxfp4", "mxfp8", "autoround")
PRUNING = ("wanda", "sparsegpt")
K_QUANTS = {"gguf-k", "gguf-imatrix"}
GROUP = 32
SMALL = {"group_size": GROUP, "calibration_samples": 4, "calibration_length": 64, "iters": 4}

Bases = Callable[[str], Path]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Bases:
    folder = tmp_path_factory.mktemp("mixtures")

    def base(architecture: str) -> Path:
        path = folder / architecture
        return path if path.exists() else MAKERS[architecture](path)

    return base


def settings(method: str, **changes: Any) -> Any:
    known = METHODS.get(method).Config.model_fields
    return method_config(method, **{name: value for name, value in SMALL.items() if name in known}, **changes)


def logits_of(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    model = load_model(LoadConfig(path=str(folder), device="cpu")).model
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=ids).logits
    return logits


def stored_bits(folder: Path, bits: int, per_layer: int) -> float:
    """Return the bits per weight: `bits`, a scale of 16 bits for each group of 32, and `per_layer` bits a layer."""
    matrices = resolve(str(folder)).matrices
    weights = sum(rows * columns for rows, columns in matrices.values())
    return bits + 16 / GROUP + per_layer * len(matrices) / weights


@pytest.mark.usefixtures("no_fresh_process")
@pytest.mark.parametrize("architecture", MAKERS)
@pytest.mark.parametrize("method", [*QUANTIZING[:-1], pytest.param("autoround", marks=[pytest.mark.ci])])
def test_every_expert_is_quantized(method: str, architecture: str, bases: Bases, tmp_path: Path) -> None:
    base, out = bases(architecture), tmp_path / "out"
    manifest = compress_model(str(base), method, settings(method), TEXT, out)
    tensors = load_file(out / "model.safetensors")
    for layer in (0, 1):
        for number in range(4):
            name = f"model.layers.{layer}.{STORED[architecture].format(number)}"
            assert f"{name}.weight_scale" in tensors  # as the architecture's files name it
            assert tensors.get(f"{name}.weight_packed", tensors.get(f"{name}.weight")).dtype != torch.bfloat16
    assert not any("gate_up_proj" in name for name in tensors)
    # w8a8 and fp8 have one scale per row; awq's default has a zero point of 4 bits per group.
    four = {"rtn": (4.5, 4.6), "gptq": (4.5, 4.6), "autoround": (4.5, 4.6), "awq": (4.6, 4.8), "nvfp4": (4.5, 4.6)}
    low, high = {**four, "mxfp4": (4.24, 4.3)}.get(method, (8.1, 8.5))
    assert low < manifest.bits_per_weight < high
    ids = token_rows(base, TEXT[0], rows=2, length=64)
    assert 0 < mean_kl(logits_of(base, ids), logits_of(out, ids)) < 0.1


@pytest.mark.usefixtures("no_fresh_process")
@pytest.mark.parametrize("architecture", MAKERS)
@pytest.mark.parametrize("method", PRUNING)
def test_every_expert_is_pruned(method: str, architecture: str, bases: Bases, tmp_path: Path) -> None:
    base, out = bases(architecture), tmp_path / "out"
    manifest = compress_model(str(base), method, settings(method), TEXT, out)
    tensors, before = (load_file(folder / "model.safetensors") for folder in (out, base))
    assert tensors.keys() == before.keys()  # a plain checkpoint of the architecture
    experts = [name for name in tensors if ".experts." in name]
    assert len(experts) == 2 * 4 * 3
    # Wanda removes half of each row, SparseGPT its threshold too: a weight more in a block of at least 64 x 64.
    for found in (manifest.sparsity, *(float((tensors[name] == 0).float().mean()) for name in experts)):
        assert 0.5 <= found <= 0.5 + 64.0**-2
    assert manifest.bits_per_weight == 16.0
    plain = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    ids = token_rows(base, TEXT[0], rows=2, length=64)
    with torch.inference_mode():
        assert torch.equal(plain(input_ids=ids).logits, logits_of(out, ids))


@pytest.mark.usefixtures("no_fresh_process")
@pytest.mark.parametrize("architecture", MAKERS)
def test_rounded_experts_are_those_that_one_rounds_by_hand(architecture: str, bases: Bases, tmp_path: Path) -> None:
    base, out = bases(architecture), tmp_path / "out"
    manifest = compress_model(str(base), "rtn", settings("rtn", bits=8), TEXT, out)
    assert manifest.bits_per_weight == pytest.approx(stored_bits(base, 8, per_layer=2 * 64))  # its shape: two int64
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    rounded = resolve(str(base)).linear.keys() | {name for name, _ in linear_experts.fused_experts(model)}
    for name, weight in model.named_parameters():
        if name.rpartition(".")[0] in rounded:
            groups = weight.data.reshape(*weight.shape[:-1], -1, GROUP)
            scale = (groups.abs().amax(-1, keepdim=True) * 2 / 255).bfloat16().float()  # as it is stored
            weight.data = ((groups / scale).round().clamp(-128, 127) * scale).reshape(weight.shape)
    ids = token_rows(base, TEXT[0], rows=2, length=64)
    with torch.inference_mode():
        expected = model(input_ids=ids).logits
    assert mean_kl(expected, logits_of(out, ids)) <= kl_of_rounding(model, ids)


@pytest.mark.usefixtures("no_fresh_process")
def test_awq_scales_the_router_with_the_experts(bases: Bases, tmp_path: Path) -> None:
    for architecture in MAKERS:
        base, out = bases(architecture), tmp_path / architecture
        compress_model(str(base), "awq", settings("awq", bits=8), TEXT, out)
        after, before = (load_file(folder / "model.safetensors") for folder in (out, base))
        router = next(name for name in before if name.endswith(".gate.weight"))
        norm = "model.layers.0.post_attention_layernorm.weight"
        factors = before[norm].float() / after[norm].float()
        assert factors.std() > 0.01  # the norm was scaled down, and the router up by the same factors
        # Four roundings to bfloat16, of 2⁻⁹ each: of the factors as the norm shows them, and of the router.
        router_before, router_after = before[router].float() * factors, after[router].float()
        assert ((router_after - router_before).abs() <= 4 * 2**-9 * router_before.abs()).all()


@pytest.mark.usefixtures("no_fresh_process")
@pytest.mark.parametrize("method", ["gptq", "awq", "wanda"])
def test_an_expert_without_tokens_is_named(method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # Of the logits of the rows a, -a, b, -b and 0, two of the first four are positive: the fifth expert is never chosen.
    base, out = make_mixture(tmp_path / "base", num_experts=5), tmp_path / "out"
    tensors = load_file(base / "model.safetensors")
    for layer in (0, 1):
        a, b = tensors[f"model.layers.{layer}.mlp.gate.weight"][:2].clone()
        tensors[f"model.layers.{layer}.mlp.gate.weight"] = torch.stack([a, -a, b, -b, torch.zeros_like(a)])
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level(logging.WARNING):
        manifest = compress_model(str(base), method, settings(method), TEXT, out)
    assert CheckpointManifest.read(out) == manifest and manifest.calibration is not None
    unused = manifest.calibration["experts_without_tokens"]
    assert isinstance(unused, list)
    assert [name for name in unused if ".0.mlp" in name] == ["model.layers.0.mlp.experts.4"]
    assert "model.layers.1.mlp.experts.4" in unused  # the inputs of this layer are so alike that others may be unused
    assert f"no calibration token to {len(unused)} experts: {', '.join(unused)}" in caplog.text


def test_experts_of_another_form_are_refused(tmp_path: Path) -> None:
    base = make_gpt_oss(tmp_path / "base")
    assert resolve(str(base)).experts == {}
    for method in (*QUANTIZING, *PRUNING):
        with pytest.raises(UnsupportedError, match=r"linear layers only.*experts.gate_up_proj.*GptOss.*Use a cast"):
            compress_model(str(base), method, settings(method), TEXT, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


@pytest.mark.usefixtures("no_fresh_process")
def test_experts_that_compute_something_else_apart_are_refused(
    bases: Bases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llmcompressor.modeling.moe.linear_experts import ExpertMLPWithGate

    original = ExpertMLPWithGate.copy_from_experts_module

    def swapped(self: Any, experts: Any, index: int) -> None:
        original(self, experts, (index + 1) % experts.num_experts)

    monkeypatch.setattr(ExpertMLPWithGate, "copy_from_experts_module", swapped)
    with pytest.raises(UnsupportedError, match=r"form of its experts changes this model's function.*Mixtral"):
        compress_model(str(bases("mixtral")), "rtn", settings("rtn"), TEXT, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_fresh_process")
@pytest.mark.parametrize("architecture", MAKERS)
def test_experts_in_gguf_are_those_that_one_rounds_by_hand(architecture: str, tmp_path: Path) -> None:
    base = MAKERS[architecture](tmp_path / "base", **({"norm_topk_prob": True} if architecture == "qwen3moe" else {}))
    manifest = compress_model(str(base), "gguf", method_config("gguf", bits=4), [], tmp_path / "out")
    assert manifest.bits_per_weight == 4.5
    assert manifest.served_by == ["llama.cpp", *(["transformers"] if architecture == "qwen3moe" else [])]
    headers = stored_weights.read_headers(tmp_path / "out")
    assert headers.keys() == stored_weights.read_headers(base).keys()
    matrices = resolve(str(base)).stored_matrices
    assert {name: headers[f"{name}.weight"].shape for name in matrices} == matrices
    assert {headers[f"{name}.weight"].dtype for name in matrices} == {"Q4_0"}
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    for name, weight in model.named_parameters():
        if name.rpartition(".")[0] in resolve(str(base)).linear or ".experts." in name:
            weight.data = nearest_in_blocks(weight.data, half_steps=8)
    ids = token_rows(base, TEXT[0], rows=2, length=64)
    with torch.inference_mode():
        expected = model(input_ids=ids).logits
    assert mean_kl(expected, logits_of(tmp_path / "out", ids)) <= kl_of_rounding(model, ids)


def test_importances_of_experts_are_of_the_tokens_that_reach_them(bases: Bases) -> None:
    for architecture in MAKERS:
        source = resolve(str(bases(architecture)))
        text = prepare_calibration(source.tokenizer(), TEXT, samples=2, length=16, seed=0)
        means, unused = mean_squares(source.load("cpu"), [], text)
        model, inputs = source.load("cpu"), {}
        for name, experts in list(linear_experts.fused_experts(model)):
            linear = linear_experts.LinearExperts(experts)
            for number, expert in enumerate(linear):
                expert.gate_proj.weight.data, expert.up_proj.weight.data = experts.gate_up_proj.data[number].chunk(2)
                expert.down_proj.weight.data = experts.down_proj.data[number]
                for matrix in linear_experts.MATRICES:
                    place = f"{name}.{matrix}", number
                    getattr(expert, matrix).register_forward_pre_hook(
                        lambda _, args, place=place, inputs=inputs: inputs.update({place: args[0]})
                    )
            model.set_submodule(name, linear)
        with torch.inference_mode():
            model(input_ids=torch.from_numpy(text.ids))
        assert len(inputs) == 3 * (2 * 4 - len(unused))
        for (name, number), rows in inputs.items():
            torch.testing.assert_close(means[name][number], rows.double().square().mean(0), rtol=1e-5, atol=0)


@pytest.mark.parametrize("method", ["bnb-nf4", "hqq"])
def test_a_refusal_names_the_methods_that_take_experts(method: str, bases: Bases, tmp_path: Path) -> None:
    if method == "bnb-nf4":
        pytest.importorskip("bitsandbytes", reason="needs the extra 'bitsandbytes'")
    # Rows of 64 are no blocks of K-quants, and the router of the small Qwen3 does not norm, as llama.cpp does.
    for architecture, not_taken in (("mixtral", K_QUANTS), ("qwen3moe", {"gguf", *K_QUANTS})):
        with pytest.raises(UnsupportedError) as raised:
            compress_model(str(bases(architecture)), method, method_config(method), [], tmp_path / "out")
        named = str(raised.value).partition("compresses experts too: ")[2].rstrip(".")
        taken = {name for name, one in METHODS.items() if one.takes_experts(one.Config())}
        assert set(named.split(", ")) == taken - not_taken


def test_gptqmodel_does_not_take_experts() -> None:
    for method in ("gptq", "awq"):
        assert METHODS.get(method).takes_experts(method_config(method))
        assert not METHODS.get(method).takes_experts(method_config(method, backend="gptqmodel"))


def test_linear_experts_compute_what_transformers_computes(bases: Bases) -> None:
    for architecture in MAKERS:
        model = AutoModelForCausalLM.from_pretrained(bases(architecture), dtype=torch.float32).eval()
        ids = torch.arange(48)[None] % 28
        with torch.inference_mode():
            fused = model(input_ids=ids).logits
        error = rounding_of(model, ids)
        for name, experts in list(linear_experts.fused_experts(model)):
            linear = linear_experts.LinearExperts(experts)
            for number, expert in enumerate(linear):
                gate, up = experts.gate_up_proj.data[number].chunk(2)
                expert.gate_proj.weight.data, expert.up_proj.weight.data = gate, up
                expert.down_proj.weight.data = experts.down_proj.data[number]
            model.set_submodule(name, linear)
        with torch.inference_mode():
            assert (model(input_ids=ids).logits - fused).abs().max() <= 2 * error  # both are rounded


@pytest.mark.usefixtures("no_fresh_process")
@pytest.mark.parametrize(("method", "architecture"), [("rtn", "mixtral"), ("mxfp4", "mixtral"), ("mxfp4", "qwen3moe")])
def test_transformers_loads_experts_in_any_dtype(method: str, architecture: str, bases: Bases, tmp_path: Path) -> None:
    out = tmp_path / "out"
    weights_only = {"activations": False} if method == "mxfp4" else {}  # rounded ones move by steps with the dtype
    compress_model(str(bases(architecture)), method, settings(method, **weights_only), TEXT, out)
    ids = token_rows(bases(architecture), TEXT[0], rows=2, length=64)
    expected = logits_of(out, ids)  # in float32
    for dtype in (torch.float32, torch.float16):
        model = AutoModelForCausalLM.from_pretrained(out, dtype=dtype, **loading_options(out)).eval()
        with torch.inference_mode():
            found = model(input_ids=ids).logits
        assert found.dtype == dtype
        assert torch.equal(found, expected) or (dtype != torch.float32 and mean_kl(expected, found) < 1e-4)


@pytest.mark.usefixtures("no_fresh_process")
def test_a_checkpoint_whose_experts_have_no_loader_is_an_error(
    bases: Bases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    compress_model(str(bases("qwen3moe")), "rtn", settings("rtn"), TEXT, out)
    monkeypatch.setattr(linear_experts, "fused_experts", lambda model: iter(()))  # as in an architecture of that kind
    with pytest.raises(CheckpointError, match=r"Quantized experts.*cannot be loaded.*Qwen3MoeForCausalLM"):
        load_model(LoadConfig(path=str(out), device="cpu"))


@pytest.mark.ci
@pytest.mark.parametrize(("method", "architecture"), [("gptq", "mixtral"), ("w8a8", "qwen3moe"), ("wanda", "mixtral")])
def test_a_fresh_process_computes_the_same(method: str, architecture: str, bases: Bases, tmp_path: Path) -> None:
    manifest = compress_model(str(bases(architecture)), method, settings(method), TEXT, tmp_path / "out")
    ids = token_rows(bases(architecture), TEXT[0], rows=2, length=64)
    model = AutoModelForCausalLM.from_pretrained(bases(architecture), dtype=torch.float32).eval()
    assert manifest.reload["kl_max"] <= kl_of_rounding(model, ids)


@pytest.mark.slow
@pytest.mark.usefixtures("no_fresh_process")
@pytest.mark.parametrize("architecture", MAKERS)
@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_experts_are_compressed_from_the_disk(method: str, architecture: str, bases: Bases, tmp_path: Path) -> None:
    little = Offload(max_memory={"cpu": "100KiB"}, folder=None)
    in_memory = compress_model(str(bases(architecture)), method, settings(method), TEXT, tmp_path / "memory")
    from_disk = compress_model(
        str(bases(architecture)), method, settings(method), TEXT, tmp_path / "disk", device="balanced", offload=little
    )
    ids = token_rows(bases(architecture), TEXT[0], rows=2, length=64)
    allowed = kl_of_rounding(AutoModelForCausalLM.from_pretrained(bases(architecture), dtype=torch.float32), ids)
    assert from_disk.size_bytes == in_memory.size_bytes and from_disk.reload["kl_max"] <= allowed
    assert mean_kl(logits_of(tmp_path / "memory", ids), logits_of(tmp_path / "disk", ids)) <= allowed


@pytest.mark.usefixtures("no_fresh_process")
def test_methods_that_leave_experts_alone_say_nothing_about_their_tokens(bases: Bases, tmp_path: Path) -> None:
    manifest = compress_model(
        str(bases("mixtral")), "layer-drop-angular", settings("layer-drop-angular"), TEXT, tmp_path / "out"
    )
    assert manifest.calibration is not None and "experts_without_tokens" not in manifest.calibration
    assert manifest.bits_per_weight == 8.0  # one of two equal layers is left, in 16 bits


@pytest.mark.usefixtures("no_fresh_process")
def test_a_mixture_compressed_elsewhere_is_read_as_it_is(bases: Bases, tmp_path: Path) -> None:
    base, made = bases("mixtral"), tmp_path / "made"
    original = compress_model(str(base), "w8a8", settings("w8a8"), TEXT, made)
    (made / "compression.json").unlink()
    adopted = compress_model(
        str(base), "checkpoint", method_config("checkpoint", checkpoint=str(made)), [], tmp_path / "out"
    )
    assert adopted.bits_per_weight == original.bits_per_weight and adopted.size_bytes == original.size_bytes
