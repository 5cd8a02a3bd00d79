"""GGUF files: exact sizes, exact values, other element types, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from transformers import AutoModelForCausalLM, AutoTokenizer

import mlflow_compress as mc
from mlflow_compress.compression import compress_model, method_config
from mlflow_compress.compression.gguf_model import deinterleave_heads, interleave_heads
from mlflow_compress.errors import CheckpointError, UnsupportedError
from mlflow_compress.models import stored_weights
from mlflow_compress.models.gguf_file import from_gguf_names, pre_tokenizer_name, text_warning, to_gguf_name
from mlflow_compress.models.identity import weights_hash
from tests.compress_models import TEXT, logits, make_llama, make_mistral, make_qwen2, make_qwen3, token_rows
from tests.unit.scoring_models import U, rounding_of

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("no_fresh_process")]


def nearest_in_blocks(weight: torch.Tensor, half_steps: int) -> torch.Tensor:
    """Round to nearest with one float16 step a block of 32: the value of largest magnitude is `-half_steps` steps."""
    blocks = weight.reshape(-1, 32)
    step = blocks.gather(1, blocks.abs().argmax(1, keepdim=True)) / -half_steps
    inverse = torch.where(step == 0, 0.0, 1 / step)
    whole = (blocks * inverse + half_steps + 0.5).floor().clamp(0, 2 * half_steps - 1) - half_steps
    return (whole * step.half().float()).reshape(weight.shape)


@pytest.mark.parametrize("make", [make_llama, make_mistral, make_qwen2, make_qwen3])
def test_the_file_means_rounded_weights(make: Any, tmp_path: Path) -> None:
    base = make(tmp_path / "base")
    for bits, half_steps in ((5, 16), (4, 8)):
        manifest = compress_model(str(base), "gguf", method_config("gguf", bits=bits), [], tmp_path / str(bits))
        assert manifest.bits_per_weight == bits + 0.5 and manifest.label == f"gguf-q{bits}_0"
        assert manifest.sparsity is None and list(manifest.weight_files) == ["model.gguf"]
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                module.weight.data = nearest_in_blocks(module.weight.data, half_steps)
        ids = token_rows(base, TEXT[0], rows=2, length=64)
        with torch.inference_mode():
            expected = model(input_ids=ids).logits
        there = logits(tmp_path / str(bits), ids)
        assert (expected - there).abs().max() <= 2 * rounding_of(model, ids)  # both are rounded
    assert weights_hash(tmp_path / "5") != weights_hash(tmp_path / "4")


def test_embeddings_are_quantized_on_request_and_keep_their_type_otherwise(tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base", dtype=torch.float16)
    for embeddings, kind in (("false", "F16"), ("true", "Q8_0")):
        config = method_config("gguf", bits=8, embeddings=embeddings)
        compress_model(str(base), "gguf", config, [], tmp_path / embeddings)
        tensors = stored_weights.read_headers(tmp_path / embeddings)
        assert {tensors[f"{name}.weight"].dtype for name in ("model.embed_tokens", "lm_head")} == {kind}
        assert tensors["model.layers.0.mlp.down_proj.weight"] == stored_weights.StoredTensor(
            "Q8_0", (64, 128), 64 * 4 * 34
        )
        assert tensors["model.norm.weight"].dtype == "F32"
    reader = GGUFReader(tmp_path / "true" / "model.gguf")
    assert reader.fields["tokenizer.ggml.model"].contents() == "no_vocab"  # the tests' tokenizer is no byte-level BPE


def test_ways_to_split_text_have_llama_cpps_names() -> None:
    plain, digits = {"type": "ByteLevel", "use_regex": True}, {"type": "Digits", "individual_digits": True}
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    merged = {"type": "ByteLevel", "use_regex": False}

    def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
        return {"type": "Sequence", "pretokenizers": list(steps)}

    assert pre_tokenizer_name(plain) == "gpt-2"
    assert pre_tokenizer_name(sequence(digits, plain)) == "smollm"
    assert pre_tokenizer_name(sequence({"type": "Split", "pattern": {"Regex": words}}, merged)) == "llama-bpe"
    qwen2 = words.replace("{1,3}", "")
    assert pre_tokenizer_name(sequence({"type": "Split", "pattern": {"Regex": qwen2}}, merged)) == "qwen2"
    for unknown in (
        None,
        {**plain, "add_prefix_space": True},
        merged,
        sequence(plain, digits),
        sequence({"type": "Split", "pattern": {"Regex": "x"}}, merged),
    ):
        assert pre_tokenizer_name(unknown) is None


NAMES = {  # as llama.cpp's loader asks for them
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.12.input_layernorm": "blk.12.attn_norm",
    "model.layers.12.self_attn.q_proj": "blk.12.attn_q",
    "model.layers.12.self_attn.k_proj": "blk.12.attn_k",
    "model.layers.12.self_attn.v_proj": "blk.12.attn_v",
    "model.layers.12.self_attn.o_proj": "blk.12.attn_output",
    "model.layers.12.self_attn.q_norm": "blk.12.attn_q_norm",
    "model.layers.12.self_attn.k_norm": "blk.12.attn_k_norm",
    "model.layers.12.post_attention_layernorm": "blk.12.ffn_norm",
    "model.layers.12.mlp.gate_proj": "blk.12.ffn_gate",
    "model.layers.12.mlp.up_proj": "blk.12.ffn_up",
    "model.layers.12.mlp.down_proj": "blk.12.ffn_down",
}


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_names_translate_both_ways(architecture: str) -> None:
    back = from_gguf_names(architecture, 13)
    for ours, theirs in NAMES.items():
        if architecture != "qwen3" and theirs.endswith(("q_norm", "k_norm")):
            assert theirs not in back
            continue
        for part in ("weight", "bias"):
            assert to_gguf_name(f"{ours}.{part}", architecture=architecture, n_layers=13) == f"{theirs}.{part}"
        assert back[theirs] == ours
    per_layer = {"llama": 9 + 4, "qwen2": 9, "qwen3": 11}  # a Llama may be a Mixtral: its router and its experts
    assert len(back) == 3 + 13 * per_layer[architecture]


@pytest.mark.parametrize("name", ["model.layers.13.mlp.up_proj.weight", "model.layers.0.mlp.experts.up_proj.scale"])
def test_a_parameter_without_a_name_in_gguf_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match=r"GGUF has no name for a parameter of a llama model\. Got: 'model"):
        to_gguf_name(name, architecture="llama", n_layers=13)


def test_a_file_of_an_architecture_that_gguf_does_not_know_is_refused(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "newllama")
    writer.add_block_count(1)
    writer.add_tensor("token_embd.weight", np.zeros((2, 2), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="cannot be named: 'newllama' is unknown"):
        stored_weights.read_headers(tmp_path)


def test_rows_translate() -> None:
    assert interleave_heads(np.arange(8), 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    rows = np.arange(24).reshape(12, 2)
    assert np.array_equal(deinterleave_heads(interleave_heads(rows, 2), 2), rows)


def test_the_frequencies_of_llama_3_are_in_the_file(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    base = make_llama(tmp_path / "base", rope_parameters=rope)
    compress_model(str(base), "gguf", method_config("gguf", bits=8), [], tmp_path / "out")
    stored = {t.name: t.data for t in GGUFReader(tmp_path / "out" / "model.gguf").tensors}["rope_freqs.weight"]
    expected = []
    for i in range(8):  # as llama.cpp's converter computes them
        wavelength = 2 * np.pi * 10000.0 ** (i / 8)
        smooth = (64 / wavelength - 1.0) / (4.0 - 1.0)
        middle = 1 / ((1 - smooth) / 8.0 + smooth)
        expected.append(1.0 if wavelength < 64 / 4.0 else 8.0 if wavelength > 64 / 1.0 else middle)
    assert stored.tolist() == pytest.approx(expected, rel=16 * U)  # fewer than 16 operations in float32


def test_what_cannot_be_written_or_read_is_refused(base: Path, tmp_path: Path) -> None:
    narrow = make_llama(tmp_path / "narrow", intermediate_size=80)
    with pytest.raises(UnsupportedError, match=r"do not divide the 80 input features of .*down_proj"):
        compress_model(str(narrow), "gguf", None, [], tmp_path / "out")
    linear = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    scaled = make_llama(tmp_path / "scaled", rope_parameters=linear)
    with pytest.raises(UnsupportedError, match=r"scaled in this way.*Allowed: default, llama3\. Got: 'linear'"):
        compress_model(str(scaled), "gguf", None, [], tmp_path / "out")
    windows = make_mistral(tmp_path / "windows", sliding_window=32)
    with pytest.raises(UnsupportedError, match=r"Sliding-window.*128 tokens\. Got: 'sliding_window=32'"):
        compress_model(str(windows), "gguf", None, [], tmp_path / "out")
    compress_model(str(base), "gguf", None, [], tmp_path / "made")
    with pytest.raises(UnsupportedError, match="The model is a GGUF file"):
        compress_model(str(tmp_path / "made"), "rtn", None, [], tmp_path / "out")
    path = tmp_path / "made" / "model.gguf"
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(CheckpointError, match="cannot be read"):
        stored_weights.read_headers(tmp_path / "made")


def test_a_byte_level_vocabulary_is_written_and_quantize_says_where_text_differs(base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    made = mc.compress("demo", "gguf", bits=8, store=folder, output_dir=str(tmp_path / "out"))
    fields = GGUFReader(made.folder / "model.gguf").fields
    assert fields["tokenizer.ggml.model"].contents() == "gpt2" and fields["tokenizer.ggml.pre"].contents() == "smollm"
    assert "normalizer Replace): send token ids to llama-server" in made.summary
    assert fields["general.description"].contents() == made.warning
    assert "token ids in a library only" in (text_warning(AutoTokenizer.from_pretrained(base)) or "")


def test_zeros_of_the_baseline_are_not_named_as_pruned(tmp_path: Path) -> None:
    halved = mc.compress("demo", "fp16", store=tmp_path / "store", output_dir=str(tmp_path / "out"))
    assert "zero" not in halved.summary
    pruned = mc.compress("demo", "magnitude", store=tmp_path / "store", output_dir=str(tmp_path / "out"))
    assert "% of them zero (" in pruned.summary and "in the baseline)" in pruned.summary
