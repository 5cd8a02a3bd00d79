"""GGUF checkpoints that llama.cpp itself computes. Most of it needs the extra `llama-cpp`."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mlflow_compress import demo
from mlflow_compress.compression import METHODS, compress_model, gguf_model, method_config, pipeline
from mlflow_compress.errors import CheckpointError, ConfigError, MissingDependencyError, ReloadMismatchError
from mlflow_compress.models import architectures
from mlflow_compress.models.identity import weights_hash
from mlflow_compress.models.loading import LoadConfig, LoadedModel, load_model
from mlflow_compress.records import Request
from mlflow_compress.scoring.engine import Scorer, ScoringConfig
from mlflow_compress.scoring.generation.generate import generate_until
from tests.compress_models import (
    check_here,
    logits,
    make_llama,
    make_mistral,
    make_qwen2,
    make_qwen3,
    mean_kl,
    token_rows,
)

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("no_fresh_process")]
needs_llama_cpp = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="needs the extra 'llama-cpp'"
)
NAIVE = """
import json, sys, numpy, llama_cpp
model = llama_cpp.Llama(sys.argv[1], n_ctx=512, logits_all=True, flash_attn=True, verbose=False)
for i, row in enumerate(json.load(sys.stdin)):
    model.reset()
    model.eval(row)
    numpy.save(f"{sys.argv[2]}/{i}.npy", model.scores[: len(row)])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model as Q8_0 that llama.cpp computes."""
    out = tmp_path_factory.mktemp("native") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "reload_in_fresh_process", check_here)
        config = method_config("gguf", bits=8, native="true")
        manifest = compress_model(str(demo.MODEL_DIR), "gguf", config, [], out)
    assert manifest.label == "gguf-q8_0-native" and manifest.settings["native"] is True
    assert manifest.reload["max_abs_diff"] == 0.0
    return out


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(LoadConfig(path=str(folder)))


def dequantized(folder: Path, out: Path) -> Path:
    """Return the same file without the word in its configuration."""
    out.mkdir()
    for path in folder.iterdir():
        if path.is_file():
            (out / path.name).write_bytes(path.read_bytes().replace(b'"native_gguf": true', b'"native_gguf": false'))
    return out


@needs_llama_cpp
def test_rounded_activations_move_the_model_a_little(folder: Path, loaded: LoadedModel, tmp_path: Path) -> None:
    plain = dequantized(folder, tmp_path / "plain")
    ids = token_rows(demo.MODEL_DIR, (demo.DATA_DIR / "corpus.txt").read_text(), rows=4, length=128)
    native = loaded.model(input_ids=ids).logits
    assert 1e-6 < mean_kl(logits(plain, ids), native) < 2e-4  # 2.7e-5 when this was written
    assert torch.equal(native, loaded.model(input_ids=ids).logits)
    assert weights_hash(plain) != weights_hash(folder)


@needs_llama_cpp
def test_scores_are_those_of_a_naive_loop(folder: Path, loaded: LoadedModel, tmp_path: Path) -> None:
    text = (demo.DATA_DIR / "corpus.txt").read_text().split("\n")
    contexts = [line for line in text if 20 < len(line) < 200][:6]
    requests = [
        Request("t", str(i), 0, j, j, context, end, len(end), len(end))
        for i, context in enumerate(contexts)
        for j, end in enumerate((" the mill", " Oru", " nine geese and a very long way home"))
    ]
    scorer = Scorer(loaded, ScoringConfig(progress=False))
    scores, _ = scorer.score(requests)
    encoded = scorer.encoder.encode(requests)
    # What llama-cpp-python's own class computes for each row, from an empty context each.
    command, given = (
        [sys.executable, "-c", NAIVE, str(folder / "model.gguf"), str(tmp_path)],
        [e.inputs.tolist() for e in encoded],
    )
    subprocess.run(command, check=True, capture_output=True, text=True, input=str(given))
    rows = [torch.from_numpy(np.load(tmp_path / f"{i}.npy")).log_softmax(-1) for i in range(len(given))]
    expected = [
        float(row[-len(e.targets) :].gather(1, torch.from_numpy(e.targets.astype(np.int64))[:, None]).sum())
        for row, e in zip(rows, encoded, strict=True)
    ]
    assert scores.column("loglik").tolist() == pytest.approx(expected, abs=1e-4)
    report = scorer.report
    assert report is not None and report.path == "plain"
    assert "keeps its caches itself" in str(report.plain_reason) and "NativeGgufForCausalLM" in str(
        report.whole_model_reason
    )


def test_cache_types_are_llama_cpps_alone() -> None:
    quantized = method_config("gguf", bits=8, native="true", type_k="q8_0", type_v="q4_0")
    assert METHODS.get("gguf").label(quantized) == "gguf-q8_0-native-kq8_0-vq4_0"
    with pytest.raises(ConfigError, match=r"native=true\. Got: 'q8_0, f16'\. Give native=true, or use method kv-cache"):
        method_config("gguf", type_k="q8_0")


@needs_llama_cpp
def test_fewer_bits_in_llama_cpps_cache_move_the_model_more(folder: Path, loaded: LoadedModel, tmp_path: Path) -> None:
    """In order of the rounding: a step of 1/254 of a block's largest number, and of 1/16, that of the demo's Q4_0."""
    ids = token_rows(demo.MODEL_DIR, (demo.DATA_DIR / "corpus.txt").read_text(), rows=4, length=128)
    plain, moved = loaded.model(input_ids=ids).logits, []
    for kind in ("q8_0", "q4_0"):
        config = method_config("gguf", bits=8, native="true", type_k=kind, type_v=kind)
        compress_model(str(demo.MODEL_DIR), "gguf", config, [], tmp_path / kind)
        assert weights_hash(tmp_path / kind) != weights_hash(folder)
        moved.append(mean_kl(plain, load_model(LoadConfig(path=str(tmp_path / kind))).model(input_ids=ids).logits))
    assert 0 < 20 * moved[0] < moved[1] < 0.1
    only_keys = method_config("gguf", bits=8, native="true", type_k="q4_0")
    compress_model(str(demo.MODEL_DIR), "gguf", only_keys, [], tmp_path / "keys")
    keys = mean_kl(plain, load_model(LoadConfig(path=str(tmp_path / "keys"))).model(input_ids=ids).logits)
    assert moved[0] < keys < moved[1]


@needs_llama_cpp
def test_padding_is_not_read(loaded: LoadedModel) -> None:
    ids = token_rows(demo.MODEL_DIR, (demo.DATA_DIR / "corpus.txt").read_text(), rows=2, length=12)
    right, left = torch.ones_like(ids), torch.ones_like(ids)
    right[1, 7:], left[1, :5] = 0, 0
    short = loaded.model(input_ids=ids[1:, :7]).logits[0]
    assert torch.equal(loaded.model(input_ids=ids, attention_mask=right).logits[1, :7], short)
    shifted = torch.cat([ids[:, 7:], ids[:, :7]], dim=1)
    padded = loaded.model(input_ids=shifted, attention_mask=left, logits_to_keep=3).logits
    assert padded.shape[1] == 3 and torch.equal(padded[1], short[-3:])
    with pytest.raises(NotImplementedError, match="keeps its caches itself"):
        loaded.model(input_ids=ids, past_key_values=object())


@needs_llama_cpp
def test_generation_with_caches_is_generation_without(loaded: LoadedModel) -> None:
    lines = (demo.DATA_DIR / "corpus.txt").read_text().split("\n")
    prompts = [line[: 20 + 7 * i] for i, line in enumerate(line for line in lines if len(line) > 80)][:4]
    found = generate_until(loaded, prompts, until=("\n",), max_new_tokens=36)
    for prompt, text in zip(prompts, found, strict=True):
        ids = loaded.tokenizer(prompt, return_tensors="pt")["input_ids"]
        start = ids.shape[1]
        for _ in range(36):
            best = loaded.model(input_ids=ids, logits_to_keep=1).logits[0, -1].argmax()
            if int(best) == loaded.tokenizer.eos_token_id:
                break
            ids = torch.cat([ids, best.reshape(1, 1)], dim=1)
        assert text == loaded.tokenizer.decode(ids[0, start:], skip_special_tokens=True).split("\n")[0]
    assert len(set(found)) > 1


@needs_llama_cpp
@pytest.mark.parametrize(
    ("make", "method"), [(make_qwen2, "gguf"), (make_qwen3, "gguf"), (make_mistral, "gguf"), (make_llama, "gguf-k")]
)
def test_other_models_and_methods(make: Any, method: str, tmp_path: Path) -> None:
    base = make(tmp_path / "base", hidden_size=256, intermediate_size=256, num_attention_heads=4)
    manifest = compress_model(str(base), method, method_config(method, native="true"), [], tmp_path / "out")
    assert manifest.label.endswith("-native") and manifest.reload["max_abs_diff"] == 0.0


@needs_llama_cpp
def test_a_file_that_llama_cpp_reads_otherwise_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = make_llama(tmp_path / "base")
    monkeypatch.setattr(gguf_model, "interleave_heads", lambda rows, heads: rows)
    monkeypatch.setattr(gguf_model, "deinterleave_heads", lambda rows, heads: rows)
    with pytest.raises(ReloadMismatchError, match="differ too much from those of the dequantized file"):
        compress_model(str(base), "gguf", method_config("gguf", bits=8, native="true"), [], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@needs_llama_cpp
def test_what_llama_cpp_cannot_open_is_one_clear_error(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in folder.glob("*.*"):
        (broken / path.name).write_bytes(path.read_bytes()[: 5000 if path.suffix == ".gguf" else None])
    with pytest.raises(CheckpointError, match=r"llama\.cpp cannot load the file"):
        load_model(LoadConfig(path=str(broken)))
    ended = load_model(LoadConfig(path=str(folder))).model
    ended.engine.process.kill()
    for reason in (r"llama\.cpp ended with code -9", "interrupted while it answered"):
        with pytest.raises(CheckpointError, match=reason):
            ended(input_ids=torch.zeros((1, 3), dtype=torch.int64))


def test_without_the_extra_nothing_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "llama_cpp" else find(name, *a))
    METHODS.get("gguf").require_backend(method_config("gguf"))
    with pytest.raises(MissingDependencyError, match=r"not installed: llama_cpp\. .*\[llama-cpp\]"):
        compress_model("no such model", "gguf", method_config("gguf", native="true"), [], tmp_path / "out")
    (tmp_path / "model.gguf").write_bytes(b"")
    (tmp_path / "config.json").write_text('{"native_gguf": true}')
    with pytest.raises(MissingDependencyError, match=r"computed by llama\.cpp.*\[llama-cpp\]"):
        architectures.loading_options(tmp_path)
